"""The digest of weights: sees every accident, and is the same for the same bytes everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.weights import digest
from penstock.weights.digest import LEAF_BYTES, digest_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
SHAPES = ((), (0,), (7,), (16, 4), (3, 5, 11), (LEAF_BYTES // 4,), (3, LEAF_BYTES // 2 + 1))


def tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    """A tensor of every number format in every shape: none, part of, one and several leaves."""
    random = torch.Generator().manual_seed(0)
    return {
        f"{str(dtype).removeprefix('torch.')}-{number}": (
            (100 * torch.randn(shape, generator=random)).to(dtype).to(device)
        )
        for dtype, (number, shape) in itertools.product(DTYPES, enumerate(SHAPES))
    }


def of(tensor: torch.Tensor, name: str = "a") -> str:
    return digest_of([(name, tensor)])


def test_the_order_of_tensors_does_not_matter() -> None:
    weights = list(tensors().items())
    assert digest_of(weights) == digest_of(reversed(weights))


@pytest.mark.parametrize("chunk_bytes", [LEAF_BYTES, 2 * LEAF_BYTES])
def test_how_much_is_hashed_at_a_time_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    expected = digest_of(tensors().items())
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    assert digest_of(tensors().items()) == expected


def test_a_digest_of_today_is_that_of_tomorrow() -> None:
    """A journal is compared with digests that another version of the libraries computes."""
    numbers = torch.arange(100_000, dtype=torch.int32)
    assert of(numbers) == "leaves-ae48232ce77fa0e3f661f01054a7e05a"


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("octet", [0, 3, 8, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES + 4])
def test_one_bit_anywhere_is_another_identity(octet: int, bit: int) -> None:
    weights = torch.randint(0, 256, (2 * LEAF_BYTES + 5,), dtype=torch.uint8)
    changed = weights.clone()
    changed[octet] ^= 1 << bit
    assert of(changed) != of(weights)


@pytest.mark.slow
def test_two_changed_signs_do_not_cancel_each_other() -> None:
    """The highest bits of words: a plain sum of products would lose pairs of them."""
    weights = torch.randn(64)
    for first, second in itertools.combinations(range(64), 2):
        changed = weights.clone()
        changed[[first, second]] *= -1
        assert of(changed) != of(weights)


@pytest.mark.parametrize("places", [(0, 1), (2, 3), (0, 5000), (1, LEAF_BYTES // 4 + 1)])
def test_swapped_elements_are_another_identity(places: tuple[int, int]) -> None:
    weights = torch.randn(LEAF_BYTES)
    swapped = weights.clone()
    swapped[list(places)] = weights[list(reversed(places))]
    assert of(swapped) != of(weights)


def test_swapped_leaves_and_shifted_bytes_are_another_identity() -> None:
    weights = torch.randint(0, 256, (3 * LEAF_BYTES,), dtype=torch.uint8)
    parts = weights.view(3, LEAF_BYTES)
    others = [parts[[1, 0, 2]].view(-1), *(weights.roll(by) for by in (1, 4, 8, LEAF_BYTES))]
    assert len({of(weights), *map(of, others)}) == 6


def test_swapped_tensors_are_another_identity() -> None:
    first, second = torch.randn(2, 10)
    assert digest_of([("a", first), ("b", second)]) != digest_of([("a", second), ("b", first)])


def test_name_shape_and_dtype_are_part_of_it() -> None:
    weights = torch.zeros(2, 3)
    digests = {of(weights), of(weights, "b"), of(weights.T), of(weights.view(torch.int32))}
    digests |= {of(torch.zeros(count, dtype=torch.uint8)) for count in range(20)}
    assert len(digests) == 24


def test_a_view_has_the_digest_of_its_copy() -> None:
    octets = torch.randint(0, 256, (LEAF_BYTES + 200,), dtype=torch.uint8)
    matrix = torch.randn(300, 400).bfloat16()
    for view in (octets[1:129], octets[3:], matrix.T, matrix[:, 1:7], matrix[5:]):
        assert of(view) == of(view.clone())


@pytest.mark.gpu
def test_weights_on_a_gpu_have_the_digest_of_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_bytes in (LEAF_BYTES, digest.DEVICE_CHUNK_BYTES):
        monkeypatch.setattr(digest, "DEVICE_CHUNK_BYTES", chunk_bytes)
        assert digest.digests_of(tensors("cuda").items()) == digest.digests_of(tensors().items())
    mixed = [("host", torch.rand(50)), ("device", torch.rand(3000, 9001, device="cuda").T)]
    assert digest_of(mixed) == digest_of((name, tensor.cpu()) for name, tensor in mixed)


def test_a_tensor_has_the_same_digest_alone_and_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 2 * LEAF_BYTES)
    lengths = (0, 1, 7, 8, LEAF_BYTES - 8, LEAF_BYTES, LEAF_BYTES + 1, 5 * LEAF_BYTES + 3, 64)
    torch.manual_seed(0)
    weights = {
        f"w{length}": torch.randint(0, 256, (length,), dtype=torch.uint8) for length in lengths
    }
    alone = {name: digest.digests_of([(name, tensor)])[name] for name, tensor in weights.items()}
    assert digest.digests_of(weights.items()) == alone
    assert len(set(alone.values())) == len(lengths)
