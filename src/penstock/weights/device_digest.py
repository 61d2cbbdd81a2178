"""Digests of tensors that lie on a GPU, computed there.

Consumes tensors one by one and lets each go after its leaves are hashed; produces the digests that
`digest.py` computes from the same bytes on a CPU. Runs on a stream of its own, beside
whatever else the device does. The piece of a tensor that fills no leaf is hashed on the host.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util

import numpy as np
import torch

from penstock.weights.digest import LEAF_BYTES, LEAF_DIGEST_BYTES, combine_leaves

HELD_BYTES = 1 << 30  # hashed at a time: leaves enough for a large GPU
Shaped = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def can_hash_on(device: torch.device) -> bool:
    """Whether our kernel runs there."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class DeviceDigests:
    """`add` tensors of one device, then take the `digests` of all."""

    def __init__(self, device: torch.device, *, leaf_bytes: int = LEAF_BYTES) -> None:
        self._device, self._leaf_bytes = device, leaf_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[tuple[Shaped, torch.Tensor]] = []
        self._held_bytes = 0
        self.digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if octets.data_ptr() % 4:  # a view into the midst of something; the kernel reads words
            octets = octets.clone()
        self._held.append(((name, dtype, tuple(tensor.shape)), octets))
        self._held_bytes += len(octets)
        if self._held_bytes >= HELD_BYTES:
            self.finish()

    def finish(self) -> dict[str, bytes]:
        """Hash what is held; every digest so far."""
        from penstock.weights.digest_kernels import hash_leaves

        held, self._held, self._held_bytes = self._held, [], 0
        addresses: list[int] = []
        tails = []
        for _, octets in held:
            whole = len(octets) - len(octets) % self._leaf_bytes
            start = octets.data_ptr()
            addresses += range(start, start + whole, self._leaf_bytes)
            tails.append(octets[whole:])
        if self._stream is None:
            words, ends = hash_leaves(addresses, self._leaf_bytes, self._device), _joined(tails)
        else:
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    words = hash_leaves(addresses, self._leaf_bytes, self._device).cpu()
                    ends = _joined(tails).cpu()
        self._combine([shaped for shaped, _ in held], [len(o) for _, o in held], words, ends)
        return self.digests

    def _combine(
        self, shaped: list[Shaped], sizes: list[int], words: torch.Tensor, ends: torch.Tensor
    ) -> None:
        leaves = words.numpy().astype(np.uint32).astype(">u4").tobytes()
        rests = ends.numpy().tobytes()
        leaf = rest = 0
        for (name, dtype, shape), size in zip(shaped, sizes, strict=True):
            count, over = divmod(size, self._leaf_bytes)
            own = leaves[LEAF_DIGEST_BYTES * leaf : LEAF_DIGEST_BYTES * (leaf + count)]
            if over:
                own += hashlib.sha256(rests[rest : rest + over]).digest()
            self.digests[name] = combine_leaves(name, dtype, shape, own)
            leaf, rest = leaf + count, rest + over


def _joined(tails: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tails) if tails else torch.empty(0, dtype=torch.uint8)
