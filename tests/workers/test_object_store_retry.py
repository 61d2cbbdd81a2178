"""Sending is retried while the object store is full, with a line each time, and ends at a limit."""

from __future__ import annotations

import pytest

from penstock.errors import RunError
from penstock.run.twin.virtual_time import VirtualClock

ray = pytest.importorskip("ray")
from penstock.workers.ray.actor import BACKOFF_S, retry_while_full  # noqa: E402

pytestmark = pytest.mark.ray


class Store:
    """A store that is full for the first `full_for` requests."""

    def __init__(self, full_for: int) -> None:
        self.full_for, self.asked = full_for, 0

    def put(self) -> str:
        self.asked += 1
        if self.asked <= self.full_for:
            raise ray.exceptions.OutOfDiskError("full")
        return "stored"


def test_room_that_comes_back_is_used() -> None:
    clock, store, notes = VirtualClock(), Store(2), []
    assert clock.run(retry_while_full("trainer: train", store.put, notes.append)) == "stored"
    clock.close()
    assert [note.split("; ")[1] for note in notes] == [
        f"trying again in {wait_s:g} s ({number} of {len(BACKOFF_S)})"
        for number, wait_s in enumerate(BACKOFF_S[:2], 1)
    ]


def test_without_room_it_ends_in_one_line() -> None:
    clock, store, notes = VirtualClock(), Store(1000), []
    with pytest.raises(RunError, match="trainer: train: no room in Ray's object store for 63 s"):
        clock.run(retry_while_full("trainer: train", store.put, notes.append))
    assert clock.now == pytest.approx(sum(BACKOFF_S))
    clock.close()
    assert len(notes) == len(BACKOFF_S)
    assert store.asked == len(BACKOFF_S) + 1
