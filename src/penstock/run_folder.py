"""The folder of one run: its paths, and how it is made, found and locked.

runs/NAME/  config.toml  configs/until-step-N.toml (earlier ones)  journal.db  metrics.jsonl  rollouts.jsonl  eval/  checkpoints/  logs/
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.config.source import load_config, to_toml
from penstock.errors import UserError

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
            _write_whole(kept, (self.path / CONFIG).read_text(encoding="utf-8"))
        _write_whole(self.path / CONFIG, to_toml(config))

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
    """Make the folder of a new run. Replace a folder without progress, refuse any other."""
    parent = Path(config.run.dir)
    if parent.exists() and not parent.is_dir():
        raise UserError(f"run.dir: got {str(parent)!r}, allowed: a folder")
    path = parent / config.run.name if config.run.name else _unused(parent, _automatic_name(config))
    if path.exists():
        if not path.is_dir() or has_progress(path):
            raise UserError(
                f"run.name: {path} exists already; allowed: another run.name, "
                f"or go on with: penstock resume {path}"
            )
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / CONFIG).write_text(to_toml(config), encoding="utf-8")
    return RunFolder(path)


def find(path: str | Path) -> RunFolder:
    """Find an existing run by its folder, or by its name below `runs/`."""
    for candidate in (Path(path), Path("runs") / path):
        if (candidate / CONFIG).is_file():
            return RunFolder(candidate)
    raise UserError(f"run: got {str(path)!r}, allowed: a run folder (one that holds {CONFIG})")


def _write_whole(path: Path, text: str) -> None:
    """Replace a file so that a crash leaves either the old or the new one."""
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def remove(folder: RunFolder) -> None:
    """Remove the folder of a failed start."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()  # only if it is empty


def has_progress(path: Path) -> bool:
    """Whether the folder holds metrics or checkpoints, which a new run would destroy."""
    metrics = path / METRICS
    checkpoints = path / "checkpoints"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints.glob("step-*"))


def _automatic_name(config: Config) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{'-'.join(config.tasks)}-{config.algorithm.name.split(':')[-1]}-{stamp}"


def _unused(parent: Path, name: str) -> Path:
    path, number = parent / name, 2
    while path.exists():
        path, number = parent / f"{name}-{number}", number + 1
    return path
