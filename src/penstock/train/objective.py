"""The loss of one packed forward pass, and what was seen at its tokens.

Puts the algorithm's surrogate, the KL term and the importance correction together. Weights of the
tokens come from the whole update (`rows.loss_weights`), so the sum over packs is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.algo import kl
from penstock.algo.correction import importance_weights
from penstock.algo.method import Algorithm, TokenView
from penstock.train.pack import Pack


@dataclass(slots=True, kw_only=True)
class TokenInputs:
    """Per-token inputs of the loss, for all N trained tokens of the batch, on the device."""

    behaviour_N: Tensor
    temperature_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    proximal_N: Tensor | None = None  # the trainer's log-probs before the update
    reference_N: Tensor | None = None

    @classmethod
    def make(
        cls,
        behaviour_N: np.ndarray,
        temperature_N: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TokenInputs:
        zeros_N = torch.zeros(len(behaviour_N), dtype=dtype, device=device)
        return cls(
            behaviour_N=torch.from_numpy(behaviour_N).to(device, dtype),
            temperature_N=torch.from_numpy(temperature_N).to(device, dtype),
            advantage_N=zeros_N,
            weight_N=zeros_N,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one pass saw at its tokens; no gradients."""

    token_N: np.ndarray  # numbers of the tokens in the batch
    logprob_N: Tensor
    entropy_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor
    kl_N: Tensor | None
    loss: Tensor


def pack_loss(
    algorithm: Algorithm,
    pack: Pack,
    inputs: TokenInputs,
    logprobs_N: Tensor,
    entropies_N: Tensor,
) -> tuple[Tensor, Seen]:
    """(this pack's part of the loss, what was seen)."""
    settings = algorithm.settings
    index_N = torch.from_numpy(pack.token_N).to(logprobs_N.device)
    own_N = logprobs_N.detach()
    behaviour_N = inputs.behaviour_N[index_N]
    proximal_N = own_N if inputs.proximal_N is None else inputs.proximal_N[index_N]
    num_sequences = len(pack.rows)
    surrogate = algorithm.surrogate(
        TokenView(
            logprobs_N=logprobs_N,
            anchor_N=proximal_N if settings.decoupled else behaviour_N,
            advantages_N=inputs.advantage_N[index_N],
            sequence_N=pack.sequence_N,
            num_sequences=num_sequences,
        )
    )
    loss_N = surrogate.loss_N
    if settings.correction != "none":
        loss_N = loss_N * importance_weights(
            proximal_N, behaviour_N, pack.sequence_N, num_sequences, settings
        )
    kl_N = None
    if inputs.reference_N is not None:
        kl_N = kl.estimate(settings.kl_estimator, logprobs_N, inputs.reference_N[index_N])
        if settings.kl_in_loss:
            loss_N = loss_N + settings.kl_beta * kl_N
    loss = (loss_N * inputs.weight_N[index_N]).sum()
    seen = Seen(
        token_N=pack.token_N,
        logprob_N=own_N,
        entropy_N=entropies_N.detach(),
        ratio_N=surrogate.ratio_N,
        clipped_N=surrogate.clipped_N,
        kl_N=None if kl_N is None else kl_N.detach(),
        loss=loss.detach(),
    )
    return loss, seen
