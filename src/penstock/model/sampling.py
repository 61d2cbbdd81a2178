"""Sample one token per row, each row with its own parameters, and return its log-prob.

Pure functions. Each row is computed on its own, so the other rows of a batch never change its bits. A row
needs one uniform number, which picks the token by inverse CDF. The number comes from a counter-based
stream (splitmix64 over the request's seed and the token's index in the whole response): it is the same on
every device and in every batch, and a rollout that continues from its partial tokens keeps its stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 23  # few enough that u * total < total in float32
_BLOCK = 256  # columns per block of the two-level inverse CDF
MOST_KEPT = 4096  # tokens that top_k or top_p leave at most: they travel with each sampled token


# ---- uniform numbers


def stream_key(seed: int) -> int:
    """The 64-bit key of a request's stream; `seed` may be any Python integer."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = (seed + _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * _MIX_1) & mask
    x = ((x ^ (x >> 27)) * _MIX_2) & mask
    return x ^ (x >> 31)


def uniforms(keys_N: np.ndarray, indices_N: np.ndarray) -> np.ndarray:
    """float32 numbers in [0, 1), one per row; `keys_N` is uint64."""
    with np.errstate(over="ignore"):
        x = keys_N + (indices_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(64 - _BITS)).astype(np.float32) * np.float32(2.0**-_BITS)


# ---- the choice


@dataclass(slots=True, frozen=True, kw_only=True)
class RowSampling:
    """The sampling parameters of N rows; every tensor has length N."""

    uniform_N: torch.Tensor  # float32 in [0, 1)
    temperature_N: torch.Tensor  # float32; 1 for a greedy row
    greedy_N: torch.Tensor | None  # bool; None: no row is greedy
    top_k_N: torch.Tensor | None  # int64, 0 is off; None: off in every row
    top_p_N: torch.Tensor | None  # float32; None: 1 in every row
    banned: tuple[torch.Tensor, torch.Tensor] | None = None  # (row, token) pairs not to sample


def sample(
    logits_NV: torch.Tensor, how: RowSampling, known_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray] | None]:
    """int64 tokens [N] and their float32 log-probs under the distribution they came from.

    Known tokens are not sampled again: their log-probs have the bits that they had when they were sampled.
    Also the ids that top_k and top_p left in each row, ascending; [] in a row without them, None if all are.
    A row whose logits are no distribution (NaN, +inf, or none finite) gets log-prob NaN.
    """
    scaled_NV = logits_NV.float()
    if not (scaled_NV.is_cpu and bool((how.temperature_N == 1).all())):
        scaled_NV = scaled_NV / how.temperature_N[:, None]
    allowed: torch.Tensor | None = None
    if how.banned is not None:
        allowed = scaled_NV[how.banned]
        scaled_NV[how.banned] = -torch.inf
    chosen_NV, kept = scaled_NV, None
    if how.top_k_N is not None or how.top_p_N is not None:
        chosen_NV, cut_N = filter_top_k_top_p(scaled_NV, how.top_k_N, how.top_p_N)
        kept = _ids_of(cut_N[:, None] & (chosen_NV > -torch.inf))
    peak_N1 = chosen_NV.amax(dim=-1, keepdim=True)
    weights_NV = chosen_NV - peak_N1
    exp_into(weights_NV, weights_NV)  # one exponential per logit
    token_N, total_N = pick(weights_NV, how.uniform_N)
    if known_N is not None:
        token_N = known_N
    elif how.greedy_N is not None:
        token_N = torch.where(how.greedy_N, chosen_NV.argmax(dim=-1), token_N)
    logprob_N = (chosen_NV.gather(1, token_N[:, None]) - peak_N1)[:, 0] - total_N.log()
    if allowed is not None:
        scaled_NV[how.banned] = allowed  # the caller may sample from these logits again
    return token_N, logprob_N, kept


def _ids_of(kept_NV: torch.Tensor) -> list[np.ndarray]:
    """The columns that are set in each row."""
    row_M, id_M = kept_NV.nonzero().to(torch.int32).cpu().numpy().T
    return np.split(id_M, np.searchsorted(row_M, np.arange(1, len(kept_NV))))


def pick(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By inverse CDF, the token whose share of the row's total holds the uniform number.

    The weights need not add up to one; the second result is their total.
    """
    rows, vocabulary = weights_NV.shape
    if vocabulary <= 2 * _BLOCK:
        ends_NV = weights_NV.cumsum(dim=-1)
        total_N = ends_NV[:, -1]
        return _first_past(uniform_N * total_N, weights_NV, ends_NV), total_N
    padding = -vocabulary % _BLOCK
    if padding:
        weights_NV = torch.nn.functional.pad(weights_NV, (0, padding))
    blocks_NCB = weights_NV.view(rows, -1, _BLOCK)
    mass_NC = blocks_NCB.sum(dim=-1)
    ends_NC = mass_NC.cumsum(dim=-1)
    total_N = ends_NC[:, -1]
    target_N = uniform_N * total_N
    block_N = _first_past(target_N, mass_NC, ends_NC)
    row_N = torch.arange(rows, device=weights_NV.device)
    start_N = torch.where(block_N > 0, ends_NC[row_N, (block_N - 1).clamp_min(0)], 0.0)
    chosen_NB = blocks_NCB[row_N, block_N]
    inside_N = _first_past(target_N - start_N, chosen_NB, chosen_NB.cumsum(dim=-1))
    return block_N * _BLOCK + inside_N, total_N


def _first_past(
    target_N: torch.Tensor, mass_NC: torch.Tensor, ends_NC: torch.Tensor
) -> torch.Tensor:
    """The first cell whose prefix sum passes the target, else the last; never one without mass.

    A parallel prefix sum of floats is not monotone, so cells are tested one by one, not counted.
    """
    has_mass_NC = mass_NC > 0
    past_NC = (has_mass_NC & (ends_NC > target_N[:, None])).to(torch.uint8)
    found_N, first_N = past_NC.max(dim=-1)
    if mass_NC.is_cpu and bool(found_N.all()):  # on a GPU this check would wait for the device
        return first_N
    cell_C = torch.arange(mass_NC.shape[1], device=mass_NC.device)
    last_N = (has_mass_NC * cell_C).amax(dim=-1)
    return torch.where(found_N.bool(), first_N, last_N)


def filter_top_k_top_p(
    scaled_NV: torch.Tensor, top_k_N: torch.Tensor | None, top_p_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set logits to -inf outside the top k, then outside the smallest set that holds top_p.

    At most MOST_KEPT tokens are left. The second result says which rows have a top k or a top p.
    """
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_NV.shape[-1], device=scaled_NV.device)
    cut_N = torch.zeros_like(order_NV[:, 0], dtype=torch.bool)
    if top_k_N is not None:
        cut_N = top_k_N > 0
        outside_NV = (rank_V[None, :] >= top_k_N[:, None]) & cut_N[:, None]
        sorted_NV = sorted_NV.masked_fill(outside_NV, -torch.inf)
    if top_p_N is not None:
        probs_NV = sorted_NV.softmax(dim=-1)
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV
        outside_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
        outside_NV[:, 0] = False
        sorted_NV = sorted_NV.masked_fill(outside_NV, -torch.inf)
        cut_N = cut_N | (top_p_N < 1)
    sorted_NV[:, MOST_KEPT:].masked_fill_(cut_N[:, None], -torch.inf)
    return torch.empty_like(sorted_NV).scatter_(1, order_NV, sorted_NV), cut_N


# ---- exponentials on a CPU, for engine and trainer: the costliest arithmetic besides the matrix products
# Without MKL, whose exponential is fast, a power of two takes two thirds of the time of torch's `exp`.

LOG2_E = math.log2(math.e)
_VECTOR = 32  # numbers per step of the widest vector loop; torch computes a remainder by other code


def exp_into(exponents: Tensor, out: Tensor) -> Tensor:
    """Write exp(exponents) to `out`, which may be `exponents`, and return it.

    The bits of a row do not depend on other rows: rows with a remainder are computed behind one another
    and padded, so that no number is the remainder of a whole batch.
    """
    if not exponents.is_cpu:
        return torch.exp(exponents, out=out)
    if exponents.shape[-1] % _VECTOR == 0:
        return _exp_into(exponents, out)
    count = exponents.numel()
    padded = exponents.new_zeros(-(-count // _VECTOR) * _VECTOR)
    padded[:count] = exponents.reshape(-1)
    return out.copy_(_exp_into(padded, padded)[:count].view_as(exponents))


def _exp_into(exponents: Tensor, out: Tensor) -> Tensor:
    if torch.backends.mkl.is_available():
        return torch.exp(exponents, out=out)
    return torch.mul(exponents, LOG2_E, out=out).exp2_()
