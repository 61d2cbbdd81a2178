"""Adaptive coefficients: the controller on hand-worked numbers, through updates, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.training.algo.controller import LARGEST_FACTOR, adapted
from penstock.training.algo.method import check_algorithm
from stages.training_data import config_of, consumer_of, exact_model, random_batch


@pytest.mark.parametrize(
    ("measured", "sign", "factor"),
    [
        (0.055, 1, 1.01),  # 10 % above the target: 0.1 x 0.1
        (0.5, 1, 1.02),  # ten times the target: the error is bounded
        (0.0, 1, 0.98),
        (0.05, 1, 1.0),
        (0.045, -1, 1.01),  # entropy 10 % below its target: pay more for it
        (0.5, -1, 0.98),
        (math.nan, 1, 1.0),
    ],
)
def test_the_controller_on_hand_worked_numbers(measured: float, sign: int, factor: float) -> None:
    assert adapted(1.0, measured, 0.05, sign=sign) == pytest.approx(factor)


def test_a_coefficient_stays_within_its_range_and_without_a_target_where_it_is() -> None:
    low = high = 1.0
    for _ in range(2000):
        low, high = adapted(low, 0.0, 0.1, sign=1), adapted(high, 9.0, 0.1, sign=1)
    assert (low, high) == (1 / LARGEST_FACTOR, LARGEST_FACTOR)
    assert adapted(0.7, 9.0, 0.0, sign=1) == 0.7


def test_the_coefficients_of_updates_follow_their_means() -> None:
    algorithm = {"kl_beta": 0.1, "kl_target": 1e-9, "entropy_beta": 0.01, "entropy_target": 1e-9}
    consumer = consumer_of(
        config_of(algorithm=algorithm), model=exact_model(), reference=exact_model(seed=5)
    )
    betas = []
    for step in (1, 2, 3):
        batch = random_batch()
        batch = type(batch)(step=step, groups=batch.groups)
        metrics = consumer.train(batch).metrics
        betas.append((metrics["kl/beta"], metrics["entropy/beta"]))
    assert betas == [
        pytest.approx((0.1 * 1.02**done, 0.01 * 0.98**done)) for done in range(3)
    ]  # KL and entropy are above their targets: hold closer, and pay less for entropy


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"kl_target": 0.1}, r"kl_target: got 0.1 with kl_beta 0 and kl_in loss, allowed"),
        ({"name": "dapo", "kl_target": 0.1, "kl_beta": 0.1}, r"kl_target: got .* kl_in none"),
        ({"entropy_target": 0.3}, r"entropy_target: got 0.3 with entropy_beta 0"),
    ],
)
def test_a_target_without_a_coefficient_is_refused(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_algorithm(config_of(algorithm=algorithm))
