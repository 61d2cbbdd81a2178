"""One digest for a set of named tensors: the identity of a policy's weights. Takes raw bytes (numpy views), so that trainer, engine, journal and auditor agree without
sharing a framework. Names are sorted; dtype and shape are part of the identity. A tensor is hashed in
leaves of a fixed size, so that a GPU can hash thousands of them at once (`weights/digest_kernels.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

FORM = "leaves-"  # a digest says how it was made: those of other forms cannot be compared with it
DIGEST_BYTES = 16  # of a tensor
LEAF_BYTES = 32 << 10
LEAF_DIGEST_BYTES = 32
BIG_BYTES = 1 << 20  # from here on a tensor is worth a thread's while
THREADS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def tensor_digest(name: str, dtype: str, array: np.ndarray) -> bytes:
    """Digest of one tensor: its name, dtype, shape and bytes."""
    octets = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
    leaves = [
        hashlib.sha256(octets[start : start + LEAF_BYTES]).digest()
        for start in range(0, len(octets), LEAF_BYTES)
    ]
    return combine_leaves(name, dtype, array.shape, b"".join(leaves))


def combine_leaves(name: str, dtype: str, shape: tuple[int, ...], leaves: bytes) -> bytes:
    """Digest of one tensor from the SHA-256 of each of its leaves, the last one maybe shorter."""
    # SHA-256: processors of this decade compute it in hardware, twice as fast as BLAKE2b
    hasher = hashlib.sha256(f"{name}|{dtype}|{shape}|".encode())
    hasher.update(leaves)
    return hasher.digest()[:DIGEST_BYTES]


def combine_digests(tensor_digests: dict[str, bytes]) -> str:
    """Digest of a whole model from those of its tensors, whatever order they came in."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensor_digests):
        hasher.update(name.encode())
        hasher.update(tensor_digests[name])
    return FORM + hasher.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, str, np.ndarray]]) -> str:
    """Digest of (name, dtype, array) triples. A dtype numpy lacks travels as its bits (uint16)."""
    return combine_digests(tensor_digests(tensors))


def tensor_digests(tensors: Iterable[tuple[str, str, np.ndarray]]) -> dict[str, bytes]:
    """The digest of each tensor by its name.

    Big tensors are hashed on several threads (hashing lets the interpreter go); at most two for
    each thread are held at a time, so that an iterable that makes copies stays cheap.
    """
    digests: dict[str, bytes] = {}
    running: deque[tuple[str, Future[bytes]]] = deque()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        for name, dtype, array in tensors:
            if array.nbytes < BIG_BYTES:
                digests[name] = tensor_digest(name, dtype, array)
                continue
            running.append((name, pool.submit(tensor_digest, name, dtype, array)))
            if len(running) >= 2 * THREADS:
                first, result = running.popleft()
                digests[first] = result.result()
        digests.update((name, result.result()) for name, result in running)
    return digests
