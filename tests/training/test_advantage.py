"""Advantages on hand-worked numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.training import objective
from penstock.training.algo import advantage
from penstock.training.algo.settings import AlgorithmSettings
from penstock.types import Score
from stages.training_data import config_of, consumer_of, random_batch

REWARDS = np.array([1.0, 0.0, 0.0, 1.0])  # mean 1/2, sample deviation 1/sqrt(3)


def test_grpo_divides_by_the_groups_own_deviation() -> None:
    expected = np.array([0.5, -0.5, -0.5, 0.5]) / (3**-0.5 + 1e-4)
    np.testing.assert_allclose(
        advantage.group_advantages(REWARDS, AlgorithmSettings()), expected, rtol=1e-12
    )


def test_rloo_takes_the_mean_of_the_others() -> None:
    settings = AlgorithmSettings(baseline="leave_one_out", normalize="none")
    # reward 1: the others have (0 + 0 + 1) / 3; reward 0: the others have (1 + 0 + 1) / 3
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    np.testing.assert_allclose(advantage.group_advantages(REWARDS, settings), expected)


def test_dr_grpo_only_centres() -> None:
    settings = AlgorithmSettings(normalize="none")
    np.testing.assert_allclose(
        advantage.group_advantages(REWARDS, settings), [0.5, -0.5, -0.5, 0.5]
    )


def test_whole_batch_normalisation_divides_by_the_deviation_and_does_not_multiply() -> None:
    values = np.array([2.0, 0.0, 4.0, 2.0])  # mean 2, population deviation sqrt(2)
    mean, deviation = advantage.batch_mean_and_deviation(advantage.moments(values))
    assert (mean, deviation) == pytest.approx((2.0, 2**0.5))
    np.testing.assert_allclose(
        advantage.standardize(values, mean, deviation), [0, -(2**0.5), 2**0.5, 0], rtol=1e-7
    )


def test_moments_of_parts_add_up_to_those_of_the_whole() -> None:
    values = np.arange(7.0)
    parts = advantage.moments(values[:3]) + advantage.moments(values[3:])
    np.testing.assert_allclose(parts, advantage.moments(values))


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [7.0], [1e300, 1e300]])
def test_no_variance_gives_exact_zeros(baseline, normalize, rewards) -> None:
    settings = AlgorithmSettings(baseline=baseline, normalize=normalize)
    assert not advantage.group_advantages(np.array(rewards), settings).any()


def test_rewards_of_turns_are_not_divided_by_the_rounding_of_their_sums() -> None:
    """0.1 + 0.2 and 0.3 are the same reward, but not the same number; the turns earn up to 0.3."""
    rewards = np.array([0.1 + 0.2, 0.3])
    returns = np.array([0.3, 0.2, 0.3])
    assert np.ptp(rewards) > 0
    scale = advantage.group_scale(rewards, returns, AlgorithmSettings())
    assert scale == pytest.approx(returns.std(ddof=1) + 1e-4)


def test_rewards_of_the_batch_have_one_deviation() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 3.0])
    assert advantage.batch_scale(advantage.moments(rewards)) == pytest.approx(
        rewards.std(ddof=1) + 1e-4
    )
    assert advantage.batch_scale(advantage.moments(np.full(3, 0.1))) == np.inf


def test_a_batch_without_variance_or_without_tokens_is_zero_and_finite() -> None:
    mean, deviation = advantage.batch_mean_and_deviation(advantage.moments(np.zeros(0)))
    assert (mean, deviation) == (0.0, 0.0)
    assert not advantage.standardize(np.full(3, 5.0), 5.0, 0.0).any()
    for value in (0.7, 1e-3, 1000.3):
        assert advantage.batch_mean_and_deviation(advantage.moments(np.full(11, value)))[1] == 0


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=12))
def test_group_relative_advantages_are_finite_and_sum_to_zero(rewards) -> None:
    for baseline in ("group_mean", "leave_one_out"):
        for normalize in ("group", "none"):
            settings = AlgorithmSettings(baseline=baseline, normalize=normalize)
            values = advantage.group_advantages(np.array(rewards), settings)
            assert np.isfinite(values).all()
            assert abs(values.sum()) < 1e-6 * (1 + np.abs(values).max())


def test_overlong_penalty_grows_over_the_last_quarter_and_is_full_when_truncated() -> None:
    lengths = np.array([50, 75, 80, 99, 100, 100])
    truncated = np.array([False, False, False, False, False, True])
    settings = AlgorithmSettings(overlong_penalty=10.0)
    got = advantage.overlong_penalties(lengths, truncated, np.full(6, 100), settings)
    np.testing.assert_allclose(got, [0, 0, -2.0, -9.6, -10.0, -10.0])
    settings = AlgorithmSettings(overlong_penalty=10.0, overlong_window=50)
    got = advantage.overlong_penalties(lengths, truncated, np.full(6, 100), settings)
    np.testing.assert_allclose(got, [0, -5.0, -6.0, -9.8, -10.0, -10.0])


def test_running_into_the_limit_never_beats_finishing_late() -> None:
    lengths = np.array([2000, 2048])
    cut = advantage.overlong_penalties(
        lengths, np.array([False, True]), np.full(2, 2048), AlgorithmSettings(overlong_penalty=1.0)
    )
    assert cut[1] < cut[0] < 0


def test_maxrl_divides_by_the_mean() -> None:
    settings = AlgorithmSettings(normalize="mean")
    got = advantage.group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), settings)
    np.testing.assert_allclose(got, [3.0, -1.0, -1.0, -1.0])
    got = advantage.group_advantages(np.array([1.0, 1.0, 1.0, 0.0]), settings)
    np.testing.assert_allclose(got, [1 / 3, 1 / 3, 1 / 3, -1.0])
    for rewards in ([0.0, 0.0], [1.0, 1.0], [-1.0, 0.0]):
        assert not advantage.group_advantages(np.array(rewards), settings).any()
    got = advantage.group_advantages(np.array([1.0 + 1e-9, -1.0]), settings)  # the mean is nearly 0
    np.testing.assert_allclose(got, [1.0, -1.0], atol=1e-6)


def test_gdpo_normalises_each_reward_by_itself() -> None:
    """The second reward varies by a hundredth of the first and counts as much, times its weight."""
    rewards_GK = np.array([[1.0, 0.01], [0.0, 0.0], [1.0, 0.0], [0.0, 0.01]])
    first = rewards_GK[:, 0] - 0.5
    second = rewards_GK[:, 1] - 0.005
    wanted = first / (first.std(ddof=1) + 1e-4) + 2 * second / (second.std(ddof=1) + 1e-4)
    got = advantage.sum_of_normalized(rewards_GK, np.array([1.0, 2.0]))
    np.testing.assert_allclose(got, wanted)
    assert not advantage.sum_of_normalized(np.ones((3, 2)), np.ones(2)).any()
    assert not advantage.sum_of_normalized(np.ones((1, 2)), np.ones(2)).any()


def test_gdpo_takes_the_rewards_of_its_task_by_name() -> None:
    """(sum of normalised - the batch's mean) / (the batch's deviation + 1e-4), as TRL's normalize_then_sum."""
    batch = random_batch(groups=3, size=4)
    generator = np.random.default_rng(0)
    parts = generator.random((12, 2))
    for rollout, (right, short) in zip(batch.rollouts, parts, strict=True):
        named = {"math": right, "math.format": 0.5, "length": short}
        rollout.score = Score(right + 0.5 * short, named)
    rewards = [{"type": "math"}, {"type": "math", "weight": 0.5}]
    config = config_of(algorithm={"name": "gdpo"}, tasks={"train": {"rewards": rewards}})
    (part,) = consumer_of(config)._prepare(batch, num_updates=1).parts
    grouped = torch.tensor(parts).view(3, 4, 2)
    each = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    summed = (each.view(-1, 2) * torch.tensor([1.0, 0.5], dtype=torch.float64)).sum(1)
    wanted = (summed - summed.mean()) / (summed.std() + 1e-4)
    np.testing.assert_allclose(part.advantages_N, wanted.numpy()[part.flat.rollout_N], rtol=1e-9)


@pytest.mark.parametrize("rewards", [[{"type": "math"}], []])
def test_gdpo_hears_what_the_turns_of_an_agent_earned(rewards: list[dict]) -> None:
    """1 / 0.5 / 0 in the answer's reward, 0 / 2 / 4 in the turns: each over its own deviation, 0.5 and 2."""
    batch = random_batch(groups=1, size=3)
    for number, rollout in enumerate(batch.rollouts):
        answer, turns = 1.0 - 0.5 * number, 2.0 * number
        rollout.score = Score(answer + turns, {"math": answer} if rewards else {})
        rollout.earned = ((len(rollout.response_ids), turns),)
    config = config_of(algorithm={"name": "gdpo"}, tasks={"train": {"rewards": rewards}})
    (part,) = consumer_of(config)._prepare(batch, num_updates=1).parts
    got = objective.batch_rewards(part.flat, batch.groups, config, part.algorithm.settings)
    if rewards:
        wanted = [0.5 / 0.5001 - 2 / 2.0001, 0.0, 2 / 2.0001 - 0.5 / 0.5001]
    else:
        wanted = [-1.5 / 1.5001, 0.0, 1.5 / 1.5001]
    np.testing.assert_allclose(got, wanted, rtol=1e-9)
