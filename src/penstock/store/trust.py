"""Whether a run folder is this user's own: only then, or once the user agrees, anything of it is executed.

A run names code, programs, servers and secrets, and may hold code. Whoever starts or allows a run has its
digests written to a file in the state folder: of its config with each file of code inside the run folder. A
folder is one's own while all its digests are known, wherever it was moved or copied to. `check` asks about any
other, or refuses where nobody can answer. Reading a run needs none of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config, plugins
from penstock.config.demo import model_file
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.files import say

_CODE = (".py", ".pyc", ".so", ".sh")
_DATA = ("data", "checkpoints")  # entries of a run folder whose other files are never executed
_TEXTS = ("data", "system_prompt", "tags", "stop", "name", "group", "project")  # a:b is no object


def remember(folder: Path, config: Config) -> None:
    """Note that this user runs the folder with this config, and copies of its model's code in checkpoints."""
    text, copies = _text(folder, config), []
    if config.model.trust_remote_code:
        models = {config.model.path, config.model.tokenizer or config.model.path}
        files = [model_file(model, "config.json") for model in models]
        copies = [path for file in files if file for path in file.parent.rglob("*.py")]
    _write(_digests(folder, config) | {_digest(text, _content(path)) for path in copies})


def check(folder: Path, configs: Sequence[Config], *, trust: bool = False) -> None:
    """Refuse to continue a run that had these configs, unless it is this user's own or is allowed now."""
    digests = {digest for config in configs for digest in _digests(folder, config)}
    if digests <= _known():
        return
    links = {f"write through the link {link}" for link in _links(folder)}
    acts = sorted(links.union(*(acts_of(config) for config in configs)))
    if not trust and not _user_agrees(folder, acts):
        raise UserError(
            f"run {folder}: you did not make it on this machine, or it was changed since, and it would "
            f"{'; '.join(acts) or 'train'}; look at that first, then allowed: the same with --trust"
        )
    _write(digests)


def load_trusted(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    trust: bool = False,
    bare: bool = False,
    with_tasks: bool = False,
) -> Config:
    """The config for a command that executes what it names: its files are there, and it may be trusted.

    A config file inside a run folder is checked as the run is; any other is the user's own. with_tasks:
    refuse a file that has no task of its own.
    """
    loaded = load_config(path, overrides, bare=bare)
    if with_tasks:
        loaded.require_tasks()
    loaded.require_files()
    for note in loaded.notes:
        say(f"note: {note}", error=True)
    parents = Path(path).absolute().parents[:2] if path is not None else ()
    for folder in parents:  # RUN/config.toml, RUN/configs/until-step-N.toml
        if (folder / "journal.db").exists():
            check(folder, [load_config(path).config], trust=trust)
    return loaded.config


# -- the question ------------------------------------------------------------------------------


def acts_of(config: Config) -> set[str]:
    """What running a config does beyond training, for the question: code, servers, secrets, clusters."""
    tree = config.model_dump(mode="json")
    names = [section.pop("name") for section in (tree["engine"], tree["algorithm"])]  # may be code
    acts = {*_acts(names, ""), *_acts(tree, "")}
    if config.launch.kind == "ray" and config.launch.address:
        acts.add(f"join the Ray cluster {config.launch.address}")
    return acts


def _acts(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _acts(item, name)
        if value.get("trust_remote_code") is True:
            yield f"execute code that comes with the model {value.get('path')}"
    elif isinstance(value, list) and key == "command":
        yield f"run {shlex.join(map(str, value))}"
    elif isinstance(value, list):
        for item in value:
            yield from _acts(item, key)
    elif isinstance(value, str) and value:
        parsed = plugins.parse(value)
        if parsed and (parsed[0].endswith(".py") or key not in _TEXTS):
            yield f"execute {value}"
        elif key in ("url", "urls", "servers"):
            yield f"connect to {value}"
        elif key == "python":
            yield f"run {value}"
        elif key.endswith("_variable"):
            yield f"send the environment variable {value}"
        elif key.endswith("_folder"):
            yield f"write to the folder {value}"


def _user_agrees(folder: Path, acts: Sequence[str]) -> bool:
    """Ask the user; False where there is no terminal to answer on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(
        f"You did not make {folder} on this machine, or it was changed since. It would:", error=True
    )
    for act in acts or ["train"]:
        say(f"  {act}", error=True)
    say("Allow this? [y/N] ", error=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- digests -----------------------------------------------------------------------------------


def _digests(folder: Path, config: Config) -> set[str]:
    """Digests of a config with each thing that decides what it executes; those of one's own are known."""
    text = _text(folder, config)
    facts = ["", *map(_content, _code(folder, text)), *_links(folder), *_local_modules(config)]
    return {_digest(text, fact) for fact in facts}


def _digest(text: str, fact: str) -> str:
    return hashlib.sha256(f"{text}\n{fact}".encode("utf-8", "surrogateescape")).hexdigest()


def _text(folder: Path, config: Config) -> str:
    """A config as it is in whatever place its folder has; settings of later versions do not change it."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(tree, sort_keys=True, ensure_ascii=False)
    return text.replace(f"{os.path.abspath(folder)}/", "RUN/")


def _code(folder: Path, text: str) -> Iterator[Path]:
    """The files of code inside a run folder: Python, libraries, and whatever its config names there."""
    for path in _files(folder):
        entry = path.relative_to(folder).parts[0]
        is_named = entry not in _DATA and f"RUN/{entry}" in text
        if path.is_file() and (is_named or path.suffix in _CODE):
            yield path


def _content(file: Path) -> str:
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _links(folder: Path) -> list[str]:
    """The links that lead out of a run folder."""
    return [
        f"{path.relative_to(folder)} -> {os.readlink(path)}"
        for path in _files(folder)
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())
    ]


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def _local_modules(config: Config) -> Iterator[str]:
    """Modules that the config would import from the working folder, by their place (see plugins.py)."""
    for act in acts_of(config):
        if parsed := plugins.parse(act.removeprefix("execute ")):
            place = Path.cwd() / parsed[0].partition(".")[0]
            if place.is_dir() or place.with_suffix(".py").is_file():
                yield str(place)


# -- the state folder --------------------------------------------------------------------------


def _known() -> set[str]:
    try:
        return set(_state().read_text().split())
    except OSError:
        return set()


def _write(digests: set[str]) -> None:
    """Add digests to the known ones; without a state folder every run is asked about."""
    new = sorted(digests - _known())
    with contextlib.suppress(OSError):
        _state().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(_state(), flags, 0o600), "w") as file:
            file.write("".join(f"{digest}\n" for digest in new))
            file.flush()
            os.fsync(file.fileno())


def _state() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(home):
        raise FileNotFoundError("no home folder")
    return Path(home) / "penstock" / "own-runs"
