"""One digest for a set of named tensors: the identity of a policy's weights.

The bytes of a tensor are read as 64-bit words. In each leaf of a fixed size every word, and apart from it
its upper half, is multiplied by the key of its place, and the products are added with wrap-around. These
are plain torch operations on integers: the same sums on a CPU and on every GPU, in any order of addition.
The sums of all leaves are hashed together with name, dtype and shape. A changed word is always seen, any
other accident but for a chance of 2**-32 at most; the digest does not guard against forgery.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

FORM = "leaves-"  # the prefix names the form: digests of other forms cannot be compared with it
DIGEST_BYTES = 16  # length of a tensor's digest
WORD_BYTES = 8
LEAF_BYTES = 64 << 10
LEAF_WORDS = LEAF_BYTES // WORD_BYTES
CHUNK_BYTES = 8 << 20  # summed by one round of operations: few rounds, and small temporary tensors
DEVICE_CHUNK_BYTES = 64 << 20  # the same on a GPU: enough to keep all of it busy


def digest_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of named weights, on whatever device they are."""
    return combine_digests(digests_of(weights))


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """The digest of each tensor by name.

    A tensor is let go of when a chunk of neighbours is queued; a GPU is waited for once, at the end.
    """
    headers: dict[str, bytes] = {}
    sums: dict[torch.device, _LeafSums] = {}
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        headers[name] = f"{name}|{dtype}|{tuple(tensor.shape)}|".encode()
        if tensor.device not in sums:
            sums[tensor.device] = _LeafSums(tensor.device)
        sums[tensor.device].add(name, _words_of(tensor))
    digests = {}
    for on_device in sums.values():
        for name, octets in on_device.read():
            digests[name] = hashlib.sha256(headers[name] + octets).digest()[:DIGEST_BYTES]
    return digests


def combine_digests(tensor_digests: dict[str, bytes]) -> str:
    """The digest of a model from those of its tensors, in any order."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensor_digests):
        hasher.update(name.encode())
        hasher.update(tensor_digests[name])
    return FORM + hasher.hexdigest()


class _LeafSums:
    """Two sums for each leaf of the tensors of one device.

    Neighbours that are small are summed together: a GPU would wait for the launches of each.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._chunk = (DEVICE_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES) // WORD_BYTES
        self._zeros = torch.zeros(LEAF_WORDS, dtype=torch.int64, device=device)
        self._waiting: list[torch.Tensor] = []  # words of whole leaves that are not summed yet
        self._num_waiting = 0
        self._sums: list[torch.Tensor] = []
        self._leaves: list[tuple[str, int]] = []  # of each tensor, how many

    def add(self, name: str, words: torch.Tensor) -> None:
        for part in words.split(self._chunk):
            self._waiting.append(part)
            if missing := -len(part) % LEAF_WORDS:  # zeros add nothing; the shape tells the length
                self._waiting.append(self._zeros[:missing])
            self._num_waiting += len(part) + missing
            if self._num_waiting >= self._chunk:
                self._sum()
        self._leaves.append((name, -(-len(words) // LEAF_WORDS)))

    def read(self) -> Iterator[tuple[str, bytes]]:
        """The sums of each tensor, by name; waits for the device once."""
        import torch

        self._sum()
        host = torch.cat([self._zeros[:0].view(0, 2), *self._sums]).cpu()
        lengths = [leaves for _, leaves in self._leaves]
        for (name, _), rows in zip(self._leaves, host.split(lengths), strict=True):
            yield name, rows.numpy().astype("<i8").tobytes()

    def _sum(self) -> None:
        import torch

        if not self._num_waiting:
            return
        words = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting, self._num_waiting = [], 0
        leaves = words.view(-1, LEAF_WORDS)
        lower, upper = _keys_on(words.device)
        # a difference in the upper half alone could cancel itself in the first sum
        pair = ((leaves * lower).sum(1), ((leaves >> 32) * upper).sum(1))
        self._sums.append(torch.stack(pair, dim=1))


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as 64-bit words; zeros fill the last one."""
    import torch

    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if missing := -len(octets) % WORD_BYTES:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % WORD_BYTES:  # a view that begins within a word
        octets = octets.clone()
    return octets.view(torch.int64)


@functools.cache
def _keys_on(device: torch.device) -> torch.Tensor:
    """The two odd keys of each place in a leaf: fixed numbers, the same everywhere."""
    import torch

    octets = hashlib.shake_256(b"penstock weights").digest(2 * LEAF_BYTES)
    words = np.frombuffer(octets, "<i8").astype(np.int64) | 1
    return torch.from_numpy(words).view(2, -1).to(device)
