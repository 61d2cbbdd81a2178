"""Retries while Ray's object store, and the disk it spills to, are full.

Large arguments of a call, such as a batch, go through the object store. Ray spills objects to disk when
memory is short; only if the disk is full too does storing fail. Space comes back when other objects are
freed, so sending is repeated for a bounded time, with one line to the user for every wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from penstock.errors import RunError

T = TypeVar("T")
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


async def retry_while_full(what: str, send: Callable[[], T], note: Callable[[str], None]) -> T:
    """Return the result of `send`; repeat it after a failure to store its arguments."""
    for number, wait_s in enumerate(BACKOFF_S, 1):
        try:
            return send()
        except (ObjectStoreFullError, OutOfDiskError):
            full = f"{what}: Ray's object store and the disk under it are full"
            note(f"{full}; trying again in {wait_s:g} s ({number} of {len(BACKOFF_S)})")
        await asyncio.sleep(wait_s)  # Ray does not report free space
    try:
        return send()
    except (ObjectStoreFullError, OutOfDiskError) as error:
        waited_s = sum(BACKOFF_S)
        raise RunError(f"{what}: no room in Ray's object store for {waited_s:g} s") from error
