"""A digest depends neither on the order of the tensors nor on the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.weights import digest


def tensors(count: int = 40) -> list[tuple[str, str, np.ndarray]]:
    """Every second tensor is large enough to be hashed on a thread."""
    random = np.random.default_rng(0)
    sizes = (100, (1 << 18) + 3)
    return [
        (f"layer.{i}", "float32", random.random(sizes[i % 2], dtype=np.float32))
        for i in range(count)
    ]


def test_threads_and_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    several = digest.weights_digest(iter(tensors()))
    monkeypatch.setattr(digest, "BIG_BYTES", 1 << 60)
    assert digest.weights_digest(tensors()) == several
    assert digest.weights_digest(reversed(tensors())) == several


@pytest.mark.parametrize("number", [0, 1, 38, 39])
def test_one_bit_anywhere_is_another_identity(number: int) -> None:
    changed = tensors()
    changed[number][2].view(np.uint32)[-1] ^= 1
    assert digest.weights_digest(changed) != digest.weights_digest(tensors())


def test_name_shape_and_dtype_are_part_of_it() -> None:
    array = np.zeros((2, 3), dtype=np.float32)
    forms = [("a", "float32", array), ("b", "float32", array), ("a", "float32", array.T)]
    forms.append(("a", "int32", array.view(np.int32)))
    assert len({digest.weights_digest([form]) for form in forms}) == len(forms)


def test_a_tensor_that_cannot_be_hashed_raises() -> None:
    broken = np.array([object()] * digest.BIG_BYTES, dtype=object)
    with pytest.raises((TypeError, ValueError)):
        digest.weights_digest([("a", "object", broken)])
