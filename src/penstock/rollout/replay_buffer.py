"""The replay buffer: groups by (task, status), indexed.

Counting reads one length, taking pops one heap, and expiry compares the version that was stored when a
group came in: no operation looks at tokens. Strategies decide about retries and training, not the
buffer. The journal holds the same groups and survives a crash; the buffer does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as counter
from typing import Any, Literal

from penstock.errors import UserError
from penstock.rollout.signal import Signal
from penstock.store.journal.codec import decode_group, encode_group
from penstock.types import Group, Status, staleness

TakeOrder = Literal["fifo", "stalest"]
_EXPIRABLE = (Status.COMPLETED, Status.ABORTED)


@dataclass(slots=True, eq=False)
class _Entry:
    group: Group
    status: Status
    oldest_version: int | None
    priority: int
    since_step: int  # the train step at which the group got this status; 0: unknown


class _Shelf:
    """The groups of one (task, status): a dict owns them, two heaps order them."""

    __slots__ = ("by_order", "by_version", "entries", "stalest_first", "tick")

    def __init__(self, stalest_first: bool) -> None:
        self.entries: dict[str, _Entry] = {}
        self.by_order: list[tuple[int, int, int, int, _Entry]] = []
        self.by_version: list[tuple[int, int, _Entry]] = []
        self.stalest_first = stalest_first
        self.tick = counter()

    def add(self, entry: _Entry) -> None:
        group, version = entry.group, entry.oldest_version
        self.entries[group.group_id] = entry
        age = version if self.stalest_first and version is not None else 0
        tick = next(self.tick)
        heapq.heappush(self.by_order, (-entry.priority, age, group.cursor, tick, entry))
        if version is not None:
            heapq.heappush(self.by_version, (version, tick, entry))

    def holds(self, entry: _Entry) -> bool:
        return self.entries.get(entry.group.group_id) is entry

    def remove(self, entry: _Entry) -> _Entry:
        del self.entries[entry.group.group_id]
        if not self.entries:  # the heaps hold only removed entries
            self.by_order.clear()
            self.by_version.clear()
        return entry

    def first(self) -> _Entry | None:
        return self._top(self.by_order)

    def oldest(self) -> _Entry | None:
        return self._top(self.by_version)

    def _top(self, heap: list[Any]) -> _Entry | None:
        """Return the first entry of a heap that is still held; pop the removed ones before it."""
        while heap:
            entry: _Entry = heap[0][-1]
            if self.holds(entry):
                return entry
            heapq.heappop(heap)
        return None


class ReplayBuffer:
    """Consumes landed groups, produces them in order. Waits for: room (`put`), groups (`wait`)."""

    def __init__(self, *, order: TakeOrder = "fifo", max_groups_per_task: int = 0) -> None:
        if order not in ("fifo", "stalest"):
            raise UserError(f"replay buffer order: got {order!r}, allowed: fifo, stalest")
        if max_groups_per_task < 0:
            raise UserError(
                f"max_groups_per_task: got {max_groups_per_task}, allowed: 0 (no bound) or more"
            )
        self.order = order
        self.max_groups_per_task = max_groups_per_task  # bound on COMPLETED groups; 0: no bound
        self._shelves: dict[tuple[str, Status], _Shelf] = {}
        self._ids: set[str] = set()
        self._changed = Signal()

    # -- asynchronous -------------------------------------------------------------------------

    async def put(self, group: Group, *, priority: int = 0, train_step: int = 0) -> None:
        """Add a group under its own status. A bounded buffer makes a COMPLETED group wait for room."""
        while group.status is Status.COMPLETED and not self.room(group.task):
            await self._changed.wait_after(self._changed.count)
        self.put_now(group, priority=priority, train_step=train_step)

    async def take(
        self,
        task_name: str,
        group_status: Status,
        num: int = 1,
        *,
        train_step: int | None = None,
        stale_threshold: int | None = None,
    ) -> list[Group]:
        """Take up to `num` groups in order; with a step and a threshold, expire the stale ones first."""
        if train_step is not None and stale_threshold is not None:
            self.expire_now(task_name, train_step=train_step, stale_threshold=stale_threshold)
        taken: list[Group] = []
        while len(taken) < num and (group := self.take_now(task_name, group_status)) is not None:
            taken.append(group)
        return taken

    async def count(self, *, task_name: str, group_status: Status) -> int:
        return self.count_now(task_name, group_status)

    async def expire(
        self, task_name: str, *, train_step: int, stale_threshold: int, tail_tries: int = 0
    ) -> list[Group]:
        """Move the groups that are too old for `train_step` to EXPIRED; return them, still held."""
        return self.expire_now(
            task_name, train_step=train_step, stale_threshold=stale_threshold, tail_tries=tail_tries
        )

    async def wait(self, task_name: str, group_status: Status, num: int = 1) -> None:
        """Wait until the buffer holds at least `num` groups of that status."""
        while self.count_now(task_name, group_status) < num:
            await self._changed.wait_after(self._changed.count)

    # -- the same without yielding to the event loop ------------------------------------------

    def put_now(self, group: Group, *, priority: int = 0, train_step: int = 0) -> None:
        if group.group_id in self._ids:
            raise ValueError(f"replay buffer: got {group.group_id} a second time, allowed: once")
        self._ids.add(group.group_id)
        self._store(_Entry(group, group.status, group.oldest_version, priority, train_step))
        self._changed.notify()

    def take_now(self, task_name: str, group_status: Status) -> Group | None:
        """Take and return the first group in order; None without one."""
        shelf = self._shelves.get((task_name, group_status))
        entry = shelf.first() if shelf is not None else None
        if shelf is None or entry is None:
            return None
        shelf.remove(entry)
        self._ids.discard(entry.group.group_id)
        self._changed.notify()
        return entry.group

    def count_now(self, task_name: str, group_status: Status) -> int:
        shelf = self._shelves.get((task_name, group_status))
        return len(shelf.entries) if shelf is not None else 0

    def room(self, task_name: str, reserved: int = 0) -> bool:
        """Return whether one more COMPLETED group fits beside those held and `reserved` others."""
        held = self.count_now(task_name, Status.COMPLETED) + reserved
        return not self.max_groups_per_task or held < self.max_groups_per_task

    def expire_now(
        self,
        task_name: str,
        *,
        train_step: int,
        stale_threshold: int,
        tail_tries: int = 0,
        statuses: Sequence[Status] = _EXPIRABLE,
    ) -> list[Group]:
        """Move stale groups to EXPIRED and return them; fresh groups are not looked at.

        With `tail_tries` > 0, a group that was tried at least that often goes to the front.
        """
        expired: list[Group] = []
        for status in statuses:
            shelf = self._shelves.get((task_name, status))
            while shelf is not None and (entry := shelf.oldest()) is not None:
                assert entry.oldest_version is not None
                if staleness(train_step, entry.oldest_version) < stale_threshold:
                    break
                shelf.remove(entry)
                group = entry.group
                group.move_to(Status.EXPIRED)
                tail = tail_tries > 0 and group.tries >= tail_tries
                priority = max(entry.priority, int(tail))
                self._store(
                    _Entry(group, Status.EXPIRED, entry.oldest_version, priority, train_step)
                )
                expired.append(group)
        if expired:
            self._changed.notify()
        return expired

    def first_entry(self, task_name: str, group_status: Status) -> tuple[int, int] | None:
        """Return (priority, since_step) of the group that would be taken next; None without one."""
        shelf = self._shelves.get((task_name, group_status))
        entry = shelf.first() if shelf is not None else None
        return None if entry is None else (entry.priority, entry.since_step)

    def __len__(self) -> int:
        return len(self._ids)

    def state_dict(self) -> dict[str, Any]:
        """Return all groups with their priorities. It is large: a run relies on its journal instead."""
        entries = [entry for shelf in self._shelves.values() for entry in shelf.entries.values()]
        return {
            "groups": [
                {"group": encode_group(e.group), "priority": e.priority, "since_step": e.since_step}
                for e in entries
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._shelves.clear()
        self._ids.clear()
        for row in state["groups"]:
            group = decode_group(row["group"])
            self.put_now(group, priority=row["priority"], train_step=row["since_step"])

    def _store(self, entry: _Entry) -> None:
        key = (entry.group.task, entry.status)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(self.order == "stalest")
        shelf.add(entry)
