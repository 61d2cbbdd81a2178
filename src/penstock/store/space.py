"""What the machine has left for a run: its disk and its memory."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.config.memory import MASTER, count_parameters, moment_bytes

TOKEN = 12  # bytes of the journal for a token: id, log-prob, text
LOGPROB = 4  # more, with a teacher behind a server
ROLLOUT = 400  # bytes of the journal for a response, beside its tokens
LONG_LOG = 256 * 2**20  # bytes; SQLite moves the log into the journal after every 4 MiB
_AHEAD = 100  # steps whose journal must fit


@dataclass(slots=True, frozen=True, kw_only=True)
class DiskSpace:
    """What is free under a run folder, and what the run will write there next; in bytes."""

    folder: Path
    free: int
    checkpoint: int  # the next checkpoint
    journal: int  # the journal's growth over the next `ahead` steps
    ahead: int
    log: int = 0  # the journal's write-ahead log; SQLite empties it when nobody reads what is older

    @property
    def is_short(self) -> bool:
        return self.free < self.checkpoint + self.journal

    def __str__(self) -> str:
        return (
            f"{size_text(self.free)} are free in {self.folder}; the next checkpoint needs "
            f"{size_text(self.checkpoint)}, the journal {size_text(self.journal)} for the next {self.ahead} steps"
        )


class DiskWatch:
    """Looks at the free space before every step, which takes a few system calls."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        total_steps: int,
        *,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        first: tuple[int, int] | None = None,
    ) -> None:
        """first: a step and the size of the journal then; None: measure it at the first look."""
        self._folder, self._config, self._total = folder, config, total_steps
        self._free = free
        self._checkpoint = checkpoint_bytes(config)
        self._measured = False  # whether that is the size of a checkpoint of this run
        self._first = first

    def forecast(self, steps_done: int) -> str:
        """What the rest of the run will write, at most, and what is free, in one line."""
        config, settings = self._config, self._config.checkpoint
        journal = (self._total - steps_done) * _step_bytes(config)
        checkpoint, keep = self._checkpoint_bytes(), settings.keep + 1 + bool(settings.keep_best)
        free = self._free(self._folder)
        written = f"at most {size_text(journal)} of journal ({_token_bytes(config)} bytes a token)"
        cuts = any(config.task_sampling(task).cuts_tokens for task in config.tasks)
        if cuts or config.engine.options.get("router_replay"):
            written += " without what tokens are chosen from (docs/off-policy.md)"
        if checkpoint:
            written += (
                f" and {keep} checkpoints of {size_text(checkpoint)} (one while it is written)"
            )
        short = journal + keep * checkpoint > free
        return f"{'warning: ' if short else ''}disk: {written}; {size_text(free)} are free"

    def look(self, step: int) -> DiskSpace:
        """What is free before a step, and what will be written next."""
        log = _bytes_of(self._folder / "journal.db-wal")
        size = _bytes_of(self._folder / "journal.db") + log
        if self._first is None:
            self._first = step, size
        first, size_then = self._first
        ahead = min(_AHEAD, self._total - step + 1)
        growth = (size - size_then) / (step - first) if step > first else 0.0
        return DiskSpace(
            folder=self._folder,
            free=self._free(self._folder),
            checkpoint=self._checkpoint_bytes(),
            journal=int(growth * ahead),
            ahead=ahead,
            log=log,
        )

    def _checkpoint_bytes(self) -> int:
        """The size of a checkpoint of this run; before there is one, an estimate."""
        if self._measured:
            return self._checkpoint
        written = next((self._folder / "checkpoints").glob("step-*"), None)
        if written is not None:
            self._checkpoint, self._measured = folder_bytes(written), True
        return self._checkpoint


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below a folder; links count as links."""
    return sum(
        _bytes_of(os.path.join(parent, name))
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _bytes_of(path: str | Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:  # removed meanwhile
        return 0


def _step_bytes(config: Config) -> int:
    """The most that one step adds to the journal."""
    tasks = [config.task_sampling(name) for name in config.tasks]
    token = _token_bytes(config)
    group = max(task.num_generations * (ROLLOUT + token * task.max_tokens) for task in tasks)
    return group * config.train.groups_per_step


def _token_bytes(config: Config) -> int:
    return TOKEN + LOGPROB * any(map(config.asks_server, config.tasks))


def checkpoint_bytes(config: Config) -> int:
    """The size of a checkpoint from the model's safetensors files; 0 if there are none."""
    each = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    trained = 0 if config.model.lora.rank else MASTER + moment_bytes(config.train.moments)
    return count_parameters(config.model.path) * (each + trained)


def size_text(number: float) -> str:
    power = min(4, (max(int(number), 1).bit_length() - 1) // 10)
    value = number / 1024**power
    digits = 1 if power and value < 10 else 0
    return f"{value:.{digits}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


_MACHINE, _LIMIT, _USED = (
    Path("/proc/meminfo"),
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory.current"),
)


def available_mib() -> float | None:
    """The MiB that processes can still get; None where the system does not tell."""
    limits = []
    with contextlib.suppress(OSError):
        lines = _MACHINE.read_bytes().splitlines()
        limits += [int(line.split()[1]) / 1024 for line in lines if b"MemAvailable" in line]
    with contextlib.suppress(OSError):  # outside a container there is no such file
        limit, used = _LIMIT.read_bytes().strip(), _USED.read_bytes().strip()
        if limit.isdigit() and used.isdigit():
            limits.append((int(limit) - int(used)) / 2**20)
    return min(limits, default=None)
