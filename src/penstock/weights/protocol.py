"""What every weight sync does.

The consumer's side publishes, an engine's side fetches; only the small WeightHandle travels between
them as a message. A sync moves bytes: it does not decide when to publish, and engines check digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from penstock.types import WeightHandle


class WeightSync(Protocol):
    """Both sides of one path. The previous version stays readable while the next is written."""

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        """Copy the weights out; when this returns the trainer may change its own."""

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        """The published tensors, read-only; WeightsGone where two further versions came first."""

    def close(self) -> None:
        """Give memory back."""


class Announcing(WeightSync, Protocol):
    """A path whose handle can be given out before the bytes are there; `fetch` waits for each."""

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        """The handle of what the next `publish` writes; None: it must publish once first."""
