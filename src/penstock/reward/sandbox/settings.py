"""Limits of the sandbox, the isolation it requires, and the limits of one job."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config import Section

ROUTE, BATCH_ROUTE = "/check_correctness", "/check_correctness_batch"  # of the server
TOKEN_VARIABLE = "PENSTOCK_SANDBOX_TOKEN"
ACCEPT_WEAKER = "I accept weaker isolation"
Level = Literal["full", "filtered", "weak"]
OPEN_FILES = 64
LEVELS: tuple[Level, ...] = ("weak", "filtered", "full")  # from low to high


class SandboxSettings(Section):
    """Limits of untrusted code."""

    workers: int = Field(2, ge=1)
    """Submissions that run at the same time."""
    timeout_s: float = Field(6.0, gt=0)
    """Wall time of one test; its processor time is limited to about the same."""
    submission_timeout_s: float = Field(60.0, gt=0)
    """Wall time of all tests of one submission together."""
    memory_mb: int = Field(1024, ge=64)
    """Address space of one test."""
    output_kb: int = Field(4096, ge=1)
    """Most that a test may print, on each of stdout and stderr."""
    scratch_mb: int = Field(16, ge=1)
    """Size of the scratch folder, all files together."""
    scratch_files: int = Field(256, ge=8)
    """Most files and folders in the scratch folder."""
    threads: int = Field(64, ge=1)
    """Most threads of a test."""
    minimum: Level = "full"
    """Weakest isolation to run under: full (namespaces, seccomp, limits, a user without rights) | filtered (seccomp, Landlock, limits) | weak."""
    accept_weaker: str = ""
    """Must be the words "I accept weaker isolation" for a minimum below filtered."""
    bubblewrap: Literal["auto", "never"] = "auto"
    """auto: put bubblewrap around all sandboxes where it is installed and works."""

    @model_validator(mode="after")
    def _weak_needs_words(self) -> Self:
        if self.minimum == "weak" and self.accept_weaker != ACCEPT_WEAKER:
            raise ValueError(
                f"option accept_weaker: got {self.accept_weaker!r}, allowed: the words "
                f"{ACCEPT_WEAKER!r} when minimum is 'weak'"
            )
        return self


def job_limits(settings: SandboxSettings, wall_s: float) -> dict[str, Any]:
    """The limits of one test: its process sets them on itself before it runs any code."""
    return {
        "wall_s": wall_s,
        "cpu_s": math.ceil(wall_s) + 1,
        "memory_bytes": settings.memory_mb << 20,
        "output_bytes": settings.output_kb << 10,
        "file_bytes": settings.scratch_mb << 20,
        "open_files": OPEN_FILES,
        "tasks": settings.threads,
    }
