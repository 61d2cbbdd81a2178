"""Which worker uses which GPU of a machine, and which weight syncs each launcher allows."""

from __future__ import annotations

import pytest
import torch

from penstock.config import Config, ModelConfig
from penstock.config.source import load_config
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import UserError
from penstock.run import preflight
from penstock.training.policy import trainer_device
from penstock.workers.part_factories import trainer_part
from stages.tiny_run import SUMS


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def trainer_devices(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    devices = []
    for rank in range(count):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        devices.append(str(trainer_device(ModelConfig())))
    return devices


def engine_devices(config: Config) -> list[str]:
    count = config.launch.num_producers
    return [TransformersOptions.from_config(config, number).device for number in range(count)]


@pytest.mark.usefixtures("four_gpus")
def test_trainer_ranks_and_engines_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"launch": {"num_consumers": 2, "num_producers": 2}})
    assert trainer_devices(2, monkeypatch) == ["cuda:0", "cuda:1"]
    assert engine_devices(config) == ["cuda:2", "cuda:3"]


@pytest.mark.usefixtures("four_gpus")
def test_colocated_they_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"num_consumers": 2, "num_producers": 2, "colocate": True}
    config = Config.model_validate({"launch": launch})
    assert engine_devices(config) == trainer_devices(2, monkeypatch) == ["cuda:0", "cuda:1"]


def test_a_named_device_is_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(trainer_device(ModelConfig(device="cuda:3"))) == "cuda:3"
    assert str(trainer_device(ModelConfig(device="cpu"))) == "cpu"


@pytest.mark.parametrize(
    ("launch", "kinds"),
    [
        ("local", ["auto", "shared_memory", "cuda_ipc", "collective", "delta"]),
        ("ray", ["auto", "collective", "delta"]),
        ("inline", ["auto", "in_process"]),
    ],
)
def test_each_launcher_has_its_ways_for_weights(launch: str, kinds: list[str]) -> None:
    everything = {
        "auto",
        "in_process",
        "shared_memory",
        "cuda_ipc",
        "object_store",
        "collective",
        "delta",
    }
    for kind in everything:
        words = [f"launch.kind={launch}", f"sync.kind={kind}", f"tasks.train.data={SUMS}"]
        config = load_config(None, words).config
        if kind in kinds:
            preflight.check(config)
        else:
            with pytest.raises(UserError) as refused:
                preflight.check(config)
            said = f"got '{kind}' with launch.kind = {launch}, allowed: {', '.join(kinds)}"
            assert str(refused.value) == f"sync.kind: {said}"


def test_weights_cannot_stay_on_a_gpu_that_is_not_there() -> None:
    config = Config.model_validate({"model": {"device": "cpu"}})
    with pytest.raises(
        UserError, match=r"sync.kind: got cuda_ipc with a model on cpu, allowed: auto"
    ):
        trainer_part(config, 1, "cuda_ipc", "", 0, ("", 0))
