"""What a run folder could do to its user, and whether this user allowed it.

A run names code, models with code, servers, secrets and clusters, and may hold links. Whoever makes a run
allows what it names: each such act is signed with a key from the user's config folder, one line of
RUN/trusted per act. A folder from somebody else has no valid lines, even if it is a changed copy of a
signed one: `check` then asks, or refuses where nobody can answer. Reading a run needs none of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import os
import re
import secrets
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config, plugins
from penstock.errors import UserError
from penstock.files import say

SIGNATURES = "trusted"
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
_TEXTS = ("data", "system_prompt", "tags", "stop", "name", "group", "project")  # a:b is no object


def acts_of(configs: Iterable[Config], folder: Path) -> list[str]:
    """What running these configs does beyond training: code, servers, secrets, clusters."""
    acts: set[str] = set()
    for config in configs:
        tree = config.model_dump(mode="json")
        for section in (tree.pop("engine"), tree.pop("algorithm")):  # their names may be code
            acts |= set(_acts(section.pop("name"), "", folder))
            acts |= set(_acts(section, "", folder))
        acts |= set(_acts(tree, "", folder))
        if config.launch.kind == "ray" and config.launch.address:
            acts.add(f"join the Ray cluster {config.launch.address}")
        if config.model.trust_remote_code:
            acts |= set(_acts_of_model(Path(config.model.path), folder))
    return sorted(acts)


def sign_config(folder: Path, config: Config) -> None:
    """Sign what a config of this user names, and the copies of the model's code in checkpoints."""
    copies = []
    if config.model.trust_remote_code:
        copies = [_by_content(file) for file in Path(config.model.path).glob("*.py")]
    sign(folder, [*acts_of([config], folder), *copies])


def acts_on_files(folder: Path) -> list[str]:
    """What continuing the run does to files: pickles it would load, links it would follow."""
    pickles = [
        f"load the pickle {path.relative_to(folder)}"
        for path in folder.glob("checkpoints/step-*/**/*")
        if path.suffix in _PICKLES
    ]
    links = [
        f"write through the link {path.relative_to(folder)} -> {os.readlink(path)}"
        for path in _links(folder)
        if not path.resolve().is_relative_to(folder.resolve())
    ]
    return sorted([*pickles, *links])


def check(folder: Path, acts: Sequence[str], *, trust: bool = False) -> None:
    """If this user has allowed all acts, or allows them now; then they are signed."""
    unknown = [act for act in acts if not _is_signed(folder, act)]
    if not unknown:
        return
    if not trust and not _user_agrees(folder, unknown):
        raise UserError(
            f"run {folder}: you did not make it on this machine, and it would {'; '.join(unknown)}; "
            "look at that first, then allowed: resume, replay, eval or train with --trust"
        )
    with contextlib.suppress(OSError):  # a copy that cannot be written is asked about again
        sign(folder, unknown)


def check_run(folder: Path, configs: Iterable[Config], *, trust: bool = False) -> None:
    """Do what `check` does for all that continuing a run with these configs would do."""
    check(folder, [*acts_of(configs, folder), *acts_on_files(folder)], trust=trust)


def sign(folder: Path, acts: Iterable[str]) -> None:
    """Note that this user allows these acts of the run; a home that cannot be written allows nothing."""
    try:
        key = _key(make=True)
    except OSError:
        return
    lines = {_signature(key, act) for act in acts} - _signatures(folder)
    if lines:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(folder / SIGNATURES, flags, 0o600), "w") as file:
            file.writelines(f"{line}\n" for line in sorted(lines))
            file.flush()
            os.fsync(file.fileno())


def check_config(path: str | None, config: Config, *, trust: bool = False) -> None:
    """Do what `check` does for a config file inside a run folder; any other is the user's own."""
    parents = Path(path).absolute().parents[:2] if path is not None else ()
    for folder in parents:  # RUN/config.toml, RUN/configs/until-step-N.toml
        if (folder / "journal.db").exists():
            check(folder, acts_of([config], folder), trust=trust)


# -- what a config names -----------------------------------------------------------------------


def _acts(value: Any, key: str, folder: Path) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _acts(item, name, folder)
        if value.get("trust_remote_code") is True and isinstance(value.get("path"), str):
            yield f"execute code that comes with the model {value['path']}"
    elif isinstance(value, list) and key == "command":
        yield from _run([str(word) for word in value], folder)
    elif isinstance(value, list):
        for item in value:
            yield from _acts(item, key, folder)
    elif isinstance(value, str) and value:
        module = (plugins.parse(value) or ("",))[0]
        if module.endswith(".py"):
            yield from _execute(value, Path(module), folder)
        elif module and key not in _TEXTS:
            yield from _execute_object(value, module, folder)
        elif re.match(r"https?://", value):
            yield f"connect to {value}"
        elif key == "python":
            yield from _run([value], folder)
        elif key.endswith("_variable"):
            yield f"send the environment variable {value}"
        elif key.endswith("_folder"):
            yield f"write to the folder {value}"


def _run(words: list[str], folder: Path) -> Iterator[str]:
    """Name a command by its words, and its files by their place or, inside the folder, their content."""
    files = [Path(word) for word in words if Path(word).is_file()]
    inside = [file for file in files if file.resolve().is_relative_to(folder.resolve())]
    places = [str(f.absolute()) for f in files if f not in inside and not f.is_absolute()]
    yield f"run {shlex.join(words)}" + (f" with {', '.join(places)}" if places else "")
    yield from (_by_content(file) for file in inside)


def _execute(name: str, file: Path, folder: Path) -> Iterator[str]:
    """Name code by the file it comes from; by its content, if it comes with the run."""
    if not file.is_file():
        return  # importing it fails
    if file.resolve().is_relative_to(folder.resolve()):
        yield _by_content(file)
    else:
        yield f"execute {name}" if file.is_absolute() else f"execute {name} in {file.absolute()}"


def _execute_object(name: str, module: str, folder: Path) -> Iterator[str]:
    """Name an installed object by its name, any other by its file too. Imports nothing."""
    package = module.partition(".")[0]
    if package == "penstock":
        return
    here = Path.cwd() / package
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:  # a module beside the user's config, see plugins.py
        for file in (here.with_suffix(".py"), here / "__init__.py"):
            yield from (f"{act} in {file}" for act in _execute(name, file, folder))
        return
    file = Path(spec.origin or "") if spec.origin not in ("built-in", "frozen") else Path()
    installed = (Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))
    if not file.is_file() or any(file.is_relative_to(place) for place in installed):
        yield f"execute {name}"
    else:
        yield from (f"{act} in {file}" for act in _execute(name, file, folder))


def _acts_of_model(model: Path, folder: Path) -> Iterator[str]:
    if model.is_dir() and model.resolve().is_relative_to(folder.resolve()):
        yield from (_by_content(file) for file in sorted(model.glob("*.py")))
    else:
        yield f"execute code that comes with the model {model}"


def _by_content(file: Path) -> str:
    return f"execute {file.name} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()})"


def _links(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink():
                yield path


# -- signatures --------------------------------------------------------------------------------


def _user_agrees(folder: Path, acts: Sequence[str]) -> bool:
    """Ask the user; False where there is no terminal to answer on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"You did not make {folder} on this machine. It would:", error=True)
    for act in acts:
        say(f"  {act}", error=True)
    say("Allow this? [y/N] ", error=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _is_signed(folder: Path, act: str) -> bool:
    try:
        return _signature(_key(make=False), act) in _signatures(folder)
    except OSError:
        return False


def _signature(key: bytes, act: str) -> str:
    return hmac.new(key, act.encode("utf-8", "surrogateescape"), "sha256").hexdigest()


def _signatures(folder: Path) -> set[str]:
    try:
        return set((folder / SIGNATURES).read_text(errors="replace").split())
    except OSError:
        return set()


def _key(*, make: bool) -> bytes:
    """This user's key; raise OSError if there is none (and none can be made)."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    if not os.path.isabs(home):
        raise FileNotFoundError("no home folder")
    path = Path(home) / "penstock" / "key"
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()
