"""One digest for a set of named tensors: the identity of a policy's weights.

Takes raw bytes (numpy views) and imports no torch, so that trainer, engine, journal and auditor agree
without sharing a framework. Names are sorted; dtype and shape are part of the identity. A tensor is hashed
in leaves of a fixed size, so that a GPU can hash thousands of them at once (`device_digest.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

FORM = "leaves-"  # the prefix names the form: digests of other forms cannot be compared with it
DIGEST_BYTES = 16  # length of a tensor's digest
LEAF_BYTES = 32 << 10
LEAF_DIGEST_BYTES = 32
BIG_BYTES = 1 << 20  # a tensor of this size is hashed on a thread
HELD_BYTES = 16 << 20
THREADS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


def tensor_digest(name: str, dtype: str, array: np.ndarray) -> bytes:
    """Return the digest of one tensor: of its name, dtype, shape and bytes."""
    octets = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
    leaves = [
        hashlib.sha256(octets[start : start + LEAF_BYTES]).digest()
        for start in range(0, len(octets), LEAF_BYTES)
    ]
    return combine_leaves(name, dtype, array.shape, b"".join(leaves))


def combine_leaves(name: str, dtype: str, shape: tuple[int, ...], leaves: bytes) -> bytes:
    """Return the digest of one tensor from the SHA-256 of its leaves; the last may be shorter."""
    # SHA-256, because current processors compute it in hardware, twice as fast as BLAKE2b
    hasher = hashlib.sha256(f"{name}|{dtype}|{shape}|".encode())
    hasher.update(leaves)
    return hasher.digest()[:DIGEST_BYTES]


def combine_digests(tensor_digests: dict[str, bytes]) -> str:
    """Return the digest of a model from those of its tensors, in any order."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensor_digests):
        hasher.update(name.encode())
        hasher.update(tensor_digests[name])
    return FORM + hasher.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, str, np.ndarray]]) -> str:
    """Return the digest of (name, dtype, array) triples; a dtype that numpy lacks comes as its bits."""
    return combine_digests(tensor_digests(tensors))


def tensor_digests(tensors: Iterable[tuple[str, str, np.ndarray]]) -> dict[str, bytes]:
    """Return the digest of each tensor by name.

    Big tensors are hashed on several threads, as hashlib releases the interpreter lock. At most two
    big tensors per thread, and `HELD_BYTES` of small ones, are held at a time, so that an iterable that
    makes copies stays cheap.
    """
    digests: dict[str, bytes] = {}
    running: deque[tuple[str, Future[bytes]]] = deque()
    small: list[tuple[str, str, np.ndarray]] = []
    small_bytes = 0

    def hash_small() -> None:
        digests.update((name, tensor_digest(name, dtype, array)) for name, dtype, array in small)
        small.clear()

    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        for name, dtype, array in tensors:
            if array.nbytes < BIG_BYTES:
                # one after another, not in turns with the code that makes them: hashes fill the
                # processor's cache, and that code then takes twice as long
                small.append((name, dtype, array))
                small_bytes += array.nbytes
                if small_bytes >= HELD_BYTES:
                    hash_small()
                    small_bytes = 0
                continue
            running.append((name, pool.submit(tensor_digest, name, dtype, array)))
            if len(running) >= 2 * THREADS:
                first, result = running.popleft()
                digests[first] = result.result()
        hash_small()
        digests.update((name, result.result()) for name, result in running)
    return digests
