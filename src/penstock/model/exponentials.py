"""Exponentials of logits on a CPU, for engine and trainer.

The exponentials of a large vocabulary are the costliest arithmetic besides the matrix products. Without
MKL, whose exponential is fast, a power of two takes two thirds of the time of torch's `exp`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def exp_into(exponents: Tensor, out: Tensor) -> Tensor:
    """Write exp(exponents) to `out`, which may be `exponents`, and return it."""
    if exponents.is_cpu and not torch.backends.mkl.is_available():
        return torch.mul(exponents, LOG2_E, out=out).exp2_()
    return torch.exp(exponents, out=out)
