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

from penstock.training.logprobs import NO_CHANCE, LogitRule

CHUNK_ELEMENTS_CPU = 1 << 22
CHUNK_ELEMENTS_GPU = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """What a model's head makes the distributions of some tokens from."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    rule: LogitRule


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyTerms:
    """The terms that a pass computes beside its log-probs."""

    entropy: bool = False  # the entropy carries a gradient
    teacher: HeadInputs | None = None
    divergence: str = ""  # forward | reverse | jsd


def entropies(
    policy: HeadInputs, temperatures_N: Tensor, banned: tuple[Tensor, Sequence[int]] | None
) -> Tensor:
    """The entropy of each token's distribution, with a gradient."""
    return _over_chunks(policy, None, "entropy", temperatures_N, banned)


def divergences(
    policy: HeadInputs,
    teacher: HeadInputs,
    kind: str,
    temperatures_N: Tensor,
    banned: tuple[Tensor, Sequence[int]] | None,
) -> Tensor:
    """Each token's divergence of policy and teacher, both at the token's temperature."""
    return _over_chunks(policy, teacher, kind, temperatures_N, banned)


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


def _over_chunks(
    policy: HeadInputs,
    teacher: HeadInputs | None,
    kind: str,
    temperatures_N: Tensor,
    banned: tuple[Tensor, Sequence[int]] | None,
) -> Tensor:
    heads = (policy,) if teacher is None else (policy, teacher)
    budget = CHUNK_ELEMENTS_GPU if policy.hidden_ND.is_cuda else CHUNK_ELEMENTS_CPU
    size = max(1, budget // len(policy.weight_VD))

    def chunk(start: int, *tables: Tensor) -> Tensor:
        part = slice(start, start + size)
        logs = [
            _log_probs(tables[2 * n][part], tables[2 * n + 1], head, temperatures_N[part])
            for n, head in enumerate(heads)
        ]
        if banned is not None:
            logs = [_without(log_CV, banned[0][part], banned[1]) for log_CV in logs]
        return term(kind, logs[0], logs[1] if len(logs) > 1 else None)

    tables = [table for head in heads for table in (head.hidden_ND, head.weight_VD)]
    parts = [
        checkpoint(chunk, start, *tables, use_reentrant=False)
        for start in range(0, len(policy.hidden_ND), size)
    ]
    # without tokens the heads still belong to the graph: sharded ranks reduce a gradient
    return torch.cat(parts) if parts else (policy.hidden_ND @ policy.weight_VD.t()).sum(-1)


def _log_probs(hidden_CD: Tensor, weight_VD: Tensor, head: HeadInputs, t_C: Tensor) -> Tensor:
    logits_CV = linear(hidden_CD, weight_VD, head.bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if head.rule.scale != 1.0:
        logits_CV = logits_CV * head.rule.scale
    if head.rule.softcap is not None:
        logits_CV = head.rule.softcap * torch.tanh(logits_CV / head.rule.softcap)
    return torch.log_softmax(logits_CV / t_C[:, None], -1)


def _without(log_CV: Tensor, early_C: Tensor, ids: Sequence[int]) -> Tensor:
    """The distributions without the end tokens, where a response was sampled without them."""
    columns_V = torch.zeros(log_CV.shape[1], dtype=torch.bool, device=log_CV.device)
    columns_V[list(ids)] = True
    held_CV = log_CV.masked_fill(early_C[:, None] & columns_V[None, :], NO_CHANCE)
    return torch.log_softmax(held_CV, -1)
