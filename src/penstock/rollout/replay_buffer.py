"""The replay buffer: groups by (task, status), each kind in a heap.

Counting reads one length, taking pops one heap, and expiry compares the version that was stored when a
group came in: no operation looks at tokens. Strategies decide about retries and training, not the
buffer. The journal holds the same groups and survives a crash; the buffer does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from penstock.errors import UserError
from penstock.types import Group, Status, staleness

_EXPIRABLE = (Status.COMPLETED, Status.ABORTED)
_NO_VERSION = 1 << 62  # of a group without tokens, which cannot be too old


class _Entry(NamedTuple):
    """A group in a heap, with the order of the heap in its first three fields."""

    rank: int  # minus the priority
    cursor: int
    tick: int  # no two entries are equal up to here, so groups are never compared
    group: Group
    oldest_version: int
    since_step: int  # the train step at which the group got this status; 0: unknown


class _Heap:
    """The groups of one (task, status)."""

    __slots__ = ("entries", "oldest_version")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.oldest_version = _NO_VERSION  # no group here is older; those that were may be gone


class ReplayBuffer:
    """Consumes landed groups, produces them in order: by priority, then by cursor. Never waits."""

    def __init__(self, *, max_groups_per_task: int = 0) -> None:
        if max_groups_per_task < 0:
            raise UserError(
                f"max_groups_per_task: got {max_groups_per_task}, allowed: 0 (no bound) or more"
            )
        self.max_groups_per_task = max_groups_per_task  # bound on COMPLETED groups; 0: no bound
        self._heaps: dict[tuple[str, Status], _Heap] = {}
        self._ids: set[str] = set()
        self._ticks = count()

    def put(self, group: Group, *, priority: int = 0, train_step: int = 0) -> None:
        """Add a group under its own status; a higher priority is taken first."""
        if group.group_id in self._ids:
            raise ValueError(f"replay buffer: got {group.group_id} a second time, allowed: once")
        self._ids.add(group.group_id)
        version = group.oldest_version
        self._push(group, priority, _NO_VERSION if version is None else version, train_step)

    def _push(self, group: Group, priority: int, version: int, train_step: int) -> None:
        place = (group.task, group.status)
        heap = self._heaps.get(place)
        if heap is None:
            heap = self._heaps[place] = _Heap()
        entry = _Entry(-priority, group.cursor, next(self._ticks), group, version, train_step)
        heapq.heappush(heap.entries, entry)
        heap.oldest_version = min(heap.oldest_version, version)

    def take(self, task_name: str, group_status: Status) -> Group | None:
        """Take and return the first group in order; None without one."""
        heap = self._heaps.get((task_name, group_status))
        if heap is None or not heap.entries:
            return None
        group = heapq.heappop(heap.entries).group
        self._ids.discard(group.group_id)
        return group

    def count(self, task_name: str, group_status: Status) -> int:
        heap = self._heaps.get((task_name, group_status))
        return 0 if heap is None else len(heap.entries)

    def has_room(self, task_name: str, reserved: int) -> bool:
        """Whether one more COMPLETED group fits beside those held and `reserved` others."""
        bound = self.max_groups_per_task
        return not bound or self.count(task_name, Status.COMPLETED) + reserved < bound

    def expire(
        self,
        task_name: str,
        *,
        train_step: int,
        stale_threshold: int,
        tail_tries: int = 0,
        statuses: Sequence[Status] = _EXPIRABLE,
    ) -> list[Group]:
        """Move stale groups to EXPIRED and return them; look at none if the oldest is fresh.

        With `tail_tries` > 0, a group that was tried at least that often goes to the front.
        """
        expired: list[Group] = []
        for status in statuses:
            heap = self._heaps.get((task_name, status))
            if heap is None or staleness(train_step, heap.oldest_version) < stale_threshold:
                continue
            fresh: list[_Entry] = []
            stale: list[_Entry] = []
            for entry in heap.entries:
                is_fresh = staleness(train_step, entry.oldest_version) < stale_threshold
                (fresh if is_fresh else stale).append(entry)
            heap.entries = fresh
            heapq.heapify(heap.entries)
            heap.oldest_version = min((e.oldest_version for e in fresh), default=_NO_VERSION)
            for entry in sorted(stale, key=lambda entry: (entry.oldest_version, entry.tick)):
                group = entry.group
                group.move_to(Status.EXPIRED)
                is_tail = tail_tries > 0 and group.tries >= tail_tries
                self._push(group, max(-entry.rank, is_tail), entry.oldest_version, train_step)
                expired.append(group)
        return expired

    def first_entry(self, task_name: str, group_status: Status) -> tuple[int, int] | None:
        """(priority, since_step) of the group that would be taken next; None without one."""
        heap = self._heaps.get((task_name, group_status))
        if heap is None or not heap.entries:
            return None
        return -heap.entries[0].rank, heap.entries[0].since_step

    def __len__(self) -> int:
        return len(self._ids)
