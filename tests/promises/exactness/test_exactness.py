"""Law 9: no way of splitting an update changes its gradient, beyond the order in which float64 adds."""

import dataclasses

import numpy as np
import pytest
import torch

from penstock.config import AlgorithmConfig
from penstock.training import algo
from penstock.training.algo.method import resolve_settings
from penstock.training.flat_batch import FlatBatch, mini_batches
from penstock.training.objective import TokenInputs
from penstock.types import Score
from stages.training_data import (
    Gradients,
    config_of,
    consumer_of,
    exact_model,
    gradient_of,
    random_batch,
    relative_gap,
    tricky_batch,
)

EXACT = 1e-12  # relative; the largest gap that was seen is 1e-15
AGGREGATIONS = ["token", "sequence", "constant"]


def split_ways(config):
    """Yield the same config with other micro-batches."""
    for tokens in (1, 40):
        train = config.train.model_copy(update={"micro_batch_tokens": tokens})
        yield config.model_copy(update={"train": train})


# one algorithm with every aggregation, and two others as they are; `make test-long` has all pairs
ALGORITHMS = {
    name: algo.ALGORITHMS[name] for name in algo.ALGORITHMS if name != "distill"
}  # no rewards
PAIRS = [(name, aggregation) for name in ALGORITHMS for aggregation in (None, *AGGREGATIONS)]
QUICK_PAIRS = {("gspo", None), ("reinforce_pp", None)}


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        pytest.param(
            *pair, marks=[] if "grpo" in pair or pair in QUICK_PAIRS else [pytest.mark.slow]
        )
        for pair in PAIRS
    ],
)
def test_gradient_is_the_same_for_any_split_and_order(name, aggregation) -> None:
    config = config_of(algorithm={"name": name, "aggregation": aggregation})
    batch = tricky_batch()
    whole = gradient_of(config, batch, model=exact_model())
    assert all(torch.isfinite(grad).all() for grad in whole.values())
    assert relative_gap(whole, {name: 0 * grad for name, grad in whole.items()}) > 0
    for other in split_ways(config):
        assert relative_gap(gradient_of(other, batch, model=exact_model()), whole) < EXACT
    shuffled = dataclasses.replace(batch, groups=batch.groups[::-1])
    assert relative_gap(gradient_of(config, shuffled, model=exact_model()), whole) < EXACT


@pytest.mark.parametrize(
    "fields",
    [
        {"kl_beta": 0.3},
        {"correction": {"kind": "sequence_mask", "cap": 3.0, "floor": 0.3}},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                {"kl_beta": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
                {"name": "reinforce_pp", "kl_beta": 0.3},
                {"decoupled": True},
                {"correction": {"kind": "token_truncate", "cap": 1.2}},
                {"name": "dapo", "dual_clip": 1.5},
            )
        ),
    ],
)
def test_kl_and_corrections_keep_the_law(fields) -> None:
    config = config_of(algorithm=fields)
    batch = tricky_batch()
    needed = resolve_settings(config.algorithm).needs_reference

    def gradient(config):
        reference = exact_model(seed=5) if needed else None
        return gradient_of(config, batch, model=exact_model(), reference=reference)

    whole = gradient(config)
    for other in split_ways(config):
        assert relative_gap(gradient(other), whole) < EXACT


def plain_loss(model, batch, settings, constant_length):
    """Compute the objective the slow way: one sequence at a time, full logits, no packing."""
    terms, num_tokens, num_sequences = [], 0, 0
    for group in batch.groups:
        rewards = np.array([r.reward for r in group.rollouts])
        spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            mask = torch.from_numpy(rollout.loss_mask)
            if settings.mask_truncated and rollout.finish_reason == "length":
                mask = torch.zeros_like(mask)
            if not mask.any():
                continue
            ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]))
            logits = model(ids[None].long()).logits[0] / rollout.temperature
            log_all = torch.log_softmax(logits, -1)[len(rollout.prompt_ids) - 1 : -1]
            own = log_all.gather(-1, torch.from_numpy(rollout.response_ids)[:, None].long())[:, 0]
            ratio = (own - torch.from_numpy(rollout.logprobs)).exp()
            advantage = (reward - rewards.mean()) / (spread + 1e-4)
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)[mask]
            if advantage < 0:  # dual clip
                losses = losses.clamp(max=-settings.dual_clip * advantage)
            terms.append(losses)
            num_tokens += len(losses)
            num_sequences += 1
    if settings.aggregation == "token":
        return sum(losses.sum() for losses in terms) / num_tokens
    if settings.aggregation == "sequence":
        return sum(losses.mean() for losses in terms) / num_sequences
    return sum(losses.sum() for losses in terms) / (num_sequences * constant_length)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mask_truncated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_is_that_of_the_plain_formula(aggregation, mask_truncated) -> None:
    fields = {"aggregation": aggregation, "mask_truncated": mask_truncated}
    config = config_of(algorithm=fields)
    batch = tricky_batch()
    model = exact_model()
    plain_loss(model, batch, resolve_settings(AlgorithmConfig(**fields)), 8).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_gap(gradient_of(config, batch, model=exact_model()), expected) < EXACT


def rloo_loss(model, reference, batch, beta: float):
    """Compute RLOO the slow way: one action per response, KL in its reward, one capped weight."""
    loss, num_sequences = 0.0, sum(len(group.rollouts) for group in batch.groups)

    def total_logprob(policy, rollout):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids])).long()
        log_all = torch.log_softmax(policy(ids[None]).logits[0], -1)[
            len(rollout.prompt_ids) - 1 : -1
        ]
        return log_all.gather(-1, ids[len(rollout.prompt_ids) :, None]).sum()

    for group in batch.groups:
        own = [total_logprob(model, rollout) for rollout in group.rollouts]
        rewards = np.array(
            [
                rollout.reward
                - beta * float((logprob - total_logprob(reference, rollout)).detach())
                for logprob, rollout in zip(own, group.rollouts, strict=True)
            ]
        )
        for number, (logprob, rollout) in enumerate(zip(own, group.rollouts, strict=True)):
            advantage = rewards[number] - np.delete(rewards, number).mean()
            sampled = rollout.logprobs.sum(dtype=np.float64)
            weight = min(float(torch.exp(logprob.detach() - sampled)), 2.0)
            loss = loss - weight * advantage * logprob
    return loss / num_sequences


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_treats_a_response_as_one_action(beta) -> None:
    config = config_of(algorithm={"name": "rloo", "kl_beta": beta})
    batch, model, reference = random_batch(), exact_model(), exact_model(seed=5)
    rloo_loss(model, reference, batch, beta).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    got = gradient_of(config, batch, model=exact_model(), reference=reference if beta else None)
    assert relative_gap(got, expected) < EXACT


def size_with_a_bad_token(fields, score: float) -> float:
    """Return the gradient's norm, over that without the bad token, whose log-prob is 15 nats off."""

    def size(batch) -> float:
        gradient = gradient_of(config_of(algorithm=fields), batch)
        return float(sum(grad.square().sum() for grad in gradient.values())) ** 0.5

    batch = random_batch()
    first, *others = batch.groups[0].rollouts
    first.score = Score(score)
    for rollout in others:
        rollout.score = Score(1.0 - score)
    before = size(batch)
    first.logprobs[0] -= 15.0
    return size(batch) / before


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize(
    ("decoupled", "score"),
    [
        (False, 0.0),
        pytest.param(True, 1.0, marks=pytest.mark.slow),
        pytest.param(False, 1.0, marks=pytest.mark.slow),
        pytest.param(True, 0.0, marks=pytest.mark.slow),
    ],
)
def test_one_bad_token_does_not_drown_the_others(name, decoupled, score) -> None:
    assert size_with_a_bad_token({"name": name, "decoupled": decoupled}, score) < 4


def test_without_its_bounds_one_bad_token_drowns_the_others() -> None:
    unbounded = {"correction": {"kind": "none"}, "dual_clip": 0}
    assert size_with_a_bad_token(unbounded, 0.0) > 1e4
    assert size_with_a_bad_token(unbounded | {"decoupled": True}, 1.0) > 1e4


def test_gspo_does_not_clip_the_noise_of_an_engine() -> None:
    """Noise of 0.01 per token moves the mean over a response by more than the clip of 3e-4."""
    generator = np.random.default_rng(0)
    batch = random_batch(groups=4)
    consumer = consumer_of(config_of(algorithm={"name": "gspo"}))
    flat = FlatBatch.from_groups(batch.groups, 1, consumer.settings)
    inputs = TokenInputs.from_batch(flat, torch.float64, torch.device("cpu"))
    own_N = consumer._logprobs(flat, inputs, consumer.policy).numpy()
    for number, rollout in enumerate(flat.rollouts):
        mine = own_N[flat.bounds_R1[number] : flat.bounds_R1[number + 1]]
        rollout.logprobs = (mine + 0.01 * generator.standard_normal(len(mine))).astype(np.float32)
    metrics = consumer.train(batch).metrics
    assert metrics["clip/fraction"] == 0
    assert metrics["mismatch/kl"] > 1e-5
    raw = consumer_of(config_of(algorithm={"name": "gspo", "correction": {"kind": "none"}}))
    assert raw.train(batch).metrics["clip/fraction"] > 0.2


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_nothing_to_learn_is_a_zero_gradient_not_a_nan(name) -> None:
    config = config_of(algorithm={"name": name, "mask_truncated": True})
    batch = random_batch(finish_reason="length")
    for gradient in (gradient_of(config, batch), gradient_of(config, random_batch(groups=0))):
        assert not any(grad.any() for grad in gradient.values())


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"sft"}))  # which has no rewards
@pytest.mark.parametrize("size", [1, 4])
def test_equal_rewards_never_give_a_nan(name, size) -> None:
    batch = random_batch(size=size, score=Score(1.0))
    consumer = consumer_of(config_of(algorithm={"name": name, "overlong_penalty": 0.0}))
    report = consumer.train(batch)
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert report.metrics["groups/zero_variance"] == 1.0
    if name != "reinforce":  # it has no baseline: equal rewards still teach
        assert report.metrics["grad_norm"] == 0.0


def test_mini_batches_are_the_gradients_of_their_own_groups() -> None:
    batch = random_batch(groups=6)
    config = config_of(train={"mini_batches": 3, "groups_per_step": 6, "num_epochs": 2})
    consumer = consumer_of(config, model=exact_model())
    taken = Gradients(consumer)
    consumer.train(batch)
    numbers = consumer._updates(batch)
    assert len(taken.updates) == len(numbers) == 6
    for update, chosen in zip(taken.updates, numbers, strict=True):
        part = dataclasses.replace(batch, groups=tuple(batch.groups[number] for number in chosen))
        assert relative_gap(update, gradient_of(config_of(), part, model=exact_model())) < EXACT


def test_every_pass_over_a_batch_mixes_its_tasks_in_another_way() -> None:
    """Of 16 groups the first half is one task's; in file order each update would have one task."""
    config = config_of(train={"mini_batches": 2, "groups_per_step": 16, "num_epochs": 2})
    consumer, deals, mixed = consumer_of(config), set(), 0
    for step in range(1, 9):
        updates = consumer._updates(random_batch(step, groups=16))
        for epoch in (updates[:2], updates[2:]):
            assert sorted(np.concatenate(epoch)) == list(range(16))
            assert all(len(numbers) == 8 for numbers in epoch)
            mixed += all(0 < (numbers < 8).sum() < 8 for numbers in epoch)
            deals.add(tuple(epoch[0].tolist()))
        again = consumer_of(config)._updates(random_batch(step, groups=16))
        assert [one.tolist() for one in again] == [one.tolist() for one in updates]
    assert len(deals) >= 14  # of 256 possible ones, 16 drawn
    assert mixed >= 15  # of 16; by chance one deal in 128 gives each update a single task


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("total", [8, 6, 3])
def test_the_updates_of_all_ranks_together_are_those_of_one(world, total) -> None:
    whole = mini_batches(total, 2, seed=5)
    shares = [mini_batches(total, 2, seed=5, rank=rank, world=world) for rank in range(world)]
    for update in range(2):
        own = [rank + world * shares[rank][update] for rank in range(world)]
        assert sorted(np.concatenate(own)) == whole[update].tolist()
        if total == 8:
            assert {len(numbers) for numbers in own} == {4 // world}


@pytest.mark.parametrize(
    "temperature", [0.0, 0.3, *(pytest.param(t, marks=pytest.mark.slow) for t in (1.0, 2.5))]
)
def test_ratio_is_one_at_any_temperature_when_the_weights_are_the_same(temperature) -> None:
    """The log-probs are those of an engine with these weights at that temperature."""
    batch = random_batch(temperature=temperature)
    consumer = consumer_of(config_of(train={"micro_batch_tokens": 11}))
    flat = FlatBatch.from_groups(batch.groups, 1, resolve_settings(AlgorithmConfig()))
    inputs = TokenInputs.from_batch(flat, torch.float64, consumer.policy.device)
    own = consumer._logprobs(flat, inputs, consumer.policy).numpy()
    for rollout, start, stop in zip(
        flat.rollouts, flat.bounds_R1[:-1], flat.bounds_R1[1:], strict=True
    ):
        rollout.logprobs = own[start:stop]
    metrics = consumer.train(batch).metrics
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch/kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["importance/ess"] == pytest.approx(1.0, abs=1e-6)


def test_decoupled_with_one_update_is_weighted_by_behaviour() -> None:
    """One update: ratio is 1, so the gradient is that of weight x advantage x log-prob."""
    config = config_of(algorithm={"decoupled": True})
    consumer = consumer_of(config)
    metrics = consumer.train(random_batch()).metrics
    assert metrics["ratio/max"] == pytest.approx(1.0)
    assert metrics["clip/fraction"] == 0.0
    assert metrics["importance/max"] > 1.0
