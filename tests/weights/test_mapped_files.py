"""Tensors of mapped files are passed on by file name; all others are written once."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from penstock.weights.broadcast import WeightGroup, open_store
from penstock.weights.mapped_files import read_folder, read_shared, share_weights

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
    places = share_weights(WEIGHTS, tmp_path / "weights", copy=False)
    assert {place[3] for place in places} == {str(tmp_path / "weights")}
    found = dict(read_shared(places))
    assert same(found)
    found["a"].zero_()  # a reader changes its own view only
    assert same(dict(read_shared(places)))


def test_tensors_of_a_mapped_file_are_not_written(tmp_path: Path) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not tell what is mapped where")
    file = tmp_path / "published"
    file.write_bytes(bytes(8192))
    with open(file, "r+b") as opened:
        shared = mmap.mmap(opened.fileno(), 0)
    views = {
        "first": torch.frombuffer(shared, dtype=torch.float32, count=8, offset=0),
        "later": torch.frombuffer(shared, dtype=torch.int32, count=6, offset=4096).view(2, 3),
    }
    views["first"].copy_(torch.arange(8.0))
    views["later"].copy_(torch.arange(6).view(2, 3))
    places = share_weights(views, tmp_path / "weights", copy=False)
    assert [(name, path, offset) for name, _, _, path, offset in places] == [
        ("first", str(file), 0),
        ("later", str(file), 4096),
    ]
    assert not (tmp_path / "weights").exists()
    found = dict(read_shared(places))
    assert all(torch.equal(found[name], view) for name, view in views.items())
    file.rename(tmp_path / "moved")
    file.write_bytes(bytes(8192))  # another file has its name now: no reader may be sent there
    places = share_weights(views, tmp_path / "weights", copy=False)
    assert str(file) not in {place[3] for place in places}
    assert torch.equal(dict(read_shared(places))["first"], torch.arange(8.0))


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
