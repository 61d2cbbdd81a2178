"""Extension tables: a name -> "module:Class", and the user's own "module:Class" in its place.

Each package keeps one literal table. There are no decorators and no registration: a name from a config
is looked up when it is needed, so that importing Penstock never imports an optional package. A function
that no process could import, such as a lambda, is `python:NAME` while the program that has it gives it.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.errors import UserError

PYTHON = "python:"  # begins the name of an object that a Python program gives
_python_objects: ContextVar[Mapping[str, Any]] = ContextVar(
    "python_objects", default=MappingProxyType({})
)


@contextmanager
def python_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let `load` find these objects as `python:NAME` inside the block, also in its tasks and threads."""
    token = _python_objects.set({**_python_objects.get(), **objects})
    try:
        yield
    finally:
        _python_objects.reset(token)


def python_object(name: str) -> Any:
    """The object that the program gave under this name; None if there is none."""
    return _python_objects.get().get(name)


def importable(target: Any) -> str:
    """`module:name` if a new process can import the object; else the empty string."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module in (None, "__main__") or not str(name).isidentifier():
        return ""
    imported = sys.modules.get(str(module))
    is_same = getattr(imported, name, None) is target
    return f"{module}:{name}" if is_same and getattr(imported, "__spec__", None) else ""


def name_object(target: Any, objects: dict[str, Any]) -> str:
    """Add the object under a name of its own; return what a config calls it."""
    if not callable(target) and not hasattr(target, "score"):
        raise UserError(
            f"reward: got {target!r}, allowed: a name, a function, a dict with type, or a list of these"
        )
    base = str(getattr(target, "__name__", type(target).__name__))
    base = base if base.isidentifier() else "reward"
    name = next(
        n
        for n in (base, *(f"{base}_{i}" for i in range(2, 1000)))
        if objects.get(n, target) is target
    )
    objects[name] = target
    return f"{PYTHON}{name}"


def fingerprint(name: str) -> str:
    """Twelve digits that depend on the source of a `python:NAME` object; empty without such an object."""
    target = _python_objects.get().get(name.removeprefix(PYTHON))
    if target is None:
        return ""
    try:
        text = inspect.getsource(target)
    except (OSError, TypeError):  # `python -c`, or an object
        code = getattr(target, "__code__", None)
        text = f"{code.co_code!r}{code.co_consts!r}" if code else type(target).__qualname__
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse(name: str) -> tuple[str, str] | None:
    """The module or file, and the object in it, of `dotted.module:Name` or `FILE.py:Name`; None: neither.

    The only reader of such names: what it refuses is never imported.
    """
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py") and module.isprintable()
    is_module = all(part.isidentifier() for part in module.split("."))
    return (module, attribute) if attribute.isidentifier() and (is_file or is_module) else None


def check_name(kind: str, name: str, table: Mapping[str, str]) -> None:
    """Raise a UserError unless `name` is in the table or has the form of the user's own object."""
    if name not in table and not name.startswith(PYTHON) and parse(name) is None:
        allowed = ", ".join([*sorted(table), "or your own module:Name or FILE.py:Name"])
        raise UserError(f"{kind}: got {name!r}, allowed: {allowed}")


def load(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """The object that `name` stands for, importing its module."""
    check_name(kind, name, table)
    if name.startswith(PYTHON):
        objects, key = _python_objects.get(), name.removeprefix(PYTHON)
        if key not in objects:
            what = "agent" if kind.endswith("agent") else "reward"
            raise UserError(
                f"{kind}: got {name!r}, a function of the Python program that began the run; "
                f"allowed: the function again, from Python: penstock.resume(RUN, {what}=FUNCTION), "
                "or evaluate in place of resume"
            )
        return objects[key]
    parsed = parse(table.get(name, name))
    assert parsed is not None, name
    module_name, attribute = parsed
    fault = f"{kind}: got {name!r}, but {module_name}"
    try:
        module = _import(module_name)
    except ImportError as error:
        raise UserError(f"{fault} cannot be imported: {error}") from error
    except Exception as error:  # whatever the user's module raises is the user's mistake
        if name in table:
            raise
        said = error.msg if isinstance(error, SyntaxError) else error
        words = f"{type(error).__name__}: {said}{place_of(error)}"
        raise UserError(f"{fault} cannot be imported: {words}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{fault} has no {attribute!r}") from None


_NOT_THE_USERS = (  # where the code of Penstock, of Python and of libraries is
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)


def place_of(error: Exception) -> str:
    """ " (file:line)" of the user's code that raised; empty if there is none."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    theirs = frames_of_user(traceback.extract_tb(error.__traceback__))
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""


def frames_of_user(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames in files that are neither Penstock's nor Python's nor a library's."""
    return [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]


def _import(module_name: str) -> Any:
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ImportError(f"no such file: {path}")
        name = f"penstock_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path.resolve())
        if spec is None or spec.loader is None:
            raise ImportError(f"not a Python file: {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # of modules beside it, behind those that are installed
        spec.loader.exec_module(module)
        return module
    top = module_name.split(".")[0]
    is_known = top in sys.modules or importlib.util.find_spec(top) is not None
    if not is_known and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's module beside their config
    return importlib.import_module(module_name)


# -- the files that a config names --------------------------------------------------------------


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
    """The tree with a model for each checkpoint, and each run (its newest one), that stands for a model."""

    def newest(key: str, name: str, is_code: bool) -> str:
        if is_code or key.rpartition(".")[2] not in MODELS:
            return name
        folder = Path(name).expanduser()
        if (folder / "manifest.json").is_file():
            return str(model_folder(folder))
        models = list(folder.glob("checkpoints/step-*/model"))
        steps = {int(model.parent.name.removeprefix("step-")): model.parent for model in models}
        return str(model_folder(steps[max(steps)])) if steps else name

    return map_paths(tree, newest)


def model_folder(checkpoint: Path) -> Path:
    """The model of a checkpoint for use outside its run: the running average of the weights, if it has one."""
    average = checkpoint / "ema"
    return average if average.is_dir() else checkpoint / "model"


def _is_there(path: Path) -> bool:
    return path.exists() or ("*" in str(path) and bool(glob.glob(str(path))))


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
        if _is_there(folder / name):
            return str(folder / name)
        is_file = is_code or Path(name).suffix in _DATA_FILES
        if is_file and not _is_there(Path(name)):
            tried = dict.fromkeys(str((place / name).absolute()) for place in (folder, Path()))
            missing[key] = f"got {name!r}, allowed: a file that exists; tried {' and '.join(tried)}"
        return name

    return map_paths(tree, place), missing
