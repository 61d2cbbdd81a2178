"""An offloaded trainer: it publishes, saves and trains bit for bit as one that was not offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import RunError
from penstock.training.consumer import Consumer
from penstock.training.snapshot import STATE, read_state
from penstock.types import Batch
from penstock.weights.in_process import InProcessSync
from penstock.weights.offload import HostOffload
from penstock.workers.part_factories import TrainerService
from stages.training_data import batches, from_disk

SETTINGS: dict[str, Any] = {
    "model": {"dtype": "bfloat16"},
    "train": {"lr": 1e-3},
    "algorithm": {"kl_beta": 0.1},  # so that there is a reference
}


def on_cpu(consumer: Consumer) -> Consumer:
    """Let the offload move CPU tensors too."""
    consumer.host_offload = HostOffload(consumer._training_tensors, devices=("cpu",))
    return consumer


def sizes(consumer: Consumer) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in consumer._training_tensors()]


def state(folder: Path) -> Any:
    return read_state(folder / STATE)


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, (first, rows) in one.items():
        assert other[name][0] == first
        assert torch.equal(other[name][1], rows), name


ADAPTED = SETTINGS | {"model": {"dtype": "bfloat16", "lora": {"rank": 2}}}
AVERAGED = SETTINGS | {"train": {"lr": 1e-3, "ema_decay": 0.5}}


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, ADAPTED, pytest.param(AVERAGED, marks=pytest.mark.slow)],
    ids=["plain", "adapters", "averages"],
)
def test_an_offload_between_steps_changes_no_step(settings: Any, saved_model) -> None:
    plain, offloaded = (
        from_disk(saved_model, **settings),
        on_cpu(from_disk(saved_model, **settings)),
    )
    offloaded.offload()  # before the first step there are no moments
    assert set(sizes(offloaded)) == {0}
    for batch in batches(3):
        expected = plain.train(batch)
        report = offloaded.train(batch)
        assert 0 not in sizes(offloaded)
        offloaded.offload()
        assert set(sizes(offloaded)) == {0}
        assert report.digest == expected.digest == offloaded.digest()
        assert dict(offloaded.weights()).keys() == dict(plain.weights()).keys()


@pytest.mark.parametrize(
    "settings",
    [pytest.param(SETTINGS, marks=pytest.mark.slow), ADAPTED, AVERAGED],
    ids=["plain", "adapters", "averages"],
)
def test_a_checkpoint_taken_while_offloaded_is_the_same_and_moves_nothing(
    settings: Any,
    saved_model,
    tmp_path: Path,
) -> None:
    consumer = on_cpu(from_disk(saved_model, **settings))
    consumer.train(batches(1)[0])
    consumer.snapshot(tmp_path / "loaded")()
    consumer.offload()
    consumer.snapshot(tmp_path / "offloaded")()
    assert set(sizes(consumer)) == {0}
    assert_same(state(tmp_path / "loaded")["pieces"], state(tmp_path / "offloaded")["pieces"])
    for model in (tmp_path / "loaded").glob("*/model.safetensors"):
        other = tmp_path / "offloaded" / model.parent.name / model.name
        assert model.read_bytes() == other.read_bytes()
    resumed = from_disk(saved_model, **settings)
    resumed.load(tmp_path / "offloaded")
    second = batches(2)[1]
    assert resumed.train(second).digest == consumer.train(second).digest


def test_an_offloaded_trainer_loads_and_publishes(saved_model, tmp_path: Path) -> None:
    config = from_disk(saved_model, **SETTINGS).config
    sync = InProcessSync()
    service = TrainerService(config, 10, sync)
    on_cpu(service._consumer)
    first, second = batches(2)
    service.train(first)
    service.snapshot(str(tmp_path / "one"))
    write = service._write
    assert write is not None
    service.sleep()
    write()
    expected = service.train(second).digest
    service.sleep()
    handle = service.publish()
    assert (handle.version, handle.digest) == (2, expected)
    assert dict(sync.fetch(handle)).keys() == dict(service._consumer.weights()).keys()
    assert service.load(str(tmp_path / "one"))[0] == 1
    assert service.train(second).digest == expected
    service.sleep()
    service.wake()
    assert 0 not in sizes(service._consumer)


def test_on_a_cpu_a_sleeping_trainer_copies_nothing(saved_model) -> None:
    service = TrainerService(from_disk(saved_model, **SETTINGS).config, 10, InProcessSync())
    service.sleep()
    assert 0 not in sizes(service._consumer)
    assert service._consumer.host_offload.host_bytes == 0


@pytest.mark.parametrize("colocate", [True, False])
def test_a_trainer_out_of_memory_says_what_to_change(saved_model, colocate: bool) -> None:
    config = from_disk(saved_model, launch={"colocate": colocate}).config
    service = TrainerService(config, 10, InProcessSync())

    def too_large(batch: Batch) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")

    service._consumer.train = too_large  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"^trainer: CUDA out of memory.*micro_batch.*colocate"):
        service.train(batches(1)[0])


@pytest.mark.gpu
def test_on_a_gpu_an_offload_frees_the_memory_and_keeps_the_bits(saved_model) -> None:
    settings = SETTINGS | {"model": {"dtype": "bfloat16", "device": "cuda"}}
    consumer = from_disk(saved_model, **settings)
    first, second = batches(2)
    digest = consumer.train(first).digest
    weights = {name: tensor.clone() for name, tensor in consumer.weights()}
    consumer.offload()
    assert set(sizes(consumer)) == {0}
    assert consumer.digest() == digest
    consumer.reload()
    assert 0 not in sizes(consumer)
    assert consumer.digest() == digest
    assert all(torch.equal(tensor, weights[name]) for name, tensor in consumer.weights())
    consumer.train(second)


@pytest.mark.gpu
@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": True}], ids=str)
def test_steps_on_a_gpu_are_the_steps_on_a_cpu(saved_model, train: dict[str, bool]) -> None:
    """In float32; the sums of a GPU have another order."""
    reports, weights = [], []
    for device in ("cpu", "cuda"):
        settings = train if device == "cuda" else {}
        model = {"dtype": "float32", "device": device}
        consumer = from_disk(saved_model, model=model, train=settings)
        reports.append([consumer.train(batch).metrics for batch in batches(3)])
        weights.append({name: tensor.cpu() for name, tensor in consumer.weights()})
    for one, other in zip(*reports, strict=True):
        assert one["loss/policy"] == pytest.approx(other["loss/policy"], rel=1e-3, abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=2e-3), name
