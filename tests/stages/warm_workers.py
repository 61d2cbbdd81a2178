"""Worker processes that are forked from a process with all imports done, to start quickly.

`install` makes the drivers of this process ask a nursery instead of starting processes. A worker shares only
the descriptors that the driver gave it, and runs the real worker program.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.workers.processes import process_worker
from stages.nursery import ForkedProcess, start

PROGRAM = "penstock.workers.processes.worker_main:main"


def install(nursery: Path) -> None:
    """Make this process get its workers from the nursery that serves that socket."""

    def spawn(descriptors: tuple[int, ...], log_path: Path, *_: Any) -> ForkedProcess:
        with open(os.devnull) as nothing, log_path.open("ab") as log:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            return start(nursery, PROGRAM, streams=streams, passed=descriptors)

    process_worker._spawn = spawn  # type: ignore[assignment]
