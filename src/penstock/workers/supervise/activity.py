"""How much a process has worked, read from /proc, so that a blocked process need not answer.

Counts the processor time of a process and of its children (a compiler, an engine's own processes), plus
one second for every 50 MB that they read or wrote. Tells a busy process from a waiting one, not useful
work from spinning: a collective may wait by spinning. Linux only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

BYTES_PER_SECOND = 50e6
# Fields after the name: the state; the parent; user and system time, own and of ended children.
_STATE, _PARENT, _TIMES = 0, 1, slice(11, 15)


def activity_of(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds of work since the process began; None if there is no such process or no /proc."""
    times, children = _read_times(proc)
    if pid not in times:
        return None
    total, left = 0.0, [pid]
    while left:
        process = left.pop()
        total += times[process] + _bytes_moved(proc / str(process)) / BYTES_PER_SECOND
        left += children[process]
    return total


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped the process: it answers nothing."""
    try:
        return _fields(proc / str(pid) / "stat")[_STATE] in ("T", "t")
    except OSError:  # no such process, or no /proc
        return False


def _fields(stat: Path) -> list[str]:
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def _read_times(proc: Path) -> tuple[dict[int, float], defaultdict[int, list[int]]]:
    ticks = os.sysconf("SC_CLK_TCK")
    times: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = _fields(path)
        except OSError:  # the process has ended meanwhile
            continue
        pid = int(path.parent.name)
        times[pid] = sum(map(int, fields[_TIMES])) / ticks
        children[int(fields[_PARENT])].append(pid)
    return times, children


def _bytes_moved(process: Path) -> int:
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:  # the process has ended, or belongs to another user
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
