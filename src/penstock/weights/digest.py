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
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FORM = "leaves-"  # the prefix names the form: digests of other forms cannot be compared with it
DIGEST_BYTES = 16  # length of a tensor's digest
WORD_BYTES = 8
LEAF_BYTES = 64 << 10
CHUNK_BYTES = 8 << 20  # hashed by one round of operations: few rounds, and small temporary tensors
DEVICE_CHUNK_BYTES = 32 << 20  # the same on a GPU: enough to keep all of it busy


def digest_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of named weights, on whatever device they are."""
    return combine_digests(digests_of(weights))


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """The digest of each tensor by name.

    A tensor is let go of when its operations are queued; a GPU is waited for once, at the end.
    """
    import torch

    headers: dict[str, bytes] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        dtype = str(tensor.dtype).removeprefix("torch.")
        headers[name] = f"{name}|{dtype}|{tuple(tensor.shape)}|".encode()
        sums.setdefault(tensor.device, []).append((name, _leaf_sums(tensor)))
    digests = {}
    for on_device in sums.values():
        host = torch.cat([rows for _, rows in on_device]).cpu()
        lengths = [len(rows) for _, rows in on_device]
        for (name, _), rows in zip(on_device, host.split(lengths), strict=True):
            hasher = hashlib.sha256(headers[name] + rows.numpy().astype("<i8").tobytes())
            digests[name] = hasher.digest()[:DIGEST_BYTES]
    return digests


def combine_digests(tensor_digests: dict[str, bytes]) -> str:
    """The digest of a model from those of its tensors, in any order."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensor_digests):
        hasher.update(name.encode())
        hasher.update(tensor_digests[name])
    return FORM + hasher.hexdigest()


def _leaf_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums for each leaf of a tensor, as [leaves, 2] on its device."""
    import torch

    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    keys = _keys_on(tensor.device)
    sums = [torch.empty(0, 2, dtype=torch.int64, device=tensor.device)]
    for chunk in octets.split(DEVICE_CHUNK_BYTES if octets.is_cuda else CHUNK_BYTES):
        if not len(chunk):
            continue
        whole = LEAF_BYTES if len(chunk) > LEAF_BYTES else WORD_BYTES
        if missing := -len(chunk) % whole:  # zeros add nothing, and the shape tells the length
            chunk = torch.nn.functional.pad(chunk, (0, missing))
        elif chunk.storage_offset() % WORD_BYTES:  # a view that begins within a word
            chunk = chunk.clone()
        words = chunk.view(torch.int64)
        leaves = words.view(-1, min(len(words), LEAF_BYTES // WORD_BYTES))
        lower, upper = keys[:, : leaves.shape[1]]
        # a difference in the upper half alone could cancel itself in the first sum
        pair = ((leaves * lower).sum(1), ((leaves >> 32) * upper).sum(1))
        sums.append(torch.stack(pair, dim=1))
    return torch.cat(sums)


@functools.cache
def _keys_on(device: torch.device) -> torch.Tensor:
    """The two odd keys of each place in a leaf: fixed numbers, the same everywhere."""
    import torch

    octets = hashlib.shake_256(b"penstock weights").digest(2 * LEAF_BYTES)
    words = [
        int.from_bytes(octets[i : i + WORD_BYTES], "little", signed=True) | 1
        for i in range(0, len(octets), WORD_BYTES)
    ]
    return torch.tensor(words, dtype=torch.int64).view(2, -1).to(device)
