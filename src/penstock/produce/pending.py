"""The groups that are being generated.

Who may handle a group is decided by one claim: its own task when it came back, or a pause that gives
up on it. Scheduling checks the stop flag and the cap and adds under one lock; cancelling claims all
first. So nothing is handled twice, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.types import Group


@dataclass(slots=True, eq=False)
class InFlight:
    """One group on its way."""

    group: Group
    oldest_version: int  # of the oldest token it will have when it lands
    tail: bool  # it was left behind too often: steps wait for it
    landing: bool = False  # claimed: somebody is writing it down
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class PendingSet:
    """Owns the asyncio tasks of one strategy."""

    def __init__(self) -> None:
        self._entries: dict[str, InFlight] = {}
        self._oldest: Counter[tuple[int, bool]] = Counter()
        self._lock = asyncio.Lock()
        self.closed = False  # a pause is under way: nothing is scheduled

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[InFlight]:
        return list(self._entries.values())

    async def schedule(
        self,
        *,
        cap: int,
        draw: Callable[[], Awaitable[InFlight]],
        run: Callable[[InFlight], Coroutine[Any, Any, None]],
    ) -> bool:
        """Draw and start one group unless the set is closed or full."""
        async with self._lock:
            if self.closed or len(self._entries) >= cap:
                return False
            entry = await draw()
            self._entries[entry.group.group_id] = entry
            self._oldest[entry.oldest_version, entry.tail] += 1
            entry.task = asyncio.create_task(run(entry), name=f"generate {entry.group.group_id}")
            return True

    def claim(self, entry: InFlight) -> bool:
        """True for exactly one caller; that one lands the group and then calls `remove`."""
        if entry.landing or self._entries.get(entry.group.group_id) is not entry:
            return False
        entry.landing = True
        return True

    def release(self, entry: InFlight, oldest_version: int) -> None:
        """Give a claim back: the group will be generated once more, by the same task."""
        self._forget_version(entry)
        entry.landing = False
        entry.oldest_version = oldest_version
        self._oldest[oldest_version, entry.tail] += 1

    def remove(self, entry: InFlight) -> None:
        assert entry.landing, "only a claimed group may be removed"
        del self._entries[entry.group.group_id]
        self._forget_version(entry)

    async def claim_all(self) -> list[InFlight]:
        """Claim everything that nobody lands yet."""
        async with self._lock:
            return [entry for entry in self.entries() if self.claim(entry)]

    def oldest_in_flight(self, *, tail_only: bool) -> int | None:
        """The smallest version that some group in flight will carry."""
        versions = (version for version, tail in self._oldest if tail or not tail_only)
        return min(versions, default=None)

    def _forget_version(self, entry: InFlight) -> None:
        key = (entry.oldest_version, entry.tail)
        self._oldest[key] -= 1
        if not self._oldest[key]:
            del self._oldest[key]
