"""How much work a process has spent, seen from outside: it need not answer.

Processor time of the process and of all that it started (a compiler's helpers, an engine's own
processes), and a second for every 50 MB that they read or wrote. It tells a process that is busy from one
that waits; not whether anything comes of it: a collective may wait by spinning. Linux only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

BYTES_PER_SECOND = 50e6
_PARENT, _TIMES = (
    1,
    slice(11, 15),
)  # fields after the name: user, system, and those of ended children


def effort_of(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds since the process began; None: there is no such process, or no /proc."""
    times, children = _read_times(proc)
    if pid not in times:
        return None
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        total += times[one] + _bytes_moved(proc / str(one)) / BYTES_PER_SECOND
        left += children[one]
    return total


def _read_times(proc: Path) -> tuple[dict[int, float], defaultdict[int, list[int]]]:
    ticks = os.sysconf("SC_CLK_TCK")
    times: dict[int, float] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in proc.glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        times[pid] = sum(map(int, fields[_TIMES])) / ticks
        children[int(fields[_PARENT])].append(pid)
    return times, children


def _bytes_moved(process: Path) -> int:
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:  # it ended, or belongs to somebody else
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
