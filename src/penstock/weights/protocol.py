"""The protocol of weight syncs.

The consumer's end publishes, an engine's end fetches; only the small WeightHandle travels between them
as a message. A sync moves bytes: it does not decide when to publish, and engines check digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.types import WeightHandle

if TYPE_CHECKING:
    import torch

# publishes (version, digest, a function that reads the weights)
Publish = Callable[[int, str, Callable[[], "Iterable[tuple[str, torch.Tensor]]"]], WeightHandle]


class WeightSync(Protocol):
    """Both ends of one path. The previous version stays readable while the next is written."""

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        """The handle of the next publication, to be given out before its bytes are written; `fetch` waits for them.

        None if the layout is not known before the first `publish`, or nothing can wait.
        """

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        """Copy the weights out and return their handle; the trainer may change its own afterwards."""

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the published tensors, read-only; raise WeightsGone if two newer versions exist."""

    def close(self) -> None:
        """Free the memory."""


@dataclass(slots=True, frozen=True)
class Endpoint:
    """Where the distributor of a node serves its weights to other nodes, and to whom."""

    folder: str  # of the node's copies; the successor of a dead distributor serves them on
    address: str
    port: int
    token: str
