"""A tensor has the same digest wherever its bytes are hashed."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from penstock.weights import digest
from penstock.weights.model_weights import digest_of, digests_of, weight_bits

pytest.importorskip("triton")

from penstock.weights import device_digest
from penstock.weights.device_digest import DeviceDigests, hash_leaves

pytestmark = pytest.mark.gpu(stand_in=True)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # else Triton's interpreter


def sha256(leaves: list[bytes]) -> bytes:
    return b"".join(hashlib.sha256(leaf).digest() for leaf in leaves)


@pytest.mark.parametrize(
    ("count", "leaf_bytes"),
    [
        pytest.param(1, 64, marks=pytest.mark.slow),
        (3, 128),
        pytest.param(33, 64, marks=pytest.mark.slow),
    ],
)
def test_leaves_are_hashed_as_hashlib_does(count: int, leaf_bytes: int) -> None:
    octets = torch.randint(0, 256, (count * leaf_bytes,), dtype=torch.uint8).to(DEVICE)
    start = octets.data_ptr()
    addresses = list(range(start, start + len(octets), leaf_bytes))
    words = hash_leaves(np.array(addresses), leaf_bytes, DEVICE).cpu().numpy()
    whole = octets.cpu().numpy().tobytes()
    expected = sha256([whole[i : i + leaf_bytes] for i in range(0, len(whole), leaf_bytes)])
    assert words.astype(np.uint32).astype(">u4").tobytes() == expected


def test_device_and_host_agree() -> None:
    """Tensors of every number format in every shape, hashed together."""
    whole = DeviceDigests(DEVICE, leaf_bytes=64)
    expected = {}
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    shapes = ((), (0,), (7,), (16, 4), (3, 5, 11), (129,))
    for number, (dtype, shape) in enumerate(itertools.product(dtypes, shapes)):
        tensor = (torch.rand(shape) * 100).to(DEVICE, dtype)
        whole.add(f"w{number}", tensor)
        bits = weight_bits(tensor)[1].tobytes()
        leaves = sha256([bits[i : i + 64] for i in range(0, len(bits), 64)])
        name = str(dtype).removeprefix("torch.")
        expected[f"w{number}"] = digest.combine_leaves(f"w{number}", name, shape, leaves)
    assert whole.finish() == expected


def test_what_is_held_is_hashed_when_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digest, "HELD_BYTES", 100)
    several = DeviceDigests(DEVICE, leaf_bytes=64)
    several.add("a", torch.zeros(20, device=DEVICE))
    assert not several.digests
    several.add("b", torch.zeros(20, device=DEVICE))
    assert set(several.digests) == {"a", "b"}


def test_a_view_that_does_not_begin_at_a_word() -> None:
    octets = torch.arange(200, dtype=torch.uint8).to(DEVICE)
    odd = DeviceDigests(DEVICE, leaf_bytes=64)
    odd.add("a", octets[1:129])
    leaves = sha256([bytes(range(1, 65)), bytes(range(65, 129))])
    assert odd.finish() == {"a": digest.combine_leaves("a", "uint8", (128,), leaves)}


@pytest.mark.gpu
def test_weights_on_a_gpu_have_the_digest_of_their_copy() -> None:
    weights = {
        "small": torch.rand(100, device=DEVICE),
        "big": torch.rand(3000, 1001, device=DEVICE).bfloat16(),
        "host": torch.rand(50),
    }
    assert digest_of(weights.items()) == digest_of((n, t.cpu()) for n, t in weights.items())
    assert set(digests_of(weights.items())) == set(weights)
