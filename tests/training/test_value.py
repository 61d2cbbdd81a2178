"""PPO's value model: GAE and the value loss on hand-worked numbers, its gradient, its checkpoints, its learning."""

import itertools

import numpy as np
import pytest
import torch

from penstock.errors import UserError
from penstock.training.algo.doubts import algorithm_doubts
from penstock.training.algo.method import check_algorithm
from penstock.training.flat_batch import FlatBatch
from penstock.training.value import gae, token_rewards, value_loss
from penstock.types import Batch, Score
from stages.training_data import (
    batches,
    config_of,
    consumer_of,
    exact_model,
    random_batch,
    tiny_model,
)


def ppo(**sections):
    algorithm = {"name": "ppo"} | sections.pop("algorithm", {})
    return config_of(algorithm=algorithm, **sections)


def test_gae_by_hand() -> None:
    # rollouts of three tokens, of none and of one; gamma 1/2, lambda 1/2
    rewards_N, values_N = np.array([0.0, 1.0, 4.0, 3.0]), np.array([2.0, 4.0, 2.0, 1.0])
    got_N = gae(rewards_N, values_N, np.array([0, 3, 3, 4]), 0.5, 0.5)
    # errors: 0 + 2 - 2 = 0; 1 + 1 - 4 = -2; 4 - 2 = 2; and 3 - 1 = 2
    assert got_N.tolist() == [0 + (-2 + 2 / 4) / 4, -2 + 2 / 4, 2.0, 2.0]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (1.0, 0.0)])
def test_gae_is_the_published_recursion(gamma: float, gae_lambda: float) -> None:
    generator = np.random.default_rng(0)
    counts = [3, 0, 7, 1, 7, 2]
    bounds = np.cumsum([0, *counts])
    rewards_N, values_N = generator.standard_normal((2, sum(counts)))
    got_N = gae(rewards_N, values_N, bounds, gamma, gae_lambda)
    for first, end in itertools.pairwise(bounds):
        advantage, next_value = 0.0, 0.0
        for token in reversed(range(first, end)):
            error = rewards_N[token] + gamma * next_value - values_N[token]
            advantage = error + gamma * gae_lambda * advantage
            next_value = values_N[token]
            assert got_N[token] == pytest.approx(advantage, abs=1e-12)


def test_rewards_come_at_the_ends_of_turns_and_observations_are_passed_over() -> None:
    batch = random_batch(groups=1, size=2)
    rollout, other = batch.groups[0].rollouts
    rollout.response_ids = np.arange(1, 7, dtype=np.int32)
    rollout.logprobs = np.full(6, -1.0, np.float32)
    rollout.loss_mask = np.array([True, True, False, False, True, True])  # two tokens of a tool
    rollout.segments = (type(rollout.segments[0])(0, 6),)
    rollout.earned = ((2, 0.0), (4, 1.5))  # the first turn had earned 1.5 before the second began
    rollout.score, other.score = Score(2.0), Score(1.0)
    settings = consumer_of(ppo()).settings
    flat = FlatBatch.from_groups(batch.groups, 1, settings)
    penalty_N = np.full(flat.num_tokens, 0.25)
    got_N = token_rewards(flat, flat.rewards_R, penalty_N)
    assert got_N[:4].tolist() == [-0.25, 1.25, -0.25, 0.25]
    assert got_N[4:].tolist() == [*[-0.25] * (len(other.response_ids) - 1), 0.75]


def test_value_loss_by_hand() -> None:
    values_N = torch.tensor([1.0, 3.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    old_N, returns_N = torch.ones(4), torch.tensor([0.0, 4.0, 0.0, 4.0])
    # moved by 0, 2, 2, -1: held at 1, 1.5, 1.5, 0.5
    got_N = value_loss(values_N, old_N, returns_N, 0.5)
    assert got_N.tolist() == [0.5, 2.5**2 / 2, 4.5, 8.0]
    got_N.sum().backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == [1.0, 0.0, 3.0, -4.0]
    assert value_loss(values_N, old_N, returns_N, 0.0).tolist() == [0.5, 0.5, 4.5, 8.0]


def test_the_first_update_has_the_advantages_and_gradient_of_plain_autograd() -> None:
    """Whole sequences, one at a time, through transformers in float64."""
    batch = random_batch(groups=3, size=1)
    config = ppo(algorithm={"gae_lambda": 0.9, "gamma": 0.8}, train={"lr": 1e-9})
    consumer = consumer_of(config)
    assert consumer.critic is not None
    head = consumer.critic.masters.parameters["value_head.weight"]
    assert head.dtype == torch.float64
    with torch.no_grad():
        head.normal_(generator=torch.Generator().manual_seed(0))
    plain = exact_model()
    plain_head = head.detach().clone().requires_grad_()
    rows = [values_of(plain, plain_head, rollout) for rollout in batch.rollouts]
    advantages, losses = [], []
    for row, rollout in zip(rows, batch.rollouts, strict=True):
        rewards = np.append(np.zeros(len(row) - 1), rollout.reward)
        whole = np.array([0, len(row)])
        advantages.append(gae(rewards, row.detach().numpy(), whole, 0.8, 0.9))
        returns = torch.from_numpy(advantages[-1]) + row.detach()
        losses.append((row - returns).square() / 2)
    torch.cat(losses).mean().backward()
    all_N = np.concatenate(advantages)
    part = consumer._prepare(batch, num_updates=1).parts[0]
    assert part.advantages_N == pytest.approx((all_N - all_N.mean()) / all_N.std(), abs=1e-6)
    consumer._accumulate(consumer._prepare(batch, num_updates=1), part, np.arange(3))
    expected = {n: p.grad for n, p in plain.named_parameters()}
    expected["value_head.weight"] = plain_head.grad
    for name, master in consumer.critic.masters.parameters.items():
        assert torch.allclose(master.grad, expected[name], atol=1e-10), name


def values_of(model, head, rollout):
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64)
    states = model.model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
    return states[len(rollout.prompt_ids) - 1 : -1] @ head[0]


def test_without_a_critic_the_advantages_are_those_of_reinforce_pp() -> None:
    """Values of zero and lambda 1 leave the rewards alone."""
    batch = random_batch(groups=4, size=1)
    config = config_of(algorithm={"name": "reinforce_pp"}, sampling={"num_generations": 1})
    with_critic = consumer_of(ppo())._prepare(batch, num_updates=1).parts[0]
    without = consumer_of(config)._prepare(batch, num_updates=1).parts[0]
    assert with_critic.advantages_N == pytest.approx(without.advantages_N)


def test_a_checkpoint_continues_bitwise(tmp_path) -> None:
    first, second, third = batches(3)
    config = ppo(train={"mini_batches": 2, "groups_per_step": 6, "num_epochs": 2})
    consumer = consumer_of(config)
    for batch in (first, second):
        consumer.train(batch)
    consumer.snapshot(tmp_path)()
    resumed = consumer_of(config)
    resumed.load(tmp_path)
    after, again = consumer.train(third), resumed.train(third)
    assert after.digest == again.digest
    assert after.metrics["value/loss"] == again.metrics["value/loss"] > 0


def test_a_run_may_change_to_ppo_and_back(tmp_path) -> None:
    first, second, third = batches(3)
    plain = config_of(algorithm={"name": "grpo"})
    consumer = consumer_of(plain)
    consumer.train(first)
    consumer.snapshot(tmp_path / "plain")()
    changed = consumer_of(ppo())
    changed.load(tmp_path / "plain")
    changed.train(second)
    changed.snapshot(tmp_path / "ppo")()
    back = consumer_of(plain)
    back.load(tmp_path / "ppo")
    assert back.digest() == changed.digest()
    back.train(third)


def test_a_stop_changes_nothing() -> None:
    first, second = batches(2)
    stopped, plain = consumer_of(ppo()), consumer_of(ppo())
    stopped.request_stop()
    with pytest.raises(BaseException, match="stop"):
        stopped.train(first)
    for batch in (first, second):
        assert stopped.train(batch).digest == plain.train(batch).digest


def test_the_policy_waits_while_the_critic_warms_up() -> None:
    consumer = consumer_of(ppo(train={"critic_warmup_steps": 2}))
    digest = consumer.digest()
    reports = [consumer.train(batch) for batch in batches(3)]
    assert [report.digest == digest for report in reports] == [True, True, False]
    assert all(report.metrics["value/loss"] > 0 for report in reports)
    assert reports[0].metrics["entropy/mean"] > 0


@pytest.mark.slow
def test_values_learn_what_can_be_known() -> None:
    """The reward is a function of the prompt's first token: the critic explains it, group or no group."""
    consumer = consumer_of(
        ppo(train={"lr": 1e-4, "critic_lr": 1e-2}, sampling={"num_generations": 1}),
        model=tiny_model(dtype=torch.float32),
    )
    explained, losses = [], []
    for step in range(1, 31):
        batch = random_batch(step, groups=48, size=1, seed=step)
        for rollout in batch.rollouts:
            rollout.score = Score(float(rollout.prompt_ids[0] % 2))
        metrics = consumer.train(Batch(step=step, groups=batch.groups)).metrics
        explained.append(metrics["value/explained_variance"])
        losses.append(metrics["value/loss"])
    assert explained[0] == pytest.approx(0.0)  # a head of zeros
    assert np.mean(explained[-5:]) > 0.6
    assert np.mean(losses[-5:]) < losses[0] / 2


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"baseline": "group_mean"}}, "algorithm.baseline: got group_mean with ppo"),
        (
            {"train": {"parallel": {"tensor": 2}}, "launch": {"num_consumers": 2}},
            "one rank per copy",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(sections, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_algorithm(ppo(**sections))


def test_keys_that_no_value_model_reads_are_told() -> None:
    train = {"critic_lr": 1e-3, "critic_warmup_steps": 2}
    assert algorithm_doubts(ppo(train=train)) == []
    lines = algorithm_doubts(config_of(train=train))
    assert [line.split(" has no effect")[0] for line in lines] == [f"train.{key}" for key in train]
    (line,) = algorithm_doubts(ppo(algorithm={"value_clip": 0.2}))
    assert line.startswith("algorithm.value_clip has no effect with one update per batch")
    assert algorithm_doubts(ppo(algorithm={"value_clip": 0.2}, train={"num_epochs": 2})) == []


def test_one_generation_is_enough() -> None:
    check_algorithm(ppo(sampling={"num_generations": 1}))
