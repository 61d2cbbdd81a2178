"""The folder of one run: its paths, and how it is made, found and locked.

runs/NAME/  config.toml  configs/until-step-N.toml (earlier ones)  journal.db  metrics.jsonl  rollouts.jsonl  eval/  checkpoints/  logs/
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.config.source import load_config, to_toml
from penstock.disk import network_file_system, write_whole
from penstock.errors import UserError
from penstock.journal import Journal, is_empty

_UNTIL = "until-step-"
CONFIG, JOURNAL, METRICS, ORIGIN = "config.toml", "journal.db", "metrics.jsonl", "origin.json"


@dataclass(slots=True, frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

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

    @property
    def recompute_logs(self) -> Path:
        """Logs of a recomputation, apart from those of the run itself, which may be under way."""
        return self.logs / "recompute"

    def config(self) -> Config:
        return load_config(self.path / CONFIG).config

    def eras(self) -> list[Era]:
        """Return the configs that were in force, in order; the last one has no end."""
        old = [
            Era(load_config(path).config, int(path.stem.removeprefix(_UNTIL)))
            for path in self.path.glob(f"configs/{_UNTIL}*.toml")
        ]
        return [*sorted(old, key=lambda era: era.last_step or 0), Era(self.config(), None)]

    def change_config(self, config: Config, after_step: int) -> None:
        """Put `config` in force after a step; keep the old config beside it."""
        kept = self.path / "configs" / f"{_UNTIL}{after_step}.toml"
        kept.parent.mkdir(exist_ok=True)
        if after_step and not kept.exists():  # else no step was done under the old config
            write_whole(kept, (self.path / CONFIG).read_text(encoding="utf-8"))
        write_whole(self.path / CONFIG, to_toml(config))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let only one process write the run; the lock ends with the process."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip()
                raise UserError(
                    f"run: {self.path} is being trained by process {owner}; allowed: one at a time"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def origin(self) -> Origin | None:
        """Return where a fork's rollouts came from; None if the run generated its own."""
        path = self.path / ORIGIN
        return Origin(**json.loads(path.read_text())) if path.is_file() else None


@dataclass(slots=True, frozen=True, kw_only=True)
class Origin:
    """Where the rollouts of a fork came from."""

    run: str  # folder of the run that generated them
    steps: int  # number of steps of that run whose groups are used
    digest: str  # digest of its weights after the last of these steps


@dataclass(slots=True, frozen=True)
class Era:
    """A config and the last step done under it; None while it is in force."""

    config: Config
    last_step: int | None


def create(config: Config) -> RunFolder:
    """Make the folder of a new run; refuse a folder that exists, and never delete anything."""
    parent, name = Path(config.run.dir), config.run.name
    if name in (".", "..") or name != Path(name).name:
        raise UserError(f"run.name: got {name!r}, allowed: one folder name, without separators")
    check_disk(parent, config)
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"run.dir: got {str(parent)!r}, allowed: a folder") from None
    except OSError as error:
        raise _cannot_write(parent, error) from None
    path = parent / (name or _automatic_name(config))
    for number in itertools.count(2):
        try:
            path.mkdir()  # exclusive: if two runs start with one name, one is refused
            break
        except FileExistsError:
            if name:
                raise UserError(
                    f"run.name: {path} exists already; allowed: another run.name, "
                    f"or continue it with: penstock resume {path}"
                ) from None
            path = parent / f"{_automatic_name(config)}-{number}"
        except OSError as error:
            raise _cannot_write(parent, error) from None
    (path / CONFIG).write_text(to_toml(config), encoding="utf-8")
    return RunFolder(path)


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
        if (candidate / CONFIG).is_file():
            return RunFolder(candidate)
    raise UserError(f"run: got {str(path)!r}, allowed: a run folder (one that holds {CONFIG})")


def remove(folder: RunFolder) -> None:
    """Remove the folder of a failed start."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()  # only if it is empty


def has_progress(path: Path) -> bool:
    """Return whether the folder holds groups, metrics or checkpoints, which a removal would destroy."""
    metrics = path / METRICS
    told = metrics.exists() and metrics.stat().st_size > 0
    return told or any((path / "checkpoints").glob("step-*")) or _has_groups(path / JOURNAL)


def _has_groups(path: Path) -> bool:
    if not path.exists() or is_empty(path):
        return False
    journal = Journal.open(path, readonly=True)
    try:
        return bool(journal.query("SELECT 1 FROM groups LIMIT 1"))
    finally:
        journal.close()


def _automatic_name(config: Config) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{'-'.join(config.tasks)}-{config.algorithm.name.split(':')[-1]}-{stamp}"
