"""A delta gives back every bit, whatever changed, and is small where little did."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.weights.distributor import DELTA_HEADER, apply_delta, encode_delta


def round_trip(base: np.ndarray, new: np.ndarray) -> int | None:
    """Return the size of a delta that gave `new` back; None if the whole is to be sent."""
    made = encode_delta(base.view(np.uint8), new.view(np.uint8))
    if made is None:
        return None
    words = base.copy()
    apply_delta(made, words)
    assert (words == new).all()
    return len(made)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_bit_comes_back(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5000))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    base = random.integers(0, 1 << 16, size, dtype=np.uint16)
    places = random.choice(size, int(size * data.draw(st.floats(0, 0.25))), replace=False)
    new = base.copy()
    most = data.draw(st.sampled_from([1, 2, 300, 1 << 15]))
    new[places] += random.integers(-most, most + 1, len(places)).astype(np.uint16)
    made = round_trip(base, new)
    assert made is not None or size < 200  # little data does not pay for its headers


def test_gaps_longer_than_a_byte() -> None:
    base = np.zeros(100_000, np.uint16)
    for place in (0, 254, 255, 256, 510, 511, 99_999):
        new = base.copy()
        new[place] = 1
        assert round_trip(base, new) is not None
    assert round_trip(base, base.copy()) == DELTA_HEADER.size + 2 * 8  # nothing changed


def test_what_changed_much_is_sent_whole() -> None:
    random = np.random.default_rng(0)
    base = random.standard_normal(10_000).astype(np.float32).view(np.uint16)
    new = (base.view(np.float32) * np.float32(1.001)).view(np.uint16)
    assert round_trip(base, new) is None


def test_an_update_of_bfloat16_weights_is_twenty_times_smaller() -> None:
    """AdamW at 1e-6 on float32 masters that are anywhere in their rounding cells."""
    torch.manual_seed(0)
    master = torch.randn(1 << 20) * 0.02
    before, after = master.bfloat16(), (master + 1e-6 * torch.randn(1 << 20).sign()).bfloat16()
    base, new = (one.view(torch.int16).numpy().view(np.uint16) for one in (before, after))
    size = round_trip(base, new)
    assert size is not None
    assert size * 20 < new.nbytes
    assert (base != new).mean() > 0.01
