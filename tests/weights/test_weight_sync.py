"""Every weight sync transfers every byte, keeps the last version readable and leaves no files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.errors import RunError
from penstock.files import weight_folder
from penstock.weights.in_process import InProcessSync
from penstock.weights.protocol import WeightSync
from penstock.weights.shared_memory import SharedMemorySync


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.full((3, 5), value)),
        ("b.half", torch.full((7,), value, dtype=torch.bfloat16)),
        ("empty", torch.empty(0)),
        ("scalar", torch.tensor(value)),
    ]


@pytest.fixture(params=["in_process", "shared_memory"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[WeightSync, WeightSync]:
    if request.param == "in_process":
        both = InProcessSync()
        return both, both
    return SharedMemorySync(tmp_path), SharedMemorySync(tmp_path)


def test_what_is_published_is_what_is_fetched(ends: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = ends
    handle = consumer.publish(1, "digest", weights(1.5))
    fetched = dict(engine.fetch(handle))
    assert (handle.version, handle.digest) == (1, "digest")
    for name, tensor in weights(1.5):
        assert torch.equal(fetched[name], tensor)
        assert fetched[name].dtype == tensor.dtype


def test_the_next_publication_does_not_touch_the_last(ends: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = ends
    first = consumer.publish(1, "d1", weights(1.0))
    views = dict(engine.fetch(first))
    second = consumer.publish(2, "d2", weights(2.0))
    assert torch.equal(views["a"], torch.full((3, 5), 1.0))
    assert torch.equal(dict(engine.fetch(second))["a"], torch.full((3, 5), 2.0))
    assert torch.equal(views["a"], torch.full((3, 5), 1.0))


def test_publishing_copies(ends: tuple[WeightSync, WeightSync]) -> None:
    consumer, engine = ends
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


def test_a_new_folder_is_private() -> None:
    folder = weight_folder()
    try:
        assert folder.path.stat().st_mode & 0o077 == 0
    finally:
        folder.remove()
