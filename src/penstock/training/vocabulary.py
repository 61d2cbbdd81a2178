"""Terms of the loss that need a token's whole distribution: entropy, and divergences from a teacher's.

No table of all logits is ever held: the heads of policy and teacher run over chunks of tokens, and each chunk is
computed again in the backward pass. With a vocabulary that ranks share there is no such term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from penstock.model.decoder import scaled_logits
from penstock.training.logprobs import NO_CHANCE, LogitRule
from penstock.training.pack import Kept

CHUNK_ELEMENTS_CPU = 1 << 22
CHUNK_ELEMENTS_GPU = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """What a model's head makes the distributions of some tokens from."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    rule: LogitRule

    def log_probs(self, part: slice) -> Tensor:
        """The distributions of some of the tokens, at temperature 1."""
        hidden_CD = self.hidden_ND[part]
        ones_C = torch.ones(len(hidden_CD), device=hidden_CD.device)
        return _log_probs(hidden_CD, self.weight_VD, self, ones_C)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyTerms:
    """The terms that a pass computes beside its log-probs."""

    entropy: bool = False  # the entropy carries a gradient
    teacher: HeadInputs | None = None
    divergence: str = ""  # forward | reverse | jsd


def term(kind: str, policy_CV: Tensor, teacher_CV: Tensor | None) -> Tensor:
    """A term of each row of log-probs.

    forward: KL(teacher || policy); reverse: KL(policy || teacher); jsd: the mean of their KL to their mixture.
    """
    if kind == "entropy":
        return -(policy_CV.exp() * policy_CV).sum(-1)
    assert teacher_CV is not None
    if kind == "forward":
        return _kl(teacher_CV, policy_CV)
    if kind == "reverse":
        return _kl(policy_CV, teacher_CV)
    assert kind == "jsd", kind
    mixture_CV = torch.logaddexp(policy_CV, teacher_CV) - math.log(2)
    return (_kl(policy_CV, mixture_CV) + _kl(teacher_CV, mixture_CV)) / 2


def _kl(left_CV: Tensor, right_CV: Tensor) -> Tensor:
    return (left_CV.exp() * (left_CV - right_CV)).sum(-1)


def terms_of(
    policy: HeadInputs,
    teacher: HeadInputs | None,
    kind: str,
    temperatures_N: Tensor,
    banned: tuple[Tensor, Sequence[int]] | None,
    kept: Kept | None = None,
) -> Tensor:
    """A term of each token, with a gradient; policy and teacher have the token's temperature. See `term`."""
    ids = None if banned is None else torch.tensor(banned[1], device=temperatures_N.device)
    heads = (policy,) if teacher is None else (policy, teacher)
    budget = CHUNK_ELEMENTS_GPU if policy.hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
    size = max(1, budget // len(policy.weight_VD))

    def chunk(start: int, *tables: Tensor) -> Tensor:
        part = slice(start, start + size)
        logs = [
            _log_probs(tables[2 * n][part], tables[2 * n + 1], head, temperatures_N[part])
            for n, head in enumerate(heads)
        ]
        early = None if banned is None or ids is None else (banned[0][part], ids)
        dropped_CV = _without_chance(early, kept and kept[start : start + len(logs[0])], logs[0])
        if dropped_CV is not None:
            logs = [log.masked_fill(dropped_CV, NO_CHANCE).log_softmax(-1) for log in logs]
        return term(kind, logs[0], logs[1] if len(logs) > 1 else None)

    tables = [table for head in heads for table in (head.hidden_ND, head.weight_VD)]
    parts = [
        checkpoint(chunk, start, *tables, use_reentrant=False)
        for start in range(0, len(policy.hidden_ND), size)
    ]
    # without tokens the heads still belong to the graph: sharded ranks reduce a gradient
    return torch.cat(parts) if parts else (policy.hidden_ND @ policy.weight_VD.t()).sum(-1)


def _without_chance(
    banned: tuple[Tensor, Tensor] | None, kept: Kept | None, like_CV: Tensor
) -> Tensor | None:
    """bool [tokens, vocabulary]: what no token was sampled from; None: it was from all."""
    vocabulary = like_CV.shape[1]
    dropped_CV = None if kept is None else kept.dropped(vocabulary)
    if banned is not None:
        column_V1 = torch.arange(vocabulary, device=like_CV.device)[:, None]
        early_CV = banned[0][:, None] & (column_V1 == banned[1]).any(1)[None, :]
        dropped_CV = early_CV if dropped_CV is None else dropped_CV | early_CV
    return dropped_CV


def _log_probs(hidden_CD: Tensor, weight_VD: Tensor, head: HeadInputs, t_C: Tensor) -> Tensor:
    logits_CV = linear(hidden_CD, weight_VD, head.bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    logits_CV = scaled_logits(logits_CV, head.rule.scale, head.rule.softcap)
    return torch.log_softmax(logits_CV / t_C[:, None], -1)
