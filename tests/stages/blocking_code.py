"""A rule and a tracker that block the driver's loop until the run has named them."""

from __future__ import annotations

import threading
from typing import Any

from penstock.inspection.track.logs import RunInfo, Tracker

NAMED = threading.Event()
_LIMIT_S = 60


def keep(rollouts: Any) -> bool:
    return NAMED.wait(_LIMIT_S)


class Hears(Tracker):
    """Lets the blocking code go on once it is named."""

    def __init__(self, info: RunInfo) -> None:
        NAMED.clear()

    def note(self, text: str) -> None:
        if "stands still" in text:
            NAMED.set()


class Blocks(Hears):
    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        NAMED.wait(_LIMIT_S)
