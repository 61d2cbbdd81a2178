"""What must be known of a decoder layer before other code computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def is_silu(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether an activation is silu; near zero, others look the same in a layer's output."""
    probe = torch.linspace(-9, 9, 37)
    return torch.allclose(function(probe), functional.silu(probe))


def window_of(attention: Any) -> int | None:
    """The sliding window of an attention; some classes keep it in the config only."""
    default = getattr(attention.config, "sliding_window", None)
    window: int | None = getattr(attention, "sliding_window", default)
    return window
