"""update/arrived: which share of an update reaches the published weights."""

import pytest
import torch

from penstock.training.arrival import Arrival
from penstock.training.optimizer import Masters
from penstock.training.parallel.ranks import Ranks
from penstock.training.parallel.sharding import Sharding
from penstock.training.policy import Policy
from stages.training_data import batches, from_disk, random_batch, tiny_model

LORA = {"lora": {"rank": 8}}


@pytest.fixture
def bfloat16_model(tmp_path):
    """A bfloat16 model on disk, as most checkpoints are."""
    tiny_model(dtype=torch.bfloat16, hidden_size=64, intermediate_size=128).save_pretrained(
        tmp_path
    )
    return tmp_path


def test_the_share_on_hand_worked_numbers() -> None:
    """Above 1 the bfloat16 grid has steps of 1/128."""
    model = tiny_model(dtype=torch.float32)
    masters = Masters(model, torch.bfloat16, sharding=Sharding(Ranks()))
    arrival = Arrival(Policy(model), masters)
    norm = masters.parameters["model.norm.weight"]  # of ones
    before = arrival.sample()
    assert arrival.share(before)() == 1.0  # nothing changed
    with torch.no_grad():
        norm[0] += 1 / 512
        norm[1] += 1 / 128
    masters.write_back()
    assert arrival.share(before)() == pytest.approx(16 / 17)  # only the second change


@pytest.mark.parametrize(
    ("model", "train", "low", "high"),
    [
        ({}, {"masters": "dithered"}, 0.8, 1.2),
        ({}, {"masters": "plain"}, 0.0, 0.2),
        pytest.param(LORA, {"masters": "dithered"}, 0.8, 1.2, marks=pytest.mark.slow),
        pytest.param(LORA, {"masters": "plain"}, 0.0, 0.2, marks=pytest.mark.slow),
        ({"dtype": "float32"}, {}, 1.0, 1.0),
        (LORA | {"dtype": "float32"}, {}, 1.0, 1.0),
    ],
    ids=["dithered", "plain", "lora dithered", "lora plain", "float32", "lora float32"],
)
def test_a_step_reports_the_share(bfloat16_model, model, train, low, high) -> None:
    sections = {"model": {"dtype": "bfloat16"} | model, "train": {"lr": 2e-5} | train}
    metrics = from_disk(bfloat16_model, **sections).train(random_batch(1)).metrics
    assert low <= metrics["update/arrived"] <= high


@pytest.mark.parametrize("rate", [1e-6, 2e-5])
def test_of_a_float16_checkpoint_an_update_arrives_once(tmp_path, rate: float) -> None:
    """An eighth of its numbers lies half-way between two of bfloat16, where any update carries them across."""
    tiny_model(dtype=torch.float16, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    consumer = from_disk(tmp_path, model={"dtype": "bfloat16"}, train={"lr": rate})
    start = {name: tensor.clone() for name, tensor in consumer.weights()}
    saved = tiny_model(dtype=torch.float16, hidden_size=64, intermediate_size=128)
    for name, tensor in saved.named_parameters():
        assert torch.equal(start[name], tensor.to(torch.bfloat16))
    assert 0.8 <= consumer.train(random_batch(1)).metrics["update/arrived"] <= 1.2


def test_merged_adapters_arrive_and_version_0_is_bitwise_the_checkpoint(bfloat16_model) -> None:
    """The published change is the change of the adapters, not what rounding leaves of it."""
    sections = {"model": {"dtype": "bfloat16"} | LORA, "train": {"lr": 1e-4}}
    consumer = from_disk(bfloat16_model, **sections)
    base = dict(
        tiny_model(dtype=torch.bfloat16, hidden_size=64, intermediate_size=128).named_parameters()
    )
    start = {name: tensor.clone() for name, tensor in consumer.weights()}
    assert start.keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in start.items())
    for batch in batches(2):
        digest = consumer.train(batch).digest
    assert digest == consumer.digest()  # nothing is drawn anew
    published = dict(consumer.weights())
    dot = square = 0.0
    for name, layer in consumer.policy.adapted_layers().items():
        own = name.replace(".base_layer.", ".")
        delta = layer.get_delta_weight("default").detach().double()
        change = published[own].double() - start[own].double()
        dot += float((delta * change).sum())
        square += float(delta.square().sum())
    assert dot / square == pytest.approx(1.0, abs=0.1)
