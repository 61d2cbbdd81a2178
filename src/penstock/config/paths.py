"""The files that a config names: the settings that are paths, and where each file lies.

A path in a config file is relative to that file, or else to the shell's folder. A run's own config has
absolute paths (`data/identity.py`).
"""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.plugins import parse

MODELS = ("path", "tokenizer", "reference")  # name a model folder, a run, a hub name or `demo`
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def map_paths(value: Any, change: Callable[[str, str, bool], str], key: str = "") -> Any:
    """The tree with `change(key, name, is_code)` in place of each name that may be a path.

    A name is code if it is the file or the module of an object, such as `reward.py` in `reward.py:score`.
    """
    if isinstance(value, dict):
        return {
            name: map_paths(item, change, f"{key}.{name}".removeprefix("."))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [map_paths(item, change, f"{key}[{i}]") for i, item in enumerate(value)]
    is_policy = value == "policy" and key.startswith("teachers.")  # a teacher that is no folder
    if not isinstance(value, str) or not value or is_policy:
        return value
    if code := parse(value):
        return f"{change(key, code[0], True)}:{code[1]}"
    *above, last = key.split(".")
    in_options = any(part.partition("[")[0].endswith("options") for part in above)
    is_path = last in (*MODELS, "data") or (in_options and "://" not in value)
    return change(key, value, False) if is_path else value


def models_of_runs(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the model of its newest checkpoint for each run folder that stands for a model."""

    def newest(key: str, name: str, is_code: bool) -> str:
        if is_code or key.rpartition(".")[2] not in MODELS:
            return name
        models = list(Path(name).expanduser().glob("checkpoints/step-*/model"))
        steps = {int(model.parent.name.removeprefix("step-")): model.parent for model in models}
        return str(model_folder(steps[max(steps)])) if steps else name

    return map_paths(tree, newest)


def model_folder(checkpoint: Path) -> Path:
    """The model of a checkpoint for use outside its run: the running average of the weights, if it has one."""
    average = checkpoint / "ema"
    return average if average.is_dir() else checkpoint / "model"


def beside(tree: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with each file of the config's folder named by its path from the shell's folder.

    Other names stay as they are. Second: for the key of each file that is in neither place, a sentence.
    """
    missing: dict[str, str] = {}

    def place(key: str, name: str, is_code: bool) -> str:
        if is_code and not name.endswith(".py"):  # a module
            file = folder / f"{name.replace('.', '/')}.py"
            is_own = file.is_file() and not importlib.util.find_spec(name.partition(".")[0])
            return str(file) if is_own else name
        is_bare = not ("/" in name or "." in name)  # a name such as `addition`
        is_model = key.rpartition(".")[2] in MODELS
        if name.startswith(("~", "RUN/")) or (is_bare and not is_model) or name == "demo":
            return name
        if (folder / name).exists() or ("*" in name and glob.glob(str(folder / name))):
            return str(folder / name)
        is_file = is_code or Path(name).suffix in _DATA_FILES
        if is_file and "*" not in name and not Path(name).exists():
            tried = dict.fromkeys(str((place / name).absolute()) for place in (folder, Path()))
            missing[key] = f"got {name!r}, allowed: a file that exists; tried {' and '.join(tried)}"
        return name

    return map_paths(tree, place), missing
