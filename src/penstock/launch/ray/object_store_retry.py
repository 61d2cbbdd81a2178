"""Asking again while Ray's object store, and the disk it spills to, have no room.

Ray itself moves objects to disk when memory is short; only when that is full too does storing fail.
Room comes back when older objects are freed (weights that nobody reads any more, another job's end),
so it is waited for, a bounded time; every wait is one line to the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from penstock.errors import RunError

T = TypeVar("T")
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


async def with_room(what: str, ask: Callable[[], Awaitable[T]], note: Callable[[str], None]) -> T:
    """What `ask` gives; it must be safe to ask again where storing failed."""
    for number, wait_s in enumerate(BACKOFF_S, 1):
        try:
            return await ask()
        except (ObjectStoreFullError, OutOfDiskError):
            full = f"{what}: Ray's object store and the disk under it are full"
            note(f"{full}; trying again in {wait_s:g} s ({number} of {len(BACKOFF_S)})")
        await asyncio.sleep(wait_s)  # nothing tells of room
    try:
        return await ask()
    except (ObjectStoreFullError, OutOfDiskError) as error:
        waited_s = sum(BACKOFF_S)
        raise RunError(f"{what}: no room in Ray's object store for {waited_s:g} s") from error
