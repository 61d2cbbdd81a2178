"""The runs of a folder as the dashboard sees them: which there are, what changed, and values that cost something to read.

A value is read again only when its run has changed, and only after a rest that is many times longer than
the reading took, so that looking at a run does not slow the machine that trains it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.inspection.runs import RunLine, read_line
from penstock.inspection.track.console import stretches
from penstock.inspection.track.logs import TIMELINE_FILE
from penstock.rollout.evaluation.evaluate import SUMMARY
from penstock.store.run_folder import CONFIG, JOURNAL, METRICS, ORIGIN, RunFolder

V = TypeVar("V")

_REST = 20.0  # a reading that took a second is repeated after 20 seconds at the earliest
_SPARKS = 60  # points of the small curve in the list
_FILES = (CONFIG, JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", METRICS, ORIGIN, "lock")
_FOLDERS = ("configs", "eval", "timeline")
_MORE_FILES = ("rollouts.jsonl", f"timeline/{TIMELINE_FILE}")


@dataclass(slots=True)
class _Value:
    version: str
    content: Any
    at: float  # when it was read
    cost: float  # CPU seconds


@dataclass(slots=True)
class ShownRun:
    """One run: its line in the list, and what was read of it."""

    id: str
    folder: RunFolder
    line: dict[str, Any] = field(default_factory=dict)
    _values: dict[str, _Value] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self, name: str, read: Callable[[RunFolder], V]) -> tuple[V, float]:
        """What `read` finds, and the seconds after which to ask again (0: it is of now)."""
        with self._lock:
            version, old = self.version(), self._values.get(name)
            if old is not None and old.version == version:
                return old.content, 0.0
            if old is not None and (rest := old.at + _REST * old.cost - time.monotonic()) > 0:
                return old.content, rest
            began = time.thread_time()
            content = read(self.folder)
            cost = time.thread_time() - began
            self._values[name] = _Value(version, content, time.monotonic(), cost)
            return content, 0.0

    def version(self) -> str:
        """A text that changes with every step and every evaluation of the run."""
        files = (self.folder.metrics, self.folder.evaluations / SUMMARY, self.folder.path / CONFIG)
        marks = [os.lstat(file) for file in files if os.path.lexists(file)]
        parts = [f"{mark.st_mtime_ns}.{mark.st_size}" for mark in marks]
        return "-".join([*parts, self.folder.owner()])

    def renew(self) -> bool:
        """Read the line of the list again if the run has changed; return whether the line did."""
        odd, wait = odd_file(self.folder.path), 0.0
        if odd:
            line = RunLine(name=self.folder.name, state="refused", note=odd)
        else:
            line, wait = self.value("line", read_line)
        if wait and self.line:
            return False
        new = self.line_of(line) | {"version": "" if odd else self.version()}
        changed, self.line = new != self.line, new
        return changed

    def line_of(self, line: RunLine) -> dict[str, Any]:
        """A run's line as the page shows it, with a short curve."""
        parts = [line.rewards[a:b] for a, b in stretches(len(line.rewards), _SPARKS)]
        means = [round(sum(part) / len(part), 4) for part in parts]
        return {**asdict(line), "id": self.id, "rewards": means}


class ShownRuns:
    """The runs of one folder, or the one run that the folder is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, ShownRun] = {}

    def find(self, run_id: str) -> ShownRun:
        """The run with this id; raise KeyError if there is none, or if it is refused."""
        known = self._runs.get(run_id)
        if known is None:  # an address that was kept, before the list is read
            path = {_id(path): path for path in self._paths()}[run_id]
            known = self._runs.setdefault(run_id, ShownRun(run_id, RunFolder(path)))
        if odd_file(known.folder.path):
            raise KeyError(run_id)
        return known

    def lines(self) -> list[dict[str, Any]]:
        """The lines that are known, the newest run first."""
        return sorted(
            (run.line for run in list(self._runs.values()) if run.line),
            key=lambda line: -line["changed_at"],
        )

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield the line of every run that is new or has changed, as soon as it is read; and {"gone": id}."""
        paths = {_id(path): path for path in self._paths()}
        known = list(self._runs)  # at once: `find` adds runs in other threads
        for run_id in (run_id for run_id in known if run_id not in paths):
            del self._runs[run_id]
            yield {"gone": run_id}
        for run_id, path in paths.items():
            run = self._runs.setdefault(run_id, ShownRun(run_id, RunFolder(path)))
            try:
                changed = run.renew()
            except (OSError, PenstockError):  # removed or replaced during the look
                continue
            if changed and _is_run(path):  # else removed during the look
                yield run.line

    def _paths(self) -> list[Path]:
        """The run folders, the newest first. Links are not followed."""
        if _is_run(self.folder):
            return [self.folder]
        with os.scandir(self.folder) as entries:
            folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
        times = {path: os.lstat(path).st_mtime for path in folders if _is_run(path)}
        return sorted(times, key=lambda path: -times[path])


def _is_run(path: Path) -> bool:
    return any(os.path.lexists(path / name) for name in (CONFIG, JOURNAL))


def _id(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def odd_file(folder: Path) -> str:
    """A sentence about a link, pipe or device where a look would read; empty if there is none."""
    paths = [(folder / name, stat.S_ISREG) for name in (*_FILES, *_MORE_FILES)]
    paths += [(folder / name, stat.S_ISDIR) for name in _FOLDERS]
    for path, is_right in paths:
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not is_right(mode):
            what = "a link" if stat.S_ISLNK(mode) else "no plain file or folder"
            return f"{path.relative_to(folder)} is {what}; the dashboard does not read this run"
    for name in ("eval", "configs"):
        for entry in os.scandir(folder / name) if (folder / name).is_dir() else ():
            if not entry.is_file(follow_symlinks=False):
                return f"{name}/{entry.name} is no plain file; the dashboard does not read this run"
    return ""
