"""The limits of one job, from the settings and the time it is given."""

from __future__ import annotations

import math
from typing import Any

from penstock.sandbox.settings import SandboxSettings

OPEN_FILES = 64


def job_limits(settings: SandboxSettings, wall_s: float) -> dict[str, Any]:
    """What the child takes on before it runs anything."""
    return {
        "wall_s": wall_s,
        "cpu_s": math.ceil(wall_s) + 1,
        "memory_bytes": settings.memory_mb << 20,
        "output_bytes": settings.output_kb << 10,
        "file_bytes": settings.scratch_mb << 20,
        "open_files": OPEN_FILES,
        "tasks": settings.threads,
        "processes": settings.processes,
    }
