"""Every path carries every byte, keeps the last version readable, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import RunError
from penstock.sync.collective import CollectiveSync
from penstock.sync.in_process import InProcessSync
from penstock.sync.object_store import ObjectStoreSync, tensor_of
from penstock.sync.protocol import WeightSync
from penstock.sync.shared_memory import SharedMemorySync, make_folder, sweep_stale


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.full((3, 5), value)),
        ("b.half", torch.full((7,), value, dtype=torch.bfloat16)),
        ("empty", torch.empty(0)),
        ("scalar", torch.tensor(value)),
    ]


class Sent(CollectiveSync):
    """The trainer's side of a broadcast to engine 0 alone, which is told at once."""

    def publish(self, version, digest, weights):
        return self.open_group(super().publish(version, digest, weights), "group", [0])


class Stored(ObjectStoreSync):
    """The object store without a store: chunks are handed over as they are."""

    def publish(self, version, digest, weights):
        handle = super().publish(version, digest, weights)
        chunks = [pickle.loads(pickle.dumps(self.chunk(n))) for n in range(handle.location)]
        return replace(handle, location=chunks)

    def fetch(self, handle):
        for chunk in handle.location:
            for name, dtype, array in chunk:
                yield name, tensor_of(dtype, array)


@pytest.fixture(params=["in_process", "shared_memory", "collective", "object_store"])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[WeightSync, WeightSync]:
    if request.param == "collective":
        return Sent(), CollectiveSync(0)
    if request.param == "object_store":
        return Stored(chunk_bytes=64), Stored()
    if request.param == "in_process":
        both = InProcessSync()
        return both, both
    return SharedMemorySync(tmp_path), SharedMemorySync(tmp_path)


def test_what_is_published_is_what_is_fetched(sides: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = sides
    handle = consumer.publish(1, "digest", weights(1.5))
    fetched = dict(engine.fetch(handle))
    assert (handle.version, handle.digest) == (1, "digest")
    for name, tensor in weights(1.5):
        assert torch.equal(fetched[name], tensor)
        assert fetched[name].dtype == tensor.dtype


def test_the_next_publication_does_not_touch_the_last(sides: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = sides
    first = consumer.publish(1, "d1", weights(1.0))
    views = dict(engine.fetch(first))
    second = consumer.publish(2, "d2", weights(2.0))
    assert torch.equal(views["a"], torch.full((3, 5), 1.0))
    assert torch.equal(dict(engine.fetch(second))["a"], torch.full((3, 5), 2.0))
    assert torch.equal(views["a"], torch.full((3, 5), 1.0))


def test_publishing_copies(sides: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = sides
    live = [("a", torch.ones(4))]
    handle = consumer.publish(1, "d", live)
    live[0][1].zero_()
    assert torch.equal(dict(engine.fetch(handle))["a"], torch.ones(4))


def test_weights_that_are_gone_are_refused() -> None:
    sync = InProcessSync()
    old = sync.publish(1, "d", weights(1.0))
    sync.publish(2, "d", weights(2.0))
    sync.publish(3, "d", weights(3.0))
    with pytest.raises(RunError, match="version 1 are gone"):
        list(sync.fetch(old))


def test_folders_of_dead_drivers_are_swept(tmp_path: Path) -> None:
    dead = tmp_path / "penstock-weights-999999999-abc"
    alive = tmp_path / f"penstock-weights-{os.getpid()}-abc"
    dead.mkdir()
    alive.mkdir()
    sweep_stale(tmp_path)
    assert (dead.exists(), alive.exists()) == (False, True)


def test_a_new_folder_is_private() -> None:
    folder = make_folder()
    try:
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        folder.rmdir()


def fetch_together(handle, engines: list[CollectiveSync]) -> list[dict[str, torch.Tensor]]:
    """Every engine in a thread of its own, as they are in life."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in engines]

    def fetch(number: int) -> None:
        found[number].update(engines[number].fetch(handle))

    threads = [threading.Thread(target=fetch, args=(n,)) for n in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_broadcast_reaches_those_that_live_now() -> None:
    trainer, engines = CollectiveSync(), [CollectiveSync(n) for n in range(3)]
    meetings = [("two", [0, 1]), ("two", [0, 1]), ("joined", [0, 1, 2]), ("left", [0, 2])]
    for version, (key, members) in enumerate(meetings, 1):
        handle = trainer.publish(version, "d", weights(version))
        sent = trainer.open_group(handle, key, members)
        for found in fetch_together(sent, [engines[n] for n in members]):
            assert torch.equal(found["a"], torch.full((3, 5), float(version)))
    trainer.close()


def test_a_member_that_does_not_come_ends_the_broadcast_with_a_line() -> None:
    trainer, engine = CollectiveSync(timeout_s=0.5), CollectiveSync(0, timeout_s=0.5)
    sent = trainer.open_group(trainer.publish(1, "d", weights(1.0)), "group", [0, 1])
    with pytest.raises(RunError, match="broadcast of version 1"):
        list(engine.fetch(sent))
    again = trainer.open_group(trainer.publish(2, "d", weights(2.0)), "others", [0])
    assert torch.equal(dict(engine.fetch(again))["scalar"], torch.tensor(2.0))


def test_an_engine_that_was_not_named_refuses() -> None:
    trainer = CollectiveSync(timeout_s=0.1)
    sent = trainer.open_group(trainer.publish(1, "d", weights(1.0)), "group", [1])
    with pytest.raises(RunError, match="were not sent to this engine"):
        list(CollectiveSync(0).fetch(sent))
