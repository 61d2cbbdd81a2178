"""Weights handed over inside one process.

Consumer and engine share one object. Publishing copies into one of two buffers in turn, so that an
engine that still reads the last version never sees the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from penstock.errors import RunError
from penstock.types import WeightHandle


class InProcessSync:
    """Consumes weights on the trainer's thread, yields them on the engine's thread."""

    def __init__(self) -> None:
        self._buffers: list[dict[str, torch.Tensor]] = [{}, {}]
        self._versions = [-1, -1]

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        return None

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        index = self._versions.index(min(self._versions))
        buffer = self._buffers[index]
        for name, tensor in weights:
            kept = buffer.get(name)
            if kept is None or kept.dtype != tensor.dtype:
                buffer[name] = tensor.detach().clone()
            else:
                kept.copy_(tensor.detach())
        self._versions[index] = version
        return WeightHandle(version=version, digest=digest, kind="in_process", location=index)

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        if self._versions[handle.location] != handle.version:
            raise RunError(
                f"weights of version {handle.version} are gone: "
                f"the buffer holds version {self._versions[handle.location]}"
            )
        yield from self._buffers[handle.location].items()

    def close(self) -> None:
        self._buffers = [{}, {}]
