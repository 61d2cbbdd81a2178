"""Schedules on hand-worked numbers; clipping; where masters start and what of an update arrives."""

from itertools import pairwise

import pytest
import torch

from penstock.config import TrainConfig
from penstock.errors import UserError
from penstock.training import consumer as consumer_module
from penstock.training.moments import StoredAdamW
from penstock.training.optimizer import (
    LossScale,
    Masters,
    clip_gradients,
    learning_rate,
)
from penstock.training.parallel.ranks import Ranks
from penstock.training.parallel.sharding import Sharding
from stages.training_data import batches, from_disk, random_batch, tiny_model


def rates(**fields):
    config = TrainConfig(lr=1.0, **fields)
    return [learning_rate(config, step, 10) for step in range(1, 13)]


def test_constant_after_a_warm_up() -> None:
    assert rates(warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_share_and_stays() -> None:
    got = rates(schedule="linear", min_lr_ratio=0.1)
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.1 + 0.9 * 0.5)
    assert got[10] == got[11] == pytest.approx(0.1)


def test_cosine_is_half_way_in_the_middle() -> None:
    got = rates(schedule="cosine", min_lr_ratio=0.1)
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.55)
    assert got[11] == pytest.approx(0.1)
    assert all(left >= right for left, right in pairwise(got))


def test_gradients_are_scaled_to_the_norm_and_never_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    alone = Sharding(Ranks())
    assert clip_gradients({"w": parameter}, 1.0, alone) == pytest.approx(5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_gradients({"w": parameter}, 10.0, alone) == pytest.approx(1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_gradients({"w": torch.nn.Parameter(torch.zeros(1))}, 1.0, alone) == 0.0


@pytest.mark.parametrize(("eps", "change"), [(1e-8, 1.0), (3.0, 0.25)])
def test_epsilon_bounds_the_step_of_small_gradients(eps, change) -> None:
    """The first step of AdamW is lr x gradient / (abs(gradient) + eps): 1 / (1 + 3) of the rate."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    StoredAdamW({"w": parameter}, TrainConfig(lr=1.0, eps=eps)).step()
    assert -parameter.item() == pytest.approx(change)


def test_vectors_are_not_decayed() -> None:
    parameters = {
        "matrix": torch.nn.Parameter(torch.ones(2, 2)),
        "norm": torch.nn.Parameter(torch.ones(2)),
    }
    optimizer = StoredAdamW(parameters, TrainConfig(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {id(parameters["matrix"]): 0.5, id(parameters["norm"]): 0.0}


def starting_masters(folder, **train):
    """Return the masters and the published weights of a bfloat16 run before its first step."""
    consumer = from_disk(folder, model={"dtype": "bfloat16"}, train=train)
    masters = {name: p.detach().clone() for name, p in consumer.masters.parameters.items()}
    return masters, dict(consumer.weights())


@pytest.mark.parametrize("start", ["dithered", "plain"])
def test_masters_have_the_digits_of_a_float32_file(saved_model, start) -> None:
    file = dict(tiny_model(dtype=torch.float32).named_parameters())
    masters, published = starting_masters(saved_model, masters=start)
    assert masters.keys() == published.keys() == file.keys()
    changed = count = 0
    for name, exact in file.items():
        assert torch.equal(published[name], exact.bfloat16())
        long = (exact.view(torch.int32) & 0xFF) != 0  # of 256 random numbers one is short by chance
        kept = long if start == "dithered" else torch.ones_like(long)
        assert torch.equal(masters[name][kept], exact[kept])
        if exact.ndim == 2:  # norms are ones
            changed, count = changed + int((masters[name] != exact).sum()), count + exact.numel()
    assert changed < 0.01 * count


def test_masters_of_a_bfloat16_file_are_dithered_unless_told_otherwise(tmp_path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    dithered, published = starting_masters(tmp_path)
    plain, same = starting_masters(tmp_path, masters="plain")
    for name, weight in model.named_parameters():
        assert torch.equal(published[name], weight)
        assert torch.equal(same[name], weight)
        assert torch.equal(plain[name], weight.float())
        assert (dithered[name] != weight.float()).all()
        assert torch.equal(dithered[name].bfloat16(), weight)
    assert torch.equal(starting_masters(tmp_path)[0][name], dithered[name])


def test_the_loss_scale_halves_on_an_overflow_and_doubles_after_good_updates() -> None:
    scale = LossScale(torch.float16)
    assert scale.factor == 2.0**16
    assert scale.overflowed(False)
    assert (scale.factor, scale.good_updates) == (2.0**15, 0)
    assert not any(scale.overflowed(True) for _ in range(LossScale.GROWTH))
    assert (scale.factor, scale.good_updates) == (2.0**16, 0)
    for _ in range(16):
        assert scale.overflowed(False)
    assert not scale.overflowed(False)  # at 1 it is not the scale's fault
    for _ in range(30 * LossScale.GROWTH):
        scale.overflowed(True)
    assert scale.factor == LossScale.LARGEST
    unused = LossScale(torch.bfloat16)
    assert not unused.overflowed(False)
    assert unused.factor == 1.0


def test_float16_trains_like_float32_and_small_gradients_survive(saved_model) -> None:
    """Losses a million times smaller make gradients that float16 alone would round to zero."""
    changes = {}
    for dtype in ("float32", "float16"):
        consumer = from_disk(saved_model, model={"dtype": dtype}, train={"lr": 1e-3})
        before = {n: p.detach().clone() for n, p in consumer.masters.parameters.items()}
        loss = consumer.loss_scale.backward
        consumer.loss_scale.backward = lambda value, loss=loss: loss(value * 1e-6)
        metrics = consumer.train(random_batch(1)).metrics
        assert metrics["updates/skipped"] == 0.0
        assert metrics["loss_scale"] == (2.0**16 if dtype == "float16" else 1.0)
        changes[dtype] = torch.cat(
            [(p.detach() - before[n]).flatten() for n, p in consumer.masters.parameters.items()]
        )
    cosine = torch.cosine_similarity(changes["float32"], changes["float16"], dim=0)
    assert float(cosine) > 0.95
    for name, tensor in consumer.weights():
        assert tensor.dtype == torch.float16, name


def test_weights_beyond_float16_are_refused() -> None:
    model = tiny_model(dtype=torch.float32)
    model.model.norm.weight.data[3] = 70000.0
    with pytest.raises(UserError, match=r"model\.dtype: got 'float16', but model\.norm\.weight"):
        Masters(model, torch.float16, sharding=Sharding(Ranks()))
    Masters(model, torch.bfloat16, sharding=Sharding(Ranks()))


def test_an_overflow_skips_the_update_counts_it_and_is_saved(
    saved_model, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(consumer_module, "MAX_BAD_UPDATES", 1)
    settings = {"model": {"dtype": "float16"}}
    first, second = batches(2)
    consumer = from_disk(saved_model, **settings)
    consumer.loss_scale.factor = 2.0**40
    before = consumer.digest()
    report = consumer.train(first)
    assert report.metrics["updates/skipped"] == 1.0
    assert report.metrics["loss_scale"] == 2.0**39
    assert report.digest == before
    consumer.loss_scale.factor = 2.0**10
    consumer.snapshot(tmp_path)()
    expected = consumer.train(second).digest
    assert expected != before
    resumed = from_disk(saved_model, **settings)
    resumed.load(tmp_path)
    assert resumed.loss_scale.state_dict() == {"factor": 2.0**10, "good_updates": 0}
    assert resumed.train(second).digest == expected
