"""Published weights are passed on by file name; all others are written once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from penstock.weights.broadcast import WeightGroup, open_store
from penstock.weights.in_process import InProcessSync
from penstock.weights.model_weights import read_folder, read_shared, share_weights
from penstock.weights.shared_memory import SharedMemorySync

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
}


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in WEIGHTS.items()
    )


def test_tensors_of_this_process_are_written_once_and_read_back(tmp_path: Path) -> None:
    source = InProcessSync().publish(1, "d", WEIGHTS.items())
    file, entries = share_weights(source, WEIGHTS, tmp_path / "weights", copy=False)
    assert file == str(tmp_path / "weights")
    found = dict(read_shared(file, entries))
    assert same(found)
    found["a"].zero_()  # a reader changes its own view only
    assert same(dict(read_shared(file, json.loads(json.dumps(entries)))))


def test_published_weights_are_read_where_they_are(tmp_path: Path) -> None:
    sync = SharedMemorySync(tmp_path)
    source = sync.publish(1, "d", WEIGHTS.items())
    weights = dict(sync.fetch(source))
    file, entries = share_weights(source, weights, tmp_path / "weights", copy=False)
    assert not (tmp_path / "weights").exists()
    assert same(dict(read_shared(file, entries)))
    copied, entries = share_weights(source, weights, tmp_path / "weights", copy=True)
    assert copied == str(tmp_path / "weights")
    assert same(dict(read_shared(copied, entries)))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        read_folder(tmp_path)


def test_a_group_carries_every_weight() -> None:
    """An engine and two workers, each in a thread."""
    store = open_store("127.0.0.1", 30.0)
    shapes = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in WEIGHTS.items()]
    received: dict[int, dict[str, torch.Tensor]] = {}

    def work(rank: int) -> None:
        group = WeightGroup.join(rank, 3, "127.0.0.1", store.port, 30.0)
        received[rank] = group.receive(shapes)

    workers = [threading.Thread(target=work, args=(rank,)) for rank in (1, 2)]
    for worker in workers:
        worker.start()
    WeightGroup(0, 3, store, 30.0).send(WEIGHTS.values())
    for worker in workers:
        worker.join(30.0)
    assert same(received[1])
    assert same(received[2])
