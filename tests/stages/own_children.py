"""The children of the process that tests run in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def own_children() -> set[int]:
    """Return the living children of this process; threads and processes may end meanwhile."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # the name, in brackets, may have any character
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(folder.name))
    return found
