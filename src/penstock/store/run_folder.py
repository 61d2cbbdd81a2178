"""The folder of one run: its paths and settings, and how it is made, found and locked.

runs/NAME/  config.toml  configs/until-step-N.toml (earlier ones)  journal.db  metrics.jsonl  rollouts.jsonl  data/  eval/  checkpoints/  logs/

The settings of a run are in its journal; config.toml and configs/ are copies for people, and count
only until the journal's first record.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

from penstock.config import Config
from penstock.config.changes import differing
from penstock.config.secrets import refuse_secrets
from penstock.config.source import load_config, to_toml, validate
from penstock.errors import JournalDamaged, RunError, UserError
from penstock.files import existing, network_file_system, pasted, sync, write_whole
from penstock.store import trust
from penstock.store.command_log import FILE as COMMANDS
from penstock.store.journal import Journal, is_empty

_UNTIL = "until-step-"  # names of copies
_IN_FORCE, _EARLIER = "config", "config until step "  # names of facts in the journal
_INSIDE = "RUN/"  # begins a path of data that is in the run folder, which may be moved
_LOOKS_PASSED = 10_000  # tries; a look takes some microseconds
LOST_AFTER = "lost after step "  # begins the name of a fact: what was seen of later steps
CONFIG, JOURNAL, METRICS, ORIGIN = "config.toml", "journal.db", "metrics.jsonl", "origin.json"
RESCORED = "rescored.jsonl"  # of a fork with other rewards
FORK_OF = "fork of"  # the name of a fact of forks


@dataclass(slots=True, frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path
    # folders above that its start made
    made: tuple[Path, ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def commands(self) -> Path:
        """The log of a service, which a run has not."""
        return self.path / COMMANDS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def record(self) -> dict[str, str]:
        """What the journal holds about the run's identity; empty before its first record."""
        if not self.journal.is_file() or is_empty(self.journal):
            return {}
        with contextlib.closing(Journal.look(self.journal)) as journal:
            return journal.read_identity()

    def config(self) -> Config:
        """The config in force."""
        return self.eras()[-1].config

    def eras(self, record: Mapping[str, str] | None = None) -> list[Era]:
        """The configs that were in force, in order; the last one has no end.

        `record`: what `record()` returned, if it was read already.
        """
        record = self.record() if record is None else record
        if _IN_FORCE in record:
            try:
                kept = {name: json.loads(record[name]) for name in record if _EARLIER in name}
                ends = {int(name.removeprefix(_EARLIER)): validate(kept[name]) for name in kept}
                last = validate(json.loads(record[_IN_FORCE]))
            except UserError:
                raise
            except (TypeError, ValueError) as error:  # damage can put any type anywhere
                raise JournalDamaged(
                    f"journal {self.journal}: damaged: settings: {error}"
                ) from error
        else:
            paths = self.path.glob(f"configs/{_UNTIL}*.toml")
            ends = {int(path.stem.removeprefix(_UNTIL)): _read(path) for path in paths}
            last = _read(self.path / CONFIG)
        old = [Era(self._outside(config), end) for end, config in sorted(ends.items())]
        return [*old, Era(self._outside(last), None)]

    async def record_config(
        self, journal: Journal, config: Config, facts: Mapping[str, str], *, after_step: int
    ) -> None:
        """Put `config` in force after a step, and keep the old one, in one record; renew the copies."""
        values = {_IN_FORCE: self._inside(config).model_dump_json(), **facts}
        *old, last = self.eras(journal.read_identity())
        if after_step and last.config != config:  # else no step was done under the old config
            old.append(Era(last.config, after_step))
        ended = {era.last_step: era for era in reversed(old)}  # the first was in force until then
        for step, era in ended.items():
            values[f"{_EARLIER}{step}"] = self._inside(era.config).model_dump_json()
        journal.record_identity(values)
        await journal.flush()
        journal.sync()  # a copy is never newer than the journal
        self.write_copies([*ended.values(), Era(config, None)])

    def write_copies(self, eras: Sequence[Era] | None = None) -> None:
        """Renew the copies of the journal's configs for people."""
        (self.path / "configs").mkdir(exist_ok=True)
        for era in self.eras() if eras is None else eras:
            name = CONFIG if era.last_step is None else f"configs/{_UNTIL}{era.last_step}.toml"
            copy = _copy(self._inside(era.config))
            if _text_of(self.path / name) != copy:
                write_whole(self.path / name, copy)

    def has_copy(self) -> bool:
        """Whether config.toml is there and not empty."""
        return bool(_text_of(self.path / CONFIG).strip())

    def edited_copy(self, wanted: Config) -> str:
        """What is wrong with config.toml in a phrase; empty if it agrees with the journal.

        It may also hold `wanted`, or an earlier config: a kill came between the journal and the copy.
        """
        if not self.has_copy():
            return f"{CONFIG} is missing or empty"
        eras = self.eras()
        try:
            copied = self._outside(load_config(self.path / CONFIG).config)
        except UserError as error:
            return f"{CONFIG} was edited ({error})"
        if copied in (wanted, *(era.config for era in eras)):
            return ""
        first, *more = differing(eras[-1].config, copied)
        others = f" and {len(more)} more" if more else ""
        return f"{CONFIG} was edited ({first}{others})"

    def _inside(self, config: Config) -> Config:
        """The config as it is kept: data in this folder is named without the folder."""
        here = f"{os.path.abspath(self.path)}/"
        return _map_data(config, lambda data: re.sub(f"^{re.escape(here)}", _INSIDE, data))

    def _outside(self, config: Config) -> Config:
        """A kept config with the place that data in this folder has now."""
        here = f"{os.path.abspath(self.path)}/"
        return _map_data(config, lambda data: re.sub(f"^{_INSIDE}", lambda _: here, data))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let only one process write the run; the lock ends with the process."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path / "lock", flags, 0o666)
        except OSError as error:
            raise UserError(f"run: {self.path}/lock cannot be opened: {error.strerror}") from None
        with os.fdopen(descriptor, "a+") as file:
            if not self._take_lock(file.fileno()):
                file.seek(0)
                owner = file.read().strip()
                raise UserError(
                    f"run: {self.path} is being trained by process {owner}; allowed: one at a time"
                )
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:  # a lock that names a process and that nobody holds: a kill
                with contextlib.suppress(OSError):  # read-only by now: the run's own fault says so
                    file.truncate(0)

    def _take_lock(self, descriptor: int) -> bool:
        """Take the lock alone; return False if a run holds it. A look holds it for a moment, shared."""
        for _ in range(_LOOKS_PASSED):
            for kind in (LOCK_EX, LOCK_SH):  # shared: only looks hold it, so try again
                try:
                    flock(descriptor, kind | LOCK_NB)
                    break
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise UserError(
                        f"run.dir: got {self.path.parent}, a file system without flock "
                        f"({error.strerror}), where two processes could write one run; allowed: "
                        "a disk with flock; choose one with run.dir=FOLDER"
                    ) from None
            else:
                return False
            if kind == LOCK_EX:
                return True
            os.sched_yield()
        return False

    def owner(self) -> Owner:
        """Whether a process trains the run now, or left it without an end."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return Owner.NONE
        with os.fdopen(descriptor, "rb") as file:
            try:
                flock(file, LOCK_SH | LOCK_NB)
            except BlockingIOError:
                return Owner.ALIVE
            except OSError:
                return Owner.NONE
            return Owner.KILLED if file.read(1) else Owner.NONE

    def check_inside(self, path: Path) -> None:
        """Raise a UserError if a link leads a path of this folder out of it."""
        if not path.parent.resolve().is_relative_to(self.path.resolve()):
            raise UserError(
                f"{path}: {path.parent} is a link out of the run folder, allowed: a folder in it"
            )

    def origin(self) -> Origin | None:
        """Where a fork's rollouts came from; None if the run generated its own."""
        path = self.path / ORIGIN
        if not path.is_file():
            return None
        try:
            return Origin(**json.loads(path.read_text()))
        except (TypeError, ValueError):
            raise RunError(
                f"fork {self.path}: its {ORIGIN} is damaged; fork the run again"
            ) from None


class Owner(StrEnum):
    """The process that trains a run."""

    NONE = "none"
    ALIVE = "alive"
    KILLED = "killed"


@dataclass(slots=True, frozen=True, kw_only=True)
class Origin:
    """Where the rollouts of a fork came from."""

    run: str  # folder of the run that generated them
    steps: int  # number of steps of that run whose groups are used
    digest: str  # digest of its weights after the last of these steps
    rescored: int | None = None  # rollouts with a score in RESCORED; None: made by an older version


@dataclass(slots=True, frozen=True)
class Era:
    """A config and the last step done under it; None while it is in force."""

    config: Config
    last_step: int | None


def _map_data(config: Config, change: Callable[[str], str]) -> Config:
    """The config with a change of every task's `data`."""
    tasks = (*config.tasks.values(), *config.eval.tasks.values())
    if all(change(task.data) == task.data for task in tasks):
        return config
    tree = config.model_dump()
    for task in (*tree["tasks"].values(), *tree["eval"]["tasks"].values()):
        task["data"] = change(task["data"])
    return validate(tree)


def _read(path: Path) -> Config:
    if not _text_of(path).strip():
        raise UserError(
            f"run: {path} is missing or empty and the journal has no settings: nothing was trained "
            "yet; start the run again under another run.name"
        )
    return load_config(path).config


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _copy(config: Config) -> str:
    """The text of a copy for people."""
    return (
        "# A copy for people. The settings in force are in journal.db; change one with: "
        f"penstock resume RUN KEY=VALUE\n{to_toml(config)}"
    )


def create(
    config: Config, origin: Origin | None = None, own_data: Sequence[Path] = ()
) -> RunFolder:
    """Make the folder of a new run; refuse a folder that exists, and never delete anything.

    `own_data`: files of data that the run keeps in its folder, and reads from there.
    """
    parent, name = Path(config.run.dir), config.run.name
    if name in (".", "..") or name != Path(name).name:
        raise UserError(f"run.name: got {name!r}, allowed: one folder name, without separators")
    check_disk(parent, config)
    refuse_secrets(config.model_dump())  # this writes the config
    above = existing(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"run.dir: got {str(parent)!r}, allowed: a folder") from None
    except OSError as error:
        raise _cannot_write(parent, error) from None
    path = parent / (name or _automatic_name(config))
    for number in itertools.count(2):
        try:
            # for its owner alone, and exclusive: of two runs that start with one name, one is refused
            path.mkdir(mode=0o700)
            break
        except FileExistsError:
            if name:
                is_run = (path / CONFIG).exists()
                way = f", or continue it with: penstock resume {pasted(path)}" if is_run else ""
                raise UserError(
                    f"run.name: {path} exists already{'' if is_run else ' and is no run'}; "
                    f"allowed: another run.name{way}"
                ) from None
            path = parent / f"{_automatic_name(config)}-{number}"
        except OSError as error:
            raise _cannot_write(parent, error) from None
    if origin is not None:  # before the config, which makes the folder a run
        (path / ORIGIN).write_text(json.dumps(asdict(origin), indent=1))
        sync(path / ORIGIN)
    for file in own_data:
        (path / "data").mkdir(exist_ok=True)
        shutil.copyfile(file, path / "data" / file.name)
        sync(path / "data" / file.name)
    kept = {str(file): f"{_INSIDE}data/{file.name}" for file in own_data}
    config = _map_data(config, lambda data: kept.get(data, data))
    trust.remember(path, config)
    # at once: no kill can come between making a run and its config, until the journal has it
    (path / CONFIG).write_text(_copy(config), encoding="utf-8")
    sync(path / CONFIG)
    made = tuple(itertools.takewhile(lambda folder: folder != above, path.parents))
    for folder in (path, *made, above):  # what was made, and the folder that names the first of it
        sync(folder)
    return RunFolder(path, made)


def check_disk(folder: Path, config: Config) -> None:
    """Refuse a folder on a network file system, unless the config allows it."""
    kind = network_file_system(folder)
    if kind and not config.run.allow_network_disk:
        raise UserError(
            f"run.dir: got {folder} on {kind}, a network file system, where a look at the journal "
            "from another machine can destroy it; allowed: a local disk, or "
            "run.allow_network_disk=true if only this machine opens the run"
        )


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"run.dir: nothing can be written to {folder} ({error.strerror}), "
        "allowed: a folder that can be written; choose one with run.dir=FOLDER"
    )


def find(path: str | Path) -> RunFolder:
    """Find an existing run by its folder, or by its name below `runs/`."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / CONFIG).is_file() or (candidate / JOURNAL).is_file():
            _check_plain(candidate)
            return RunFolder(candidate)
        if (candidate / COMMANDS).is_file():
            raise UserError(
                f"run: got {str(candidate)!r}, the folder of a service, allowed for it: "
                "penstock audit, replay, runs, dashboard, and serve to go on with it"
            )
    raise UserError(
        f"run: got {str(path)!r}, allowed: a run folder (one that holds {JOURNAL} or {CONFIG})"
    )


def _check_plain(folder: Path) -> None:
    """Refuse a folder with pipes, sockets or devices, which a look would wait for or act on."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):  # the run may be under way
                if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise UserError(f"run: {path} is a pipe, socket or device, allowed: files")


def remove(folder: RunFolder) -> None:
    """Remove the folder of a failed start, and what the start made above it, where that is empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for above in folder.made:
            above.rmdir()


def delete(folder: RunFolder) -> None:
    """Remove a run with all its files; refuse one that is under way."""
    if folder.owner() is Owner.ALIVE:
        raise UserError(f"run {folder.path}: it is under way, allowed: a run that has ended")
    if folder.path.is_symlink():
        raise UserError(f"run {folder.path}: got a link, allowed: the folder itself")
    try:
        shutil.rmtree(folder.path)
    except OSError as error:
        raise RunError(f"run {folder.path}: not all of it could be removed: {error}") from error


def has_progress(path: Path) -> bool:
    """Whether the folder holds groups, metrics or checkpoints, which a removal would destroy."""
    metrics, journal = path / METRICS, path / JOURNAL
    told = metrics.exists() and metrics.stat().st_size > 0
    if told or any((path / "checkpoints").glob("step-*")):
        return True
    if not journal.exists() or is_empty(journal):
        return False
    with contextlib.closing(Journal.look(journal)) as look:
        return bool(look.query("SELECT 1 FROM groups LIMIT 1"))


def _automatic_name(config: Config) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{'-'.join(config.tasks)}-{config.algorithm.name.split(':')[-1]}-{stamp}"
