"""What a run depends on outside its folder, and what of it has changed: data, tokenizer, code.

The journal keeps these facts by name: the content (SHA-256, length) of each dataset, of the tokenizer, of
the chat template and of the models that only score (teachers, the reference), and the versions of the code. A
command that continues a run measures them again. Content that the run reads must be the same; changed code is
told. The policy's weights have digests of their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.config import Config
from penstock.config.demo import model_file
from penstock.config.plugins import MODELS, fingerprint, map_paths
from penstock.data.dataset import Dataset
from penstock.data.source import (
    HUB,
    Content,
    ContentHash,
    file_content,
    find_files,
    hub_name,
    names_files,
)
from penstock.errors import UserError
from penstock.files import pasted
from penstock.store.run_folder import CONFIG, RunFolder

Facts = Mapping[str, str]
CODE, TOKENIZER, TEMPLATE, TOTAL_STEPS = "code", "tokenizer", "chat template", "total steps"
MACHINE, OVERLAP = "machine", "overlap of "  # the second: "overlap of eval.tasks.A and tasks.B"
PTX = "train.ptx.data"
# the key of a model that scores: a setting may name another, with other content
_WEIGHTS = "weights of "
_OWN_FILE = re.compile(r"(.+\.py):\w+")  # a user's own object, as in `my_rewards.py:score`
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "vllm", "reasoning-gym")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("vocab.txt", "special_tokens_map.json", "added_tokens.json"),
)


def absolute_paths(config: Config) -> Config:
    """The config with absolute paths, so that it names the same files in any directory.

    run.dir stays as it is: nothing reads it once the folder is made, and the folder may be moved.
    """
    return Config.model_validate(map_paths(config.model_dump(), _absolute))


def _absolute(key: str, name: str, is_code: bool) -> str:
    """The absolute path of what is there; data keeps no relative path, and a dataset of the hub is marked."""
    last, there = key.rpartition(".")[2], Path(name).expanduser()
    if is_code:
        is_path = name.endswith(".py") and there.is_file()
    elif last == "data" and key != PTX:
        if hub := hub_name(name):
            return f"{HUB}{hub}"
        is_path = names_files(name)
    else:
        is_model = last in MODELS and name != "demo" and there.is_dir()
        is_path = is_model or key == PTX or ("/" in name and there.exists())
    return os.path.abspath(there) if is_path else name


# -- measuring ---------------------------------------------------------------------------------


def measure(config: Config, datasets: Mapping[str, Dataset] | None = None) -> dict[str, str]:
    """The facts of what the config names; `datasets`, by key, have been loaded already.

    Other files are hashed, if they exist; other generated data is left out.
    """
    facts = {}
    for key, (source, files) in _files(config).items():
        if files and key not in (datasets or {}):
            facts[key] = _fact(source, file_content(*files))
    for key, dataset in (datasets or {}).items():
        counts = {"prompts": len(dataset), "skipped": dataset.num_skipped_long}
        facts[key] = _fact(dataset.source, dataset.content, **counts, longest=dataset.longest)
    tokenizer = _tokenizer_facts(config.model.tokenizer or config.model.path)
    models = scorer_facts(config)
    return {**facts, **models, **tokenizer, **code_fact(config), MACHINE: _machine()}


def scorer_facts(config: Config) -> dict[str, str]:
    """The content of the models that score and are never trained.

    The adapters' own base is no scorer: the digests of the policy's weights cover it.
    """
    facts = {}
    for key, path in _scorers(config).items():
        if settings := model_file(path, "config.json"):
            files = sorted((*settings.parent.glob("*.safetensors"), *settings.parent.glob("*.bin")))
            about = ((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
            facts[key] = _fact(path, _content_once(settings.read_bytes(), *about))
    return facts


def _scorers(config: Config) -> dict[str, str]:
    """The paths of the teachers and of the reference, by the names of their facts."""
    named = {
        f"{_WEIGHTS}teachers.{name}.path": teacher.path
        for name, teacher in config.teachers.items()
        if teacher.is_loaded
    }
    algorithms = (config.algorithm, *map(config.task_algorithm, config.tasks))
    if config.train.reference:
        named[f"{_WEIGHTS}train.reference"] = config.train.reference
    elif (
        any(algorithm.kl_beta for algorithm in algorithms)
        and not config.model.lora.rank
        and not config.train.reference_moves
    ):
        named[f"{_WEIGHTS}model.path"] = config.model.path
    return named


@functools.cache
def _content_once(settings: bytes, *files: tuple[Path, int, int]) -> Content:
    """The content of a model: (path, size, time of change) of its weights, which may take a minute to read."""
    parts = ContentHash()
    parts.add(settings)
    for path, _, _ in files:
        parts.add_file(path)
    return parts.content()


def _machine() -> str:
    """The CPU cores and GPUs that the driver's machine has."""
    gpus = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    return json.dumps({"cpus": len(os.sched_getaffinity(0)), "gpus": gpus})


def _files(config: Config) -> dict[str, tuple[str, list[Path]]]:
    """The data that names files, and these files, by key, such as `tasks.math.data`; none: gone."""
    named: dict[str, tuple[str, dict[str, Any], str]] = {}
    for name, task in config.tasks.items():
        named[f"tasks.{name}.data"] = (task.data, task.data_options, "train")
    for name, judged in config.eval.tasks.items():
        named[f"eval.tasks.{name}.data"] = (judged.data, judged.data_options, "")
    if config.train.ptx.data:
        named[PTX] = (config.train.ptx.data, {}, "")
    sources = {}
    for key, (data, options, split) in named.items():
        if names_files(data):
            try:
                sources[key] = (data, find_files(data, options, split))
            except UserError:  # told where the data is loaded, with what is allowed
                sources[key] = (data, [])
    return sources


def _fact(source: str | Path, content: Content, **more: int) -> str:
    known = {"source": str(source), "sha256": content.sha256, "bytes": content.num_bytes}
    return json.dumps({**known, **more})


def _tokenizer_facts(source: str) -> dict[str, str]:
    """Hash the tokenizer's files in their folder or in the hub's cache; the chat template apart."""
    paths = {name: model_file(source, name) for name in _TOKENIZER_FILES}
    files = {name: path.read_bytes() for name, path in paths.items() if path is not None}
    if not files:  # not in the cache yet: it will be compared after it was loaded
        return {}
    settings = json.loads(files.pop("tokenizer_config.json", b"{}"))
    template = settings.pop("chat_template", None)
    if file := model_file(source, "chat_template.jinja"):
        template = file.read_text("utf-8")
    files["tokenizer_config.json"] = json.dumps(settings, sort_keys=True).encode()
    parts = ContentHash()
    for name, content in sorted(files.items()):
        parts.add(name.encode())
        parts.add(content)
    text = ContentHash()
    text.add(json.dumps(template).encode())
    written = _fact(source, text.content(), present=int(template is not None))
    return {TOKENIZER: _fact(source, parts.content()), TEMPLATE: written}


def code_fact(config: Config) -> dict[str, str]:
    """The versions of Penstock, Python and libraries, and hashes of the user's own files."""
    versions = dict(_installed())
    for path in sorted(set(_own_files(config.model_dump()))):
        versions[path] = file_content(Path(path)).sha256[:12]
    tasks = (*config.tasks.values(), *config.eval.tasks.values())
    for name in sorted({reward.type for task in tasks for reward in task.rewards}):
        if digest := fingerprint(name):
            versions[name] = digest
    return {CODE: json.dumps(versions)}


@functools.cache
def _installed() -> dict[str, str]:
    """The versions of what this process runs, read once: files that change later are not run."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    versions = {"penstock": __version__, "penstock source": digest.hexdigest()[:12]}
    versions["python"] = platform.python_version()
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _own_files(value: Any) -> list[str]:
    if isinstance(value, str):
        code = _OWN_FILE.fullmatch(value)
        return [code[1]] if code and Path(code[1]).is_file() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [path for item in items for path in _own_files(item)]


# -- comparing ---------------------------------------------------------------------------------


def changed_content(recorded: Facts, measured: Facts) -> dict[str, str]:
    """By name, a phrase for each dataset, model, tokenizer or template that is not the recorded one."""
    phrases = {}
    for name in sorted(recorded.keys() & measured.keys()):
        is_content = name.endswith(".data") or name.startswith(_WEIGHTS)
        if not is_content and name not in (TOKENIZER, TEMPLATE):
            continue
        before, after = json.loads(recorded[name]), json.loads(measured[name])
        if before["sha256"] != after["sha256"]:
            change = f"{_brief(before)} -> {_brief(after)}"
            phrases[name] = f"{name}: {after['source']} has other content ({change})"
    return phrases


def _brief(fact: dict[str, Any]) -> str:
    return f"{fact['bytes']:,} bytes, sha256 {fact['sha256'][:8]}"


def changed_code(recorded: Facts, measured: Facts) -> str:
    """A phrase for the code that changed; empty if none did or none was recorded."""
    before = json.loads(recorded.get(CODE, "{}"))
    after = json.loads(measured.get(CODE, "{}")) if before else {}
    changes = [
        f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
    return f"code changed since the run began: {', '.join(changes)}" if changes and after else ""


def check_files(folder: RunFolder, config: Config, accept_changes: bool) -> None:
    """Do what `check_content` does for files alone, before anything is loaded; name what is missing."""
    gone = {key: source for key, (source, files) in _files(config).items() if not files}

    def look(key: str, name: str, is_code: bool) -> str:
        if key.rpartition(".")[2] in MODELS and name.startswith("/") and not Path(name).exists():
            gone[key] = name
        return name

    map_paths(config.model_dump(), look)
    for key, source in gone.items():
        way = f", or name its new place with: penstock resume {pasted(folder.path)} {key}=PATH"
        way = "" if key.startswith("model.") or "[" in key else way
        raise UserError(f"{key}: got {source}, which does not exist; put it back{way}")
    check_content(folder, config, folder.record(), measure(config), accept_changes)


def check_content(
    folder: RunFolder, config: Config, record: Facts, measured: Facts, accept_changes: bool
) -> list[str]:
    """What has other content than the journal's record says; refuse it unless changes are accepted.

    Data of an evaluation and a model for which the user named another source are no difference.
    """
    last = folder.eras(record)[-1].config
    tasks, before = config.eval.tasks, last.eval.tasks
    renamed = {
        f"eval.tasks.{name}.data"
        for name in tasks.keys() & before.keys()
        if (tasks[name].data, tasks[name].data_options)
        != (before[name].data, before[name].data_options)
    }
    renamed |= {key for key, path in _scorers(config).items() if _scorers(last).get(key) != path}
    changed = changed_content(record, measured)
    phrases = [phrase for key, phrase in changed.items() if key not in renamed]
    if phrases and not accept_changes:
        raise UserError(
            f"{'; '.join(phrases)} than when the run began; put the old content back, or continue "
            f"with the new: penstock resume {pasted(folder.path)} --accept-changes"
        )
    return phrases


def check_copy(folder: RunFolder, wanted: Config) -> list[str]:
    """A note if config.toml is lost; refuse one that was edited, since edits have no effect."""
    wrong = folder.edited_copy(wanted)
    if not wrong or not folder.record():
        return []
    if not folder.has_copy():
        return [f"{wrong}: it is written again with the journal's settings"]
    raise UserError(
        f"{wrong}, but the settings in force are in the journal; change them with: "
        f"penstock resume {pasted(folder.path)} KEY=VALUE; to drop the edit, delete {CONFIG}"
    )


def differences(folder: RunFolder) -> list[str]:
    """Notes on what is no longer as in the run, for a replay or a fork of its journal.

    They train on the journal's prompts and settings; the text stream of train.ptx, the teachers and the reference
    are read again, and must be the same.
    """
    record, config = folder.record(), folder.config()
    if not record:
        return []
    measured = measure(config)
    changed = changed_content(record, measured)
    if used := [changed[key] for key in changed if key == PTX or key.startswith(_WEIGHTS)]:
        raise UserError(f"{used[0]} than when the run began; put the old content back")
    phrases = (folder.edited_copy(config), *changed.values(), changed_code(record, measured))
    return [f"note: {phrase}; the journal is used" for phrase in phrases if phrase]
