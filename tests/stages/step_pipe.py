"""A tracker for runs in other processes: it reports each finished step and the driver's pid."""

from __future__ import annotations

import os

from penstock.inspection.track.logs import RunInfo

STEP_PIPE = f"{__file__}:StepPipe"  # as a config names it


class StepPipe:
    """Writes each finished step and the driver's pid to the named pipe in the run's parent folder."""

    def __init__(self, info: RunInfo) -> None:
        self._pipe = (info.folder.parent / "steps").open("w", buffering=1)

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._pipe.write(f"{step} {os.getpid()}\n")

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...
