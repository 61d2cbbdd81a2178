"""Progress and shares: absolute targets, read-once metrics, remainders that are carried."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.rollout import ProduceProgress, TaskShares


def test_largest_remainder_2_1_0_of_7_gives_5_2_0() -> None:
    shares = TaskShares({"a": 2, "b": 1, "c": 0}, 7).at(1)
    assert (shares["a"], shares["b"], shares.get("c", 0)) == (5, 2, 0)


def test_weights_9_1_half_with_batch_8_train_the_third_task_in_its_share() -> None:
    shares, total = TaskShares({"a": 9, "b": 1, "c": 0.5}, 8), Counter()
    for step in range(1, 211):
        total.update(shares.at(step))
    assert total == {"a": 1440, "b": 160, "c": 80}  # exactly 9 : 1 : 0.5


@example(weights=[1.0, 1.0, 1.0, 6.0, 6.0], size=1, steps=10)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    size=st.integers(1, 40),
    steps=st.integers(1, 60),
)
def test_every_step_is_full_and_no_task_drifts(weights: list[float], size: int, steps: int) -> None:
    shares = TaskShares({str(n): weight for n, weight in enumerate(weights)}, size)
    total: Counter[str] = Counter()
    for step in range(1, steps + 1):
        counts = shares.at(step)
        assert sum(counts.values()) == size
        assert min(counts.values()) >= 0
        total.update(counts)
    for number, weight in enumerate(weights):
        assert abs(total[str(number)] - steps * size * weight / sum(weights)) < len(weights)


def test_shares_refuse_weights_that_cannot_be() -> None:
    with pytest.raises(UserError, match="task weights"):
        TaskShares({"a": 0}, 4)
    with pytest.raises(UserError, match="task weights"):
        TaskShares({"a": 1, "b": -1}, 4)


def test_targets_are_cumulative_and_counted_once() -> None:
    progress = ProduceProgress.build(["a", "b"])
    sizes = {1: {"a": 3, "b": 1}, 2: {"a": 2, "b": 2}, 3: {"a": 4}}
    progress.ensure_target_upto(2, sizes.__getitem__)
    progress.ensure_target_upto(2, sizes.__getitem__)
    assert progress.target_samples == {"a": 5, "b": 3}
    progress.ensure_target_upto(3, sizes.__getitem__, "a")
    assert progress.target_samples == {"a": 9, "b": 3}
    assert progress.target_upto_future_step == 2


def test_loading_keeps_the_identity_of_the_dicts_and_new_tasks_at_zero() -> None:
    old = ProduceProgress.build(["a"])
    old.ensure_target_upto(2, lambda step: {"a": 4})
    old.finish_consume(1, {"a": 4})
    new = ProduceProgress.build(["a", "b"])
    held = (new.consumed_samples, new.target_samples)
    new.load_state_dict(old.state_dict())
    assert (new.consumed_samples, new.target_samples) == ({"a": 4, "b": 0}, {"a": 8, "b": 0})
    assert held[0] is new.consumed_samples
    assert held[1] is new.target_samples
    assert new.next_consumer_step == 2
    new.ensure_target_upto(2, lambda step: {"a": 4, "b": 1})
    assert new.target_samples == {"a": 8, "b": 1}


def test_build_local_is_one_batch() -> None:
    progress = ProduceProgress.build_local("a", 6, train_step=9)
    assert (progress.target("a"), progress.consumed("a"), progress.next_consumer_step) == (6, 0, 9)
