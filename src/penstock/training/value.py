"""PPO's value model: its network, GAE over its values, and the steps of its own optimizer.

    values before the first update -> GAE: advantages and returns -> per update: packs (value loss) -> clip -> AdamW

The critic starts as a copy of the policy with a linear head of zeros, and shares nothing with it: a common trunk would
change the gradient of the policy. It is never published. A rollout is one trajectory of its trained tokens; what
tools and prompts put in between is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config import Config
from penstock.model.stored_weights import StoredWeights
from penstock.model.transfer import to_device
from penstock.training.algo.advantage import batch_mean_and_deviation, moments
from penstock.training.algo.settings import AlgorithmSettings
from penstock.training.flat_batch import FlatBatch
from penstock.training.learner import Learner
from penstock.training.objective import standardized
from penstock.training.optimizer import Outcome
from penstock.training.pack import Pack
from penstock.training.parallel.pipeline import Sampling
from penstock.training.parallel.ranks import Ranks
from penstock.training.policy import Policy
from penstock.training.stats import PassLosses, UpdateLoss, mean_of_finite
from penstock.training.vocabulary import VocabularyTerms


def token_rewards(
    flat: FlatBatch, rewards_R: np.ndarray, penalty_N: np.ndarray | None
) -> np.ndarray:
    """What each trained token earned: the rewards of its turn at the turn's last token, less its own KL.

    The rest of a rollout's reward comes at its last token.
    """
    earned_N = np.zeros(flat.num_tokens) if flat.earned_N is None else flat.earned_N
    upto_N = np.append(earned_N[1:], 0.0)  # earned before the next token
    has_tokens_R = flat.counts_R > 0
    upto_N[flat.bounds_R1[1:][has_tokens_R] - 1] = rewards_R[has_tokens_R]
    rewards_N: np.ndarray = upto_N - earned_N
    return rewards_N if penalty_N is None else rewards_N - penalty_N


def gae(
    rewards_N: np.ndarray,
    values_N: np.ndarray,
    bounds_R1: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimates; a rollout's value after its last token is 0.

    error_t = reward_t + gamma value_(t+1) - value_t
    advantage_t = error_t + gamma gae_lambda advantage_(t+1)
    """
    counts_R = np.diff(bounds_R1)
    longest_first_R = np.argsort(-counts_R, kind="stable")
    ends_R, counts_R = bounds_R1[1:][longest_first_R], counts_R[longest_first_R]
    next_value_N = np.append(values_N[1:], 0.0)
    next_value_N[ends_R[counts_R > 0] - 1] = 0.0
    advantage_N: np.ndarray = rewards_N + gamma * next_value_N - values_N
    num_longer = np.searchsorted(-counts_R, -np.arange(1, counts_R.max(initial=0)), side="left")
    for back, num in enumerate(
        num_longer.tolist(), start=1
    ):  # all rollouts at once, from their ends
        place = ends_R[:num] - 1 - back
        advantage_N[place] += gamma * gae_lambda * advantage_N[place + 1]
    return advantage_N


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """Half the squared error of each value; one that has moved by more than `clip` counts with the worse of the two."""
    error_N = (values_N - returns_N).square()
    if clip:
        held_N = old_N + (values_N - old_N).clamp(-clip, clip)
        error_N = error_N.maximum((held_N - returns_N).square())
    return error_N / 2


@dataclass(slots=True, kw_only=True)
class TokenValues:
    """The values of the trained tokens of some rollouts, and what they are trained towards."""

    old_N: Tensor  # before the first update
    returns_N: Tensor
    clip: float

    @classmethod
    def of(cls, values_N: Tensor, settings: AlgorithmSettings) -> TokenValues:
        """Values whose returns are not known yet."""
        return cls(old_N=values_N, returns_N=values_N, clip=settings.value_clip)

    def advantages(
        self,
        flat: FlatBatch,
        rewards_R: np.ndarray,
        penalty_N: np.ndarray | None,
        settings: AlgorithmSettings,
        ranks: Ranks,
    ) -> np.ndarray:
        """Set the returns; the advantages of the tokens, normalised over the batch if the settings say so."""
        values_N = self.old_N.cpu().numpy().astype(np.float64)
        rewards_N = token_rewards(flat, rewards_R, penalty_N)
        advantages_N = gae(rewards_N, values_N, flat.bounds_R1, settings.gamma, settings.gae_lambda)
        returns_N = to_device(advantages_N + values_N, self.old_N.device)
        self.returns_N = returns_N.to(self.old_N.dtype)
        return standardized(advantages_N, ranks) if settings.normalize == "batch" else advantages_N

    def loss(self, pack: Pack, values_N: Tensor) -> Tensor:
        """The loss of each of a pack's tokens."""
        index_N = pack.index_N
        return value_loss(values_N, self.old_N[index_N], self.returns_N[index_N], self.clip)


class ValueModel(Policy):
    """A decoder that gives each trained token the reward that it expects from there on."""

    def __init__(self, model: Any, *, longest: int, is_whole: bool) -> None:
        super().__init__(model, longest=longest, is_whole=is_whole)
        unused = model.get_output_embeddings().weight
        if unused is not model.get_input_embeddings().weight:
            unused.requires_grad_(False)
        model.value_head = nn.utils.skip_init(
            nn.Linear,
            unused.shape[1],
            1,
            bias=False,
            device=self.device,
            dtype=torch.promote_types(model.dtype, torch.float32),
        )
        nn.init.zeros_(model.value_head.weight)
        # rounded weights would round the values, which differ by little
        model._keep_in_fp32_modules_strict = {
            *(model._keep_in_fp32_modules_strict or ()),
            "value_head",
        }

    def _score(
        self,
        pack: Pack,
        temperatures_N: Tensor,
        early_N: Tensor | None,
        hidden: Tensor | None = None,
        terms: VocabularyTerms | None = None,
    ) -> Any:
        """(values, values) of the pack's trained tokens: before each token is sampled."""
        states_ND = self._states(pack, hidden)
        exact = torch.promote_types(states_ND.dtype, torch.float32)
        with torch.autocast(states_ND.device.type, enabled=False):
            values_N = states_ND.to(exact) @ self.model.value_head.weight[0].to(exact)
        return values_N, values_N.detach()

    def warm_up(self, *, bans_ends: bool = False) -> None:
        """Compile the kernels of the layers."""
        if self.decodes:
            self._warm_up_layers()


class Critic(Learner):
    """The value model, its masters and its optimizer."""

    def __init__(
        self,
        model: Any,
        config: Config,
        dtype: torch.dtype,
        ranks: Ranks,
        *,
        packs: bool,
        stored: StoredWeights | None,
    ) -> None:
        """model: a copy of what the policy was made from; stored: the files with its matrices, if it has none."""
        self.ranks = ranks
        self.policy = ValueModel(model, longest=config.longest_sequence, is_whole=stored is None)
        self.policy.pack_sequences(packs)
        if config.train.gradient_checkpointing:
            self.policy.checkpoint_layers()
        if ranks.world > 1:
            self.policy.cut(ranks, config.model.path)
            self.policy.split(dtype)
            if stored is not None:
                self.policy.fill(stored)
        self._prepare_to_learn(config.train, dtype, config.seed)
        self._losses = PassLosses()
        rate = config.train.critic_lr
        self._rate = 10.0 if rate is None else rate / config.train.lr  # times that of the policy
        if self.policy.device.type == "cuda" and ranks.world == 1:
            self.policy.warm_up()
            self.update_step.warm_up()

    def accumulate(
        self,
        values: TokenValues,
        weight_N: Tensor,
        packs: Iterable[Pack],
        sampling: Sampling,
        check: Callable[[], None],
    ) -> None:
        """Run forward and backward over the packs; gradients add up in the masters."""

        def finish(pack: Pack, values_N: Tensor, _: Tensor) -> Tensor:
            loss = (values.loss(pack, values_N) * weight_N[pack.index_N]).sum()
            self._losses.add_loss(loss.detach())
            return loss

        self.forward_backward(packs, sampling, finish, check=check)

    def apply_update(self, policy_rate: float) -> Outcome:
        """Make one optimizer step, at a rate in proportion to the policy's."""
        loss = UpdateLoss([(self._losses, 1.0)], self.ranks)
        outcome = self.optim_step(self._rate * policy_rate, loss)
        loss()
        self._losses.flush()
        if self.loss_scale.is_dynamic:  # the next update needs its factor
            self.loss_scale.overflowed(outcome()[1])
        return outcome

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last update."""
        super().drop_gradients()
        self._losses.flush()

    def metrics(self, values: Sequence[TokenValues]) -> dict[str, float]:
        """The mean loss of the batch's updates, and which share of the returns' variance the values had explained."""
        losses, self._losses.losses = self._losses.losses, []
        returns, errors = np.zeros(3), np.zeros(3)
        for part in values:
            returns_N, old_N = part.returns_N.double().cpu().numpy(), part.old_N.double().cpu()
            returns += moments(returns_N)
            errors += moments(returns_N - old_N.numpy())
        (_, spread), (_, error) = (
            batch_mean_and_deviation(total) for total in self.ranks.sum(np.stack([returns, errors]))
        )
        metrics = {"value/loss": mean_of_finite(losses)}
        return metrics | ({"value/explained_variance": 1 - (error / spread) ** 2} if spread else {})
