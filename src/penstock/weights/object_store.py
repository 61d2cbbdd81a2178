"""Weights handed over through Ray's object store.

The trainer stages its weights as numpy views and gives them out in chunks; each chunk becomes one
object that the driver owns, so it outlives the trainer. An engine maps the objects of its node with
no copy: one copy crosses the network per node, however many engines sit there. Objects do not
change, so the next publication cannot touch one that is being read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.types import WeightHandle
from penstock.weights.model_weights import weight_bits

Named = tuple[str, str, np.ndarray]  # name, dtype, values (bfloat16 as its bits)
CHUNK_BYTES = 256 * 2**20


class ObjectStoreSync:
    """One side. The trainer's publishes chunks by number, the engine's fetches references."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._staged: list[list[Named]] = []

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        """Stage views; `location` is the number of chunks that must be taken before the next update."""
        self._staged, size = [[]], 0
        for name, tensor in weights:
            dtype, array = weight_bits(tensor)
            if size + array.nbytes > self._chunk_bytes and self._staged[-1]:
                self._staged.append([])
                size = 0
            self._staged[-1].append((name, dtype, array))
            size += array.nbytes
        return WeightHandle(
            version=version, digest=digest, kind="object_store", location=len(self._staged)
        )

    def chunk(self, number: int) -> list[Named]:
        """The tensors of one chunk, to be copied into the store."""
        return self._staged[number]

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        """`location` is a list of references by now, one for each chunk."""
        import ray

        for reference in handle.location:
            for name, dtype, array in ray.get(reference):
                yield name, tensor_of(dtype, array)

    def close(self) -> None:
        self._staged = []


def tensor_of(dtype: str, array: Any) -> torch.Tensor:
    """A tensor over the same bytes; it must not be written to."""
    if dtype == "bfloat16":
        return tensor_of("int16", array.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, and only read
        return torch.from_numpy(array)
