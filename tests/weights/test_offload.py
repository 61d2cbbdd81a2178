"""Offloaded tensors free their memory and come back bit for bit, whatever storage they share."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.transformers.cuda.cuda_runner import CudaRunner
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.transformers.prefix_tree import PrefixTree
from penstock.engine.transformers.sequences import SlotTable
from penstock.errors import RunError
from penstock.weights.offload import HostOffload, explain_out_of_memory

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bits of a copy: memory that numpy has seen cannot be freed."""
    return tensor.clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def shared_tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw tensors over a few storages: whole ones, slices, transposes, scalars, empty ones."""
    tensors: list[torch.Tensor] = []
    for seed in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(0, 2, (rows, columns), generator=generator)
        whole = (whole * torch.arange(columns)).to(draw(st.sampled_from(DTYPES)))
        views = [whole, whole.T, whole[rows // 2 :], whole[:, 1:2], whole.reshape(-1)[:0]]
        views += [whole[0, 0]] if whole.numel() else []
        tensors += draw(st.lists(st.sampled_from(views), min_size=1, max_size=4))
    return tensors


@settings(max_examples=150, deadline=None)
@given(shared_tensors(), st.integers(1, 3))
def test_offloaded_tensors_come_back_bit_for_bit(tensors: list[torch.Tensor], times: int) -> None:
    before = [bits(tensor) for tensor in tensors]
    host_offload = HostOffload(lambda: tensors, devices=("cpu",), chunk_bytes=128)
    sizes = set()
    for _ in range(times):
        host_offload.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
        assert [bits(host_offload.current(tensor)) for tensor in tensors] == before
        host_offload.offload()  # there is nothing left to move
        sizes.add(host_offload.host_bytes)
        host_offload.reload()
        assert not host_offload.is_offloaded
        assert [bits(tensor) for tensor in tensors] == before
        assert all(host_offload.current(tensor) is tensor for tensor in tensors)
    assert len(sizes) == 1  # host memory is allocated once


@settings(max_examples=50, deadline=None)
@given(shared_tensors())
def test_what_is_written_while_offloaded_comes_back(tensors: list[torch.Tensor]) -> None:
    host_offload = HostOffload(lambda: tensors, devices=("cpu",), chunk_bytes=128)
    host_offload.offload()
    for tensor in tensors:
        host_offload.current(tensor).fill_(1)
    host_offload.reload()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_tensors_that_come_later_join_and_host_memory_is_reused() -> None:
    tensors = [torch.arange(100.0)]
    host_offload = HostOffload(lambda: tensors, devices=("cpu",), chunk_bytes=512)
    host_offload.offload()
    host_offload.reload()
    chunk = host_offload._chunks[0].data_ptr()
    tensors += [torch.arange(7), torch.ones(1000, dtype=torch.bfloat16)]
    before = [bits(tensor) for tensor in tensors]
    host_offload.offload()
    assert host_offload._chunks[0].data_ptr() == chunk
    assert host_offload.host_bytes == 512 + 2000
    host_offload.reload()
    assert [bits(tensor) for tensor in tensors] == before


def test_memory_that_others_look_at_stays() -> None:
    seen, own = torch.arange(4.0), torch.arange(3.0)
    seen.numpy()
    host_offload = HostOffload(lambda: [seen, own], devices=("cpu",))
    host_offload.offload()
    assert (seen.untyped_storage().nbytes(), own.untyped_storage().nbytes()) == (16, 0)
    host_offload.reload()
    assert own.tolist() == [0, 1, 2]


def test_on_a_cpu_nothing_moves_unless_told_to() -> None:
    tensor = torch.arange(10.0)
    host_offload = HostOffload(lambda: [tensor])
    host_offload.offload()
    assert not host_offload.is_offloaded
    assert host_offload.host_bytes == 0
    assert tensor.untyped_storage().nbytes() == 40


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_for_others_meanwhile() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # else `whole` shares a segment with tensors of other tests
    whole = torch.randn(64, 2**20, device="cuda")
    tensors = [whole, whole[1:], torch.arange(10, device="cuda"), torch.arange(3)]
    before = [bits(tensor.cpu()) for tensor in tensors]
    host_offload = HostOffload(lambda: tensors)
    for _ in range(2):
        reserved = torch.cuda.memory_reserved()
        host_offload.offload()
        assert reserved - torch.cuda.memory_reserved() >= 2**28
        assert [bits(host_offload.current(tensor)) for tensor in tensors] == before
        assert host_offload.current(whole).is_pinned()
        host_offload.reload()
        assert [bits(tensor.cpu()) for tensor in tensors] == before


def test_memory_that_runs_out_on_the_way_back_leaves_all_of_it_offloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = [torch.arange(10.0), torch.arange(20.0)]
    host_offload = HostOffload(lambda: tensors, devices=("cpu",))
    host_offload.offload()
    resize = torch.UntypedStorage.resize_

    def resize_unless_full(storage: torch.UntypedStorage, size: int) -> None:
        if size == 80:  # the second tensor
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 bytes.")
        resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_unless_full)
    with pytest.raises(torch.OutOfMemoryError):
        host_offload.reload()
    monkeypatch.undo()
    assert host_offload.is_offloaded
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
    host_offload.reload()
    assert [float(tensor.sum()) for tensor in tensors] == [45.0, 190.0]


def test_out_of_memory_is_one_line_with_what_to_change() -> None:
    long = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. Process 7 has 6.00 GiB\nmore"
    with pytest.raises(RunError) as caught, explain_out_of_memory("trainer", "lower x"):
        raise torch.OutOfMemoryError(long)
    assert str(caught.value) == (
        "trainer: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "8.00 GiB of which 1.00 GiB is free; lower x"
    )


class RunnerOnCpu(CudaRunner):
    """The part of a CUDA runner that offloads, over a model on the CPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self._options = model, TransformersOptions()
        self._tree, self.table = PrefixTree(0), SlotTable(0, ())
        self._host_offload = HostOffload(self._tensors, devices=("cpu",))
        self._decoder = None
        self.full = False
        self._open()

    def _open(self) -> None:
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        self._pool: Any = torch.zeros(8)
        self._state: Any = torch.zeros(8)
        self._graphs = {}


def tied_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4))
    model[1].weight = model[0].weight
    model.register_buffer("places", torch.arange(5))
    return model.requires_grad_(False)


def test_an_engine_wakes_with_its_weights_or_with_those_it_got_asleep() -> None:
    model = tied_model()
    runner = RunnerOnCpu(model)
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    runner.sleep()
    assert not hasattr(runner, "_pool")
    assert not any(t.untyped_storage().nbytes() for t in model.state_dict().values())
    runner.wake()
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == before
    runner.sleep()
    new = {"0.weight": torch.full((4, 3), 7.0), "1.bias": torch.full((4,), 5.0)}
    runner.load(new)
    runner.wake()
    assert bits(model[1].weight) == bits(new["0.weight"])
    assert bits(model[1].bias) == bits(new["1.bias"])
    assert model.places.tolist() == [0, 1, 2, 3, 4]


def test_an_engine_that_cannot_wake_says_what_to_lower_and_sleeps_on() -> None:
    model = tied_model()
    runner = RunnerOnCpu(model)
    before = bits(model[0].weight)
    runner.sleep()
    runner.full = True
    with pytest.raises(RunError, match=r"engine\.options\.kv_memory_share .*launch\.colocate"):
        runner.wake()
    assert model[0].weight.untyped_storage().nbytes() == 0
    runner.full = False
    runner.wake()
    assert bits(model[0].weight) == before
