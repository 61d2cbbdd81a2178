"""A program with a terminal that starts a sandbox: prints the processes below it that share the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stages.sandbox_pools import make_pool


def with_terminal() -> list[str]:
    """Return the names of this process's descendants that have a controlling terminal."""
    found: dict[int, tuple[str, int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        begin, _, fields = text.rpartition(") ")
        pid, _, name = begin.partition(" (")
        _, parent, _, _, terminal = fields.split()[:5]
        found[int(pid)] = (name, int(parent), int(terminal))
    below, seen = {os.getpid()}, set[int]()
    while below - seen:
        seen |= below
        below = {pid for pid, (_, parent, _) in found.items() if parent in seen}
    return [found[pid][0] for pid in sorted(seen - {os.getpid()}) if found[pid][2]]


if __name__ == "__main__":
    assert os.isatty(0), "no terminal"
    pool = make_pool(sys.argv[1])
    with pool.sandbox() as sandbox:
        assert sandbox.facts
        print("with a terminal:", *with_terminal(), flush=True)
    pool.close()
