"""The objective of an update: from rewards to advantages, token weights, and the loss of a pack.

Every denominator comes from the whole batch or the whole update, over all ranks, never from a pack;
so the sum over packs is the loss, however the batch was split. The formulas live in `training/algo/`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.config import Config
from penstock.model.transfer import to_device
from penstock.training.algo import advantage, kl
from penstock.training.algo.method import Algorithm, TokenView
from penstock.training.algo.ratios import importance_weights
from penstock.training.algo.settings import AlgorithmSettings
from penstock.training.flat_batch import FlatBatch
from penstock.training.pack import Pack
from penstock.training.parallel.ranks import Ranks
from penstock.types import Group, Rollout


def shaped_rewards(
    flat: FlatBatch, max_tokens_R: np.ndarray, settings: AlgorithmSettings
) -> np.ndarray:
    """The rewards, with the overlong penalty if the algorithm has one."""
    rewards_R = flat.rewards_R
    if settings.overlong_penalty:
        rewards_R += advantage.overlong_penalties(
            flat.answer_lengths_R, flat.truncated_R, max_tokens_R, settings
        )
    return rewards_R


def batch_rewards(
    flat: FlatBatch, groups: Sequence[Group], config: Config, settings: AlgorithmSettings
) -> np.ndarray:
    """The reward of each rollout, as the algorithm counts it; a task that the config has lost counts by its defaults."""
    samplings = [
        config.task_sampling(group.task) if group.task in config.tasks else config.sampling
        for group in groups
    ]
    sizes_G = np.array([len(group.rollouts) for group in groups], np.int64)
    max_tokens_G = np.array([sampling.max_tokens for sampling in samplings], np.int64)
    rewards_R = shaped_rewards(flat, np.repeat(max_tokens_G, sizes_G), settings)
    if not settings.normalizes_each_reward:
        return rewards_R
    tasks = [config.tasks.get(group.task) for group in groups]
    weights = [[reward.weight for reward in task.rewards] if task else [] for task in tasks]
    penalties_R = rewards_R - flat.rewards_R
    return separate_rewards(flat, weights) + penalties_R


def separate_rewards(flat: FlatBatch, weights_of_group: Sequence[Sequence[float]]) -> np.ndarray:
    """The sum of each rollout's rewards, each normalised in its group by itself.

    What an agent's turns earned is one more reward. A rollout that does not name the rewards of its task has one
    reward, its sum.
    """
    rewards_R = np.zeros(len(flat.rollouts))
    for number, weights in enumerate(weights_of_group):
        members_G = np.flatnonzero(flat.group_R == number)
        rollouts = [flat.rollouts[member] for member in members_G]
        named = [_named_rewards(rollout) for rollout in rollouts]
        if any(len(values) != len(weights) for values in named):
            named, weights = [[] for _ in rollouts], []
        if not weights or any(rollout.earned for rollout in rollouts):
            sums = [np.cumsum([0.0, *np.multiply(values, weights)])[-1] for values in named]
            rest = [rollout.reward - total for rollout, total in zip(rollouts, sums, strict=True)]
            named = [[*values, value] for values, value in zip(named, rest, strict=True)]
            weights = [*weights, 1.0]
        if named:
            rewards_R[members_G] = advantage.sum_of_normalized(np.array(named), np.array(weights))
    return rewards_R


def _named_rewards(rollout: Rollout) -> list[float]:
    """The rewards of a task's list, in its order; names with a dot are terms inside a reward."""
    parts = {} if rollout.score is None else rollout.score.parts
    return [value for name, value in parts.items() if "." not in name]


def token_advantages(
    flat: FlatBatch,
    rewards_R: np.ndarray,
    penalty_N: np.ndarray | None,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> np.ndarray:
    """The advantage of every trained token; `penalty_N` is beta times KL if KL is in the reward.

    With a group baseline, the sum of a rollout's penalties is taken from its reward before the
    baseline is computed. Without one, each token pays its own penalty and those of the tokens after it.
    """
    to_go_N = None
    if penalty_N is not None:
        if settings.group_relative:
            rewards_R = rewards_R - np.bincount(
                flat.rollout_N, weights=penalty_N, minlength=len(rewards_R)
            )
        else:
            to_go_N = _sum_to_end(flat, penalty_N)
    centred_R, scales_R = np.zeros(len(rewards_R)), np.ones(len(rewards_R))
    bounds = np.searchsorted(flat.group_R, np.arange(flat.num_groups + 1)).tolist()
    for members in itertools.starmap(slice, itertools.pairwise(bounds)):
        if members.start == members.stop:
            continue
        rewards_G = rewards_R[members]
        centred_R[members] = advantage.centred(rewards_G, settings)
        returns_K = _returns_to_go(flat.rollouts[members], rewards_G)
        scales_R[members] = advantage.group_scale(rewards_G, returns_K, settings)
    if settings.baseline == "batch_mean":
        total = ranks.sum(advantage.moments(centred_R))
        mean, deviation = advantage.batch_mean_and_deviation(total)
        centred_R = centred_R - mean if deviation else np.zeros_like(centred_R)
    if settings.normalize == "batch_rewards":
        scales_R[:] = advantage.batch_scale(ranks.sum(advantage.moments(rewards_R)))
    advantages_N = (centred_R / scales_R)[flat.rollout_N]
    if (
        flat.earned_N is not None and not settings.normalizes_each_reward
    ):  # rewards of turns: a token is credited with what came after it
        advantages_N = advantages_N - flat.earned_N / scales_R[flat.rollout_N]
    if to_go_N is not None:
        advantages_N = advantages_N - to_go_N
    return standardized(advantages_N, ranks) if settings.normalize == "batch" else advantages_N


def standardized(advantages_N: np.ndarray, ranks: Ranks) -> np.ndarray:
    """The advantages of all ranks, normalised over all trained tokens of the batch."""
    total = ranks.sum(advantage.moments(advantages_N))
    return advantage.standardize(advantages_N, *advantage.batch_mean_and_deviation(total))


def _returns_to_go(rollouts: Sequence[Rollout], rewards_G: np.ndarray) -> np.ndarray:
    """The rewards still to come at the start of each rollout and, where turns have rewards, of each turn."""
    return np.array(
        [
            reward - earned
            for reward, rollout in zip(rewards_G.tolist(), rollouts, strict=True)
            for _, earned in rollout.earned or ((0, 0.0),)
        ]
    )


def _sum_to_end(flat: FlatBatch, values_N: np.ndarray) -> np.ndarray:
    """At each token, the sum of the values from this token to the end of its rollout."""
    upto_N1 = np.concatenate([[0.0], np.cumsum(values_N)])
    end_N = upto_N1[flat.bounds_R1[1:]][flat.rollout_N]
    return end_N - upto_N1[:-1]


def update_sums(flat: FlatBatch, chosen_R: np.ndarray) -> np.ndarray:
    """(trained tokens, rollouts with at least one) of an update, to be summed over ranks."""
    counts_R = flat.counts_R[chosen_R]
    return np.array([counts_R.sum(), np.count_nonzero(counts_R)], dtype=np.float64)


def loss_weights(
    flat: FlatBatch, chosen_R: np.ndarray, sums: np.ndarray, aggregation: str, constant_length: int
) -> np.ndarray:
    """The weight of every token of the batch in one update's loss; 0 outside `chosen_R`.

    `sums` are the `update_sums` of all ranks.
    """
    num_tokens, num_sequences = (max(float(value), 1.0) for value in sums)
    weight_R = np.zeros(len(flat.rollouts))
    if aggregation == "token":
        weight_R[chosen_R] = 1.0 / num_tokens
    elif aggregation == "sequence":
        weight_R[chosen_R] = 1.0 / (num_sequences * np.maximum(flat.counts_R[chosen_R], 1))
    else:
        assert aggregation == "constant", aggregation
        weight_R[chosen_R] = 1.0 / (num_sequences * constant_length)
    return weight_R[flat.rollout_N]


def joins_tokens(algorithm: Algorithm) -> bool:
    """Whether a token's loss depends on the other tokens of its rollout, which then need one pack.

    The method is tried on a rollout of two tokens, so that no method has to say it of itself.
    """
    if algorithm.settings.correction.startswith("sequence"):
        return True
    ones_N = torch.ones(2, dtype=torch.float64)

    def first_token(drop_of_second: float, sign: float) -> tuple[float, float]:
        view = TokenView(
            logprobs_N=-ones_N - torch.tensor([0.0, drop_of_second], dtype=torch.float64),
            anchor_N=-ones_N,
            advantages_N=sign * ones_N,
            sequence_N=torch.zeros(2, dtype=torch.int64),
            num_sequences=1,
        )
        return float(algorithm.surrogate(view).loss_N[0]), float(algorithm.log_ratio(view)[0])

    return any(
        first_token(drop, sign) != first_token(0.0, sign)
        for sign in (1.0, -1.0)
        for drop in (-5.0, -1e-5, 1e-5, 5.0)
    )


@dataclass(slots=True, kw_only=True)
class TokenInputs:
    """Per-token inputs of the loss, for all N trained tokens of the batch, on the device."""

    behaviour_N: Tensor
    temperature_N: Tensor
    early_N: Tensor | None  # bool, sampled without the end tokens; None: no token was
    advantage_N: Tensor
    weight_N: Tensor
    proximal_N: Tensor | None = None  # the trainer's log-probs before the update
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None  # log-probs of the sampled tokens under the teacher
    newest_N: Tensor | None = (
        None  # bool: the trainer's log-prob counts as the old one; None: nowhere
    )

    @classmethod
    def from_batch(cls, flat: FlatBatch, dtype: torch.dtype, device: torch.device) -> TokenInputs:
        """Move log-probs and temperatures to the device; advantages and weights begin as zeros."""
        zeros_N = torch.zeros(flat.num_tokens, dtype=dtype, device=device)
        return cls(
            behaviour_N=to_device(flat.behaviour_N, device).to(dtype),
            temperature_N=to_device(flat.temperature_N, device).to(dtype),
            early_N=to_device(flat.early_N, device) if flat.early_N.any() else None,
            advantage_N=zeros_N,
            weight_N=zeros_N,
        )

    def weigh(self, weights_N: np.ndarray) -> None:
        """Set the weight of every token in the loss of the update to come."""
        self.weight_N = to_device(weights_N, self.weight_N.device).to(self.weight_N.dtype)

    def sampled_for(self, pack: Pack) -> tuple[Tensor, Tensor | None]:
        """The temperatures of a pack's tokens, and which were sampled without the end tokens."""
        early_N = None if self.early_N is None else self.early_N[pack.index_N]
        return self.temperature_N[pack.index_N], early_N


def _each_alone(view: TokenView) -> TokenView:
    """The same tokens, each a sequence of its own: a method's ratio of a response is then that of the token."""
    count = len(view.sequence_N)
    alone_N = torch.arange(count, device=view.sequence_N.device)
    return replace(view, sequence_N=alone_N, num_sequences=count)


def pack_loss(
    algorithm: Algorithm,
    pack: Pack,
    inputs: TokenInputs,
    logprobs_N: Tensor,
    entropies_N: Tensor,
    divergence_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(this pack's part of the loss, the figures of its tokens for the metrics, without gradients).

    The rows of the figures are log-probs, entropies, ratios, clipped, KL, and divergence from the teacher (of sampled
    tokens, log policy / teacher).
    """
    settings = algorithm.settings
    index_N = pack.index_N
    own_N = logprobs_N.detach()
    behaviour_N = inputs.behaviour_N[index_N]
    proximal_N = own_N if inputs.proximal_N is None else inputs.proximal_N[index_N]
    if inputs.newest_N is not None:
        behaviour_N = torch.where(inputs.newest_N[index_N], proximal_N, behaviour_N)
    view = TokenView(
        logprobs_N=logprobs_N,
        anchor_N=proximal_N if settings.decoupled else behaviour_N,
        advantages_N=inputs.advantage_N[index_N],
        sequence_N=pack.sequence_N,
        num_sequences=pack.num_sequences,
    )
    surrogate = algorithm.surrogate(view)
    loss_N, corrected_N = surrogate.loss_N, None
    if settings.correction != "none":
        corrected_N = importance_weights(
            proximal_N, behaviour_N, pack.sequence_N, pack.num_sequences, settings
        )
        loss_N = loss_N * corrected_N
    kl_N = None
    if inputs.reference_N is not None:
        kl_N = kl.estimate(settings.kl_estimator, logprobs_N, inputs.reference_N[index_N])
        if settings.kl_in_loss:
            weighted_N = kl_N
            if settings.kl_estimator == "k3_weighted":  # unclipped: a bound would bias its gradient
                weighted_N = kl_N * algorithm.log_ratio(_each_alone(view)).exp()
                weighted_N = weighted_N if corrected_N is None else weighted_N * corrected_N
            loss_N = loss_N + settings.kl_beta * weighted_N
    if (
        inputs.teacher_N is not None
    ):  # k2 has the gradient of KL(policy || teacher) on its own samples
        divergence_N = kl.estimate("k1", own_N, inputs.teacher_N[index_N])
        taught_N = kl.estimate("k2", logprobs_N, inputs.teacher_N[index_N])
        fresh_N = surrogate.ratio_N.clamp(max=settings.correction_cap)
        fresh_N = fresh_N if corrected_N is None else fresh_N * corrected_N
        loss_N = loss_N + settings.teacher_beta * fresh_N * taught_N
    elif divergence_N is not None:
        loss_N = loss_N + settings.teacher_beta * divergence_N
    if settings.entropy_beta:
        loss_N = loss_N - settings.entropy_beta * entropies_N
    loss = (loss_N * inputs.weight_N[index_N]).sum()
    rows = [own_N, entropies_N, surrogate.ratio_N, surrogate.clipped_N, kl_N, divergence_N]
    unknown_N = torch.full_like(own_N, torch.nan)
    figures = [unknown_N if row is None else row.detach().to(own_N.dtype) for row in rows]
    return loss, torch.stack(figures)
