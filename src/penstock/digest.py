"""One digest for a set of named tensors: the identity of a policy's weights.

Layer 0. Takes raw bytes (numpy views), so that trainer, engine, journal and auditor agree without
sharing a framework. Names are sorted; dtype and shape are part of the identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

DIGEST_BYTES = 16


def tensor_digest(name: str, dtype: str, array: np.ndarray) -> bytes:
    """Digest of one tensor: its name, dtype, shape and bytes."""
    hasher = hashlib.blake2b(f"{name}|{dtype}|{array.shape}|".encode(), digest_size=DIGEST_BYTES)
    hasher.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return hasher.digest()


def combine_digests(tensor_digests: dict[str, bytes]) -> str:
    """Digest of a whole model from those of its tensors, whatever order they came in."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensor_digests):
        hasher.update(name.encode())
        hasher.update(tensor_digests[name])
    return hasher.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, str, np.ndarray]]) -> str:
    """Digest of (name, dtype, array) triples. A dtype numpy lacks travels as its bits (uint16)."""
    return combine_digests(
        {name: tensor_digest(name, dtype, array) for name, dtype, array in tensors}
    )
