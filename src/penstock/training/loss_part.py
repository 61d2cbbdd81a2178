"""A part of the loss: the rollouts of a batch that one algorithm trains, with their own denominators.

Tasks with the same settings are one part; demonstrations and the texts of `train.ptx` are others. The loss of
an update is the sum of its parts, each times its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.model.transfer import to_device
from penstock.training.algo.method import Algorithm
from penstock.training.flat_batch import FlatBatch
from penstock.training.objective import TokenInputs, joins_tokens
from penstock.training.pack import Pack
from penstock.training.policy import Policy
from penstock.training.stats import TokenStats
from penstock.training.value import TokenValues
from penstock.training.vocabulary import VocabularyTerms
from penstock.types import Group


@dataclass(slots=True, kw_only=True)
class LossPart:
    """Some groups of a batch on their way through one algorithm."""

    algorithm: Algorithm
    flat: FlatBatch
    inputs: TokenInputs
    stats: TokenStats
    number_G: np.ndarray  # place of each group in the batch
    joins_rows: bool  # a rollout's rows need one pack
    weight: float = 1.0  # of its loss in the loss of an update
    max_tokens: int = 1  # the most that an answer of the algorithm's tasks may have
    is_text: bool = False  # texts of one update, which are no groups of the batch
    advantages_N: np.ndarray = field(default_factory=lambda: np.zeros(0))
    values: TokenValues | None = None  # of the critic; None: the algorithm has none

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        numbers: Sequence[int],
        step: int,
        algorithm: Algorithm,
        policy: Policy,
        dtype: torch.dtype,
    ) -> LossPart:
        """Lay the groups out for the policy's device; `numbers` are their places in the batch."""
        flat = FlatBatch.from_groups(groups, step, algorithm.settings, policy.end_ids)
        return cls(
            algorithm=algorithm,
            flat=flat,
            inputs=TokenInputs.from_batch(flat, dtype, policy.device),
            stats=TokenStats(flat.num_tokens),
            number_G=np.array(numbers, dtype=np.int64),
            joins_rows=joins_tokens(algorithm),
        )

    @property
    def name(self) -> str:
        """What the part learns from: `loss/NAME` is its metric."""
        settings = self.algorithm.settings
        if settings.distills:
            return "teacher"
        return "demonstration" if settings.imitates else "policy"

    def inputs_of_pass(self, teachers: Mapping[str, Policy], pack: Pack) -> tuple[Any, ...]:
        """What the policy scores a pack with: temperatures, early ends, and terms of whole distributions."""
        settings = self.algorithm.settings
        sampled = self.inputs.sampled_for(pack)
        if not settings.compares_vocabulary and not settings.entropy_beta:
            return sampled
        teacher = None
        if settings.compares_vocabulary:
            with torch.no_grad():
                teacher = teachers[settings.teacher].head_inputs(replace(pack, experts_TN=None))
        terms = VocabularyTerms(
            entropy=settings.entropy_beta > 0, teacher=teacher, divergence=settings.divergence
        )
        return (*sampled, None, terms)

    def recorded_teacher(self) -> Tensor:
        """The log-probs that a teacher behind a server gave when the groups were journalled."""
        taught_N, like_N = self.flat.teacher_N, self.inputs.behaviour_N
        if taught_N is None:
            raise RunError(
                f"training: got responses without log-probs of teachers.{self.algorithm.settings.teacher}, "
                "allowed: responses that were recorded with this teacher"
            )
        return to_device(taught_N, like_N.device).to(like_N.dtype)

    def set_advantages(self, advantages_N: np.ndarray) -> None:
        """Keep the advantages, for the metrics here and for the loss on the device."""
        self.advantages_N, inputs = advantages_N, self.inputs
        inputs.advantage_N = to_device(advantages_N, inputs.weight_N.device).to(
            inputs.weight_N.dtype
        )

    def split_idle(self, chosen_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rollouts to train, rollouts whose gradient is zero by construction).

        The second kind needs a forward pass for the metrics, and no backward pass.
        """
        if self.weight == 0:
            return chosen_R[:0], chosen_R
        if self.algorithm.settings.teaches_every_token:
            return chosen_R, chosen_R[:0]
        flat = self.flat
        active_R = np.bincount(
            flat.rollout_N, weights=self.advantages_N != 0, minlength=len(flat.rollouts)
        )
        live = active_R[chosen_R] > 0
        return chosen_R[live], chosen_R[~live]
