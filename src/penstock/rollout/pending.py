"""The groups that are being generated.

One claim decides who handles a group: its own asyncio task when the group came back, or a pause that
gives up on it. Scheduling checks the stop flag and the cap and adds the group under one lock; a pause
claims all groups first. So no group is handled twice and none is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.types import Group


@dataclass(slots=True, eq=False)
class PendingGroup:
    """One group that is being generated, by its own asyncio task or by the strategy that drew it."""

    group: Group
    oldest_version: int  # version of the oldest token that the group will have when it lands
    tail: bool  # tried `max_tries` times: steps wait for it
    landing: bool = False  # whether a caller is recording the group's outcome
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class PendingSet:
    """Owns the asyncio tasks of one group runner."""

    def __init__(self) -> None:
        self._entries: dict[str, PendingGroup] = {}
        self._versions: Counter[tuple[int, bool]] = Counter()  # (oldest version, tail) -> groups
        self._lock = asyncio.Lock()
        self.closed = False  # a pause is under way: schedule nothing

    def __len__(self) -> int:
        return len(self._entries)

    async def schedule(
        self,
        *,
        cap: int,
        draw: Callable[[], Awaitable[PendingGroup]],
        run: Callable[[PendingGroup], Coroutine[Any, Any, None]],
    ) -> bool:
        """Draw and start one group; return False if the set is closed or holds `cap` groups."""
        async with self._lock:
            if self.closed or len(self._entries) >= cap:
                return False
            entry = await draw()
            self._add(entry)
            entry.task = asyncio.create_task(run(entry), name=f"generate {entry.group.group_id}")
            return True

    async def hold(self, draw: Callable[[], Awaitable[PendingGroup]]) -> Group | None:
        """Draw one group for a caller that generates it; return None if the set is closed."""
        async with self._lock:
            if self.closed:
                return None
            entry = await draw()
            self._add(entry)
            return entry.group

    def _add(self, entry: PendingGroup) -> None:
        self._entries[entry.group.group_id] = entry
        self._versions[entry.oldest_version, entry.tail] += 1

    def claim_of(self, group: Group) -> PendingGroup | None:
        """Claim a group that `hold` returned; None if a pause has taken it back."""
        entry = self._entries.get(group.group_id)
        return entry if entry is not None and entry.group is group and self.claim(entry) else None

    def claim(self, entry: PendingGroup) -> bool:
        """Return True to exactly one caller, which lands the group and then calls `remove`."""
        if entry.landing or self._entries.get(entry.group.group_id) is not entry:
            return False
        entry.landing = True
        return True

    def release(self, entry: PendingGroup, oldest_version: int) -> None:
        """Give a claim back: the same asyncio task will generate the group once more."""
        self._forget_version(entry)
        entry.landing = False
        entry.oldest_version = oldest_version
        self._versions[oldest_version, entry.tail] += 1

    def remove(self, entry: PendingGroup) -> None:
        assert entry.landing, "only a claimed group may be removed"
        del self._entries[entry.group.group_id]
        self._forget_version(entry)

    async def claim_all(self) -> list[PendingGroup]:
        """Claim and return every group that nobody has claimed yet."""
        async with self._lock:
            return [entry for entry in list(self._entries.values()) if self.claim(entry)]

    def oldest_version(self, *, tail_only: bool) -> int | None:
        """Return the smallest version that a pending group will carry; None without groups."""
        versions = (version for version, tail in self._versions if tail or not tail_only)
        return min(versions, default=None)

    def _forget_version(self, entry: PendingGroup) -> None:
        key = (entry.oldest_version, entry.tail)
        self._versions[key] -= 1
        if not self._versions[key]:
            del self._versions[key]
