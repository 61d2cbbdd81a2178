"""The one clock of the driver: the time of the running event loop, virtual under a virtual loop."""

from __future__ import annotations

import asyncio
import time


def loop_time() -> float:
    """Return the seconds of the running event loop's clock; of the system's without a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
