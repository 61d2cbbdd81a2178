"""Weights handed over inside one process.

One object is shared by consumer and engine. Publishing copies into one of two standing buffers, so
that an engine still reading the last version never sees the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from penstock.errors import RunError
from penstock.types import WeightHandle


class InProcessSync:
    """Consumes weights on the trainer's thread, yields them on the engine's."""

    def __init__(self) -> None:
        self._buffers: list[dict[str, torch.Tensor]] = [{}, {}]
        self._versions = [-1, -1]

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        side = self._versions.index(min(self._versions))
        buffer = self._buffers[side]
        for name, tensor in weights:
            standing = buffer.get(name)
            if standing is None or standing.dtype != tensor.dtype:
                buffer[name] = tensor.detach().clone()
            else:
                standing.copy_(tensor.detach())
        self._versions[side] = version
        return WeightHandle(version=version, digest=digest, kind="in_process", location=side)

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        if self._versions[handle.location] != handle.version:
            raise RunError(
                f"weights of version {handle.version} are gone: "
                f"the buffer holds version {self._versions[handle.location]}"
            )
        yield from self._buffers[handle.location].items()

    def close(self) -> None:
        self._buffers = [{}, {}]
