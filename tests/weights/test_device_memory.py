"""Weights that stay on a GPU: the same promises as those in the host's memory.

Without a GPU, memory of this process under a handle replaces the driver's memory.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from penstock.errors import WeightsGone
from penstock.weights import shared_memory
from penstock.weights.device_memory import DeviceHandle, DeviceMemory, OpenedMemory
from penstock.weights.model_weights import share_on_device
from penstock.weights.shared_memory import SharedMemorySync
from stages.publications import Publications, holds, weights

pytestmark = pytest.mark.gpu(stand_in=True)
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu:0")


class StandInMemory:
    """Memory of this process under a number, in place of GPU memory under a handle."""

    numbers = itertools.count()
    existing: dict[bytes, bytearray] = {}  # noqa: RUF012  # of all of them

    def __init__(self, size: int, device: torch.device) -> None:
        self._handle = b"%064d" % next(self.numbers)
        self.existing[self._handle] = bytearray(size)

    def tensor(self, size: int) -> tuple[torch.Tensor, object]:
        tensor = torch.frombuffer(self.existing[self._handle], dtype=torch.uint8)
        return tensor, tensor

    def export(self) -> DeviceHandle:
        return DeviceHandle("stand-in", self._handle)


class StandInOpened:
    def __init__(self, handle: DeviceHandle) -> None:
        if handle.octets not in StandInMemory.existing:
            raise WeightsGone("memory that held weights is gone")
        self._octets = StandInMemory.existing[handle.octets]

    def tensor(self, size: int) -> tuple[torch.Tensor, object]:
        view = memoryview(self._octets)
        return torch.frombuffer(view, dtype=torch.uint8), view


@pytest.fixture(autouse=True, scope="module")
def memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type != "cuda":
            patch.setattr(shared_memory, "DeviceMemory", StandInMemory)
            patch.setattr(shared_memory, "OpenedMemory", StandInOpened)
        yield


def new_trainer(folder: str | Path) -> SharedMemorySync:
    trainer = SharedMemorySync(folder, on_device=True)
    publish = trainer.publish
    trainer.publish = lambda version, digest, given: publish(  # type: ignore[method-assign]
        version, digest, ((name, tensor.to(DEVICE)) for name, tensor in given)
    )
    if DEVICE.type != "cuda":  # a device that is not the host's, though its tensors are there
        trainer._on_device, trainer._device = False, DEVICE
    return trainer


class DevicePublications(Publications):
    """Without a GPU one process holds all memory: a trainer that closes frees its own."""

    outlives_its_trainer = False

    def new_trainer(self) -> SharedMemorySync:
        return new_trainer(self._folder.name)


TestDevicePublications = DevicePublications.TestCase
TestDevicePublications.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_only_the_header_is_in_the_file(tmp_path: Path) -> None:
    trainer, engine = new_trainer(tmp_path), SharedMemorySync()
    handle = trainer.publish(1, "d", weights(1))
    assert handle.location["device"] is not None
    assert Path(handle.location["path"]).stat().st_size == shared_memory.HEADER_BYTES
    fetched = list(engine.fetch(handle))
    assert holds(fetched, 1)
    assert all(tensor.device.type == DEVICE.type for _, tensor in fetched)


def test_a_buffer_stays_locked_as_long_as_a_view_of_it_lives(tmp_path: Path) -> None:
    trainer, engine = new_trainer(tmp_path), SharedMemorySync()
    name, kept = next(iter(engine.fetch(trainer.publish(1, "d", weights(1)))))
    view = kept.detach()[2:3]
    del kept
    for version in range(2, 6):
        trainer.publish(version, "d", weights(version))
        assert bool((view == 1).all()), name
    assert len(list(tmp_path.glob("buffer-*"))) == 3
    del view
    gc.collect()
    trainer.publish(6, "d", weights(6))
    assert len(list(tmp_path.glob("buffer-*"))) == 2


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the stand-in forgets; a driver keeps what is open"
)
def test_memory_that_died_with_its_trainer_is_gone_and_not_a_fault(tmp_path: Path) -> None:
    handle = new_trainer(tmp_path).publish(1, "d", weights(1))
    StandInMemory.existing.clear()
    with pytest.raises(WeightsGone):
        list(SharedMemorySync().fetch(handle))
    again = new_trainer(tmp_path)  # finds the file of the one before it, without its memory
    assert holds(list(SharedMemorySync().fetch(again.publish(1, "d", weights(1)))), 1)


# ---- with a GPU

TRAINER = """
import pickle, sys, torch
from penstock.weights.shared_memory import SharedMemorySync
trainer = SharedMemorySync(sys.argv[1], on_device=True)
value, size = float(sys.argv[2]), int(sys.argv[3])
handle = trainer.publish(1, "d", [("w", torch.full((size,), value, device="cuda"))])
sys.stdout.buffer.write(len(bytes_ := pickle.dumps(handle)).to_bytes(4, "big") + bytes_)
sys.stdout.buffer.flush()
sys.stdin.read()
"""


def started_trainer(folder: Path, value: int, size: int) -> tuple[subprocess.Popen[bytes], object]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), str(value), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    count = int.from_bytes(process.stdout.read(4), "big")
    return process, pickle.loads(process.stdout.read(count))


@pytest.mark.gpu
def test_another_process_reads_it_and_outlives_its_writer(tmp_path: Path) -> None:
    size = 64 * 2**20  # numbers: 256 MiB
    process, handle = started_trainer(tmp_path, 3, size)
    engine = SharedMemorySync()
    [(_, tensor)] = engine.fetch(handle)
    assert bool((tensor == 3).all())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    torch.full((size,), 9.0, device="cuda")  # would land in memory that had become free
    assert bool((tensor == 3).all())

    process, handle = started_trainer(tmp_path, 4, size)  # the next one, in the same folder
    assert bool((tensor == 3).all())
    [(_, newer)] = engine.fetch(handle)
    assert bool((newer == 4).all())
    process.kill()
    process.wait()


READ = """
import json, sys
from penstock.weights.model_weights import read_device
for name, tensor in read_device(*json.loads(sys.argv[1])):
    print(name, tensor.dtype, list(tensor.shape), tensor.double().sum().item())
"""


@pytest.mark.gpu
def test_another_process_reads_weights_by_a_plain_message() -> None:
    weights = {
        "a": torch.arange(6, dtype=torch.bfloat16, device="cuda").view(2, 3),
        "b": torch.full((5,), 0.5, device="cuda"),
    }
    memory, handle, places = share_on_device(weights)
    message = json.dumps([handle, places])
    done = subprocess.run(
        [sys.executable, "-c", READ, message], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "a torch.bfloat16 [2, 3] 15.0",
        "b torch.float32 [5] 2.5",
    ]
    del memory


@pytest.mark.gpu
def test_memory_goes_back_to_the_device() -> None:
    size = 1 << 30

    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    torch.zeros(1, device="cuda")
    before = free()
    memory = DeviceMemory(size, DEVICE)
    tensor = memory.tensor(size)[0]
    tensor.fill_(1)
    assert before - free() >= size
    del memory
    assert int(tensor[-1]) == 1  # a tensor keeps it
    assert before - free() >= size
    del tensor
    gc.collect()
    assert before - free() < size // 8


@pytest.mark.gpu
def test_what_a_killed_writer_had_is_given_back_with_the_last_reader(tmp_path: Path) -> None:
    size = 256 * 2**20  # numbers: 1 GiB
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    process, handle = started_trainer(tmp_path, 3, size)
    opened = OpenedMemory(handle.location["device"])  # type: ignore[attr-defined]
    process.kill()
    process.wait()
    assert before - torch.cuda.mem_get_info()[0] >= size * 4
    del opened
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < size
