"""Averages of the weights: a reference that moves, the average that is exported, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import UserError
from penstock.training.adapters import add_adapters
from penstock.training.algo.method import check_algorithm
from penstock.training.average import EMA, REFERENCE
from penstock.training.consumer import Consumer
from stages.training_data import config_of, consumer_of, exact_model, random_batch, tiny_model

WITH_KL = {"algorithm": {"kl_beta": 0.1}}


def train(consumer: Consumer, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train the steps; return the weights after each."""
    after = {}
    for step in steps:
        consumer.train(dataclasses.replace(random_batch(), step=step))
        after[step] = weights(consumer)
    return after


def weights(consumer: Consumer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in consumer.weights()}


def published(consumer: Consumer, name: str) -> dict[str, torch.Tensor]:
    with consumer.averages[name].in_place(consumer.policy):
        return weights(consumer)


def test_the_average_on_hand_worked_numbers() -> None:
    """0.75 a + 0.25 w, after each step."""
    consumer = consumer_of(config_of(train={"ema_decay": 0.75, "lr": 0.01}), model=exact_model())
    start = weights(consumer)
    after = train(consumer, 1, 2)
    for name, average in published(consumer, EMA).items():
        once = 0.75 * start[name] + 0.25 * after[1][name]
        torch.testing.assert_close(average, 0.75 * once + 0.25 * after[2][name])


def test_the_reference_becomes_the_policy_every_second_step() -> None:
    config = config_of(train={"reference_every": 2, "lr": 0.01}, **WITH_KL)
    consumer = consumer_of(config, model=exact_model())
    start = weights(consumer)
    (first,) = train(consumer, 1).values()
    assert_equal(published(consumer, REFERENCE), start)
    assert_equal(weights(consumer), first)  # its own weights came back
    (second,) = train(consumer, 2).values()
    assert_equal(published(consumer, REFERENCE), second)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_reference_that_has_not_moved_yet_is_the_starting_policy() -> None:
    batch = random_batch()
    still = consumer_of(config_of(**WITH_KL), model=exact_model(), reference=exact_model())
    moving = consumer_of(config_of(train={"reference_every": 9}, **WITH_KL), model=exact_model())
    for step in (1, 2):
        reports = [c.train(dataclasses.replace(batch, step=step)) for c in (still, moving)]
        assert reports[0].digest == reports[1].digest
        assert reports[0].metrics["kl/mean"] == reports[1].metrics["kl/mean"]


@pytest.mark.parametrize(
    ("dtype", "rank"),
    [
        (torch.float32, 0),
        (torch.bfloat16, 2),
        pytest.param(torch.float32, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_averages_in_a_checkpoint_continue_bitwise(
    rank: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = {"lora": {"rank": rank}, "dtype": str(dtype).removeprefix("torch.")}
    config = config_of(
        model=model, train={"reference_decay": 0.5, "ema_decay": 0.9, "lr": 0.01}, **WITH_KL
    )

    def fresh() -> Consumer:
        policy = tiny_model(dtype=torch.float32)
        if rank:
            torch.manual_seed(1)
            add_adapters(policy, config.model.lora)
        return consumer_of(config, model=policy)

    consumer, resumed = fresh(), fresh()
    train(consumer, 1, 2)
    consumer.snapshot(tmp_path)()
    resumed.load(tmp_path)
    assert_equal(published(resumed, REFERENCE), published(consumer, REFERENCE))
    assert_equal(train(resumed, 3)[3], train(consumer, 3)[3])
    assert_equal(published(resumed, EMA), published(consumer, EMA))


def test_an_average_that_a_resume_switches_on_begins_as_the_weights(tmp_path: Path) -> None:
    plain = consumer_of(config_of(train={"lr": 0.01}), model=exact_model())
    train(plain, 1)
    plain.snapshot(tmp_path)()
    averaged = consumer_of(config_of(train={"ema_decay": 0.9}), model=exact_model())
    averaged.load(tmp_path)
    assert_equal(published(averaged, EMA), weights(plain))
    averaged.snapshot(tmp_path / "on")()
    plain.load(tmp_path / "on")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train": {"reference_every": 2}}, r"train\.reference_every: got 2, allowed: 0 unless"),
        (
            {"train": {"reference_decay": 0.9}},
            r"train\.reference_decay: got 0.9, allowed: 0 unless",
        ),
        (
            {"train": {"reference_every": 2, "reference": "demo"}, **WITH_KL},
            r"reference_every: got 2 with train\.reference 'demo', allowed: one of the two",
        ),
    ],
)
def test_a_reference_that_cannot_move_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(**fields))
