"""The GPU kernels against their plain torch reference: on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.model.kernels.row_tiles import Norm
from penstock.model.sampling import stream_key
from stages import decode_reference as reference

pytestmark = pytest.mark.gpu(stand_in=True)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
from penstock.model.kernels import decode_kernels as kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


SHAPES = [
    (14, 2, 64, 64, None, None, False),
    (4, 4, 32, 32, None, None, False),
    (9, 3, 64, 64, 40, None, False),
    (8, 1, 128, 128, None, None, False),
    (4, 2, 48, 32, None, None, False),
    (4, 2, 32, 32, 40, 1.5, False),
    (8, 2, 64, 64, 40, None, True),
    (4, 2, 16, 16, None, 0.7, True),
]
SPLIT = {(4, 2, 48, 32), (4, 2, 32, 32), (4, 2, 16, 16)}  # interpreted, the others take seconds


def split_marks(shape: tuple[Any, ...], programs: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if programs > 1 and shape[:4] not in SPLIT else []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_size", "value_size", "window", "softcap", "sinks", "programs"),
    [
        pytest.param(*shape, programs, marks=split_marks(shape, programs))
        for shape in SHAPES
        for programs in (1, 64)
    ],
)
def test_attention_equals_the_reference(
    heads: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    programs: int,
    dtype: torch.dtype,
) -> None:
    """`programs` sets into how many parts contexts are split; 1: not at all."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    keys, values = draw(900, kv_heads, key_size), draw(900, kv_heads, value_size)
    # as a layer passes them: heads are a view of [rows, heads * size]
    query = draw(5, heads * key_size + 16)[:, : heads * key_size].view(5, heads, key_size)
    start = torch.tensor([0, 300, 10, 640, 64], device=DEVICE)
    length = torch.tensor([1, 200, 63, 129, 64], device=DEVICE)
    how = (0.2, window, softcap, draw(heads) if sinks else None)
    got = kernels.decode_attention(query, keys, values, start, length, *how, programs)
    wanted = reference.decode_attention(query, keys, values, start, length, *how)
    assert relative_error(got, wanted) < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [64, 5000, pytest.param(32768, marks=pytest.mark.slow)])
def test_sampling_equals_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    rows = 32
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype).to(DEVICE)
    keys = [stream_key(seed) for seed in range(rows)]
    key = torch.tensor([k - (1 << 64) if k >= 1 << 63 else k for k in keys], device=DEVICE)
    index = torch.arange(rows, device=DEVICE)
    temperature = torch.linspace(0.5, 1.5, rows, device=DEVICE)
    temperature[::5] = 0
    token, logprob = kernels.sample_rows(logits, key, index, temperature)
    expected, expected_logprob = reference.sample_rows(logits, key, index, temperature)
    assert (token == expected).float().mean() >= 0.95  # a boundary may fall on the next token
    same = token == expected
    assert torch.allclose(logprob[same], expected_logprob[same], atol=1e-4)


def adversarial_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Peaked, flat, mostly masked, one finite, tiny tails: every row a distribution."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocabulary, generator=generator)
    logits[0::6] *= 30
    logits[1::6] = 0
    logits[2::6, vocabulary // 3 :] = -float("inf")
    logits[3::6] = -float("inf")
    logits[3::6, vocabulary - 1] = 5
    logits[4::6, : vocabulary // 2] -= 80
    return logits


@pytest.mark.parametrize("vocabulary", [100, 5000])
def test_no_token_outside_the_distribution_is_sampled(vocabulary: int) -> None:
    rows, rounds = (12, 2) if INTERPRETED else (48, 20)  # test_sampler_soak.py does many on a GPU
    logits = adversarial_logits(rows, vocabulary).to(DEVICE)
    temperature = torch.ones(rows, device=DEVICE)
    for index in range(rounds):
        key = torch.arange(rows, device=DEVICE) * 7919 + index
        token, logprob = kernels.sample_rows(
            logits, key, torch.full((rows,), index, device=DEVICE), temperature
        )
        assert torch.isfinite(logits.gather(1, token[:, None])).all()
        wanted = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
        assert torch.allclose(logprob, wanted, atol=1e-4)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_distribution_gives_nan_and_touches_no_other(wrong: float) -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(5))
    key, index = torch.arange(8, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE)
    temperature = torch.ones(8, device=DEVICE)
    before = kernels.sample_rows(logits.to(DEVICE), key, index, temperature)
    if wrong == -float("inf"):
        logits[3] = wrong
    else:
        logits[3, 1234] = wrong
    token, logprob = kernels.sample_rows(logits.to(DEVICE), key, index, temperature)
    others = torch.arange(8, device=DEVICE) != 3
    assert token[3] == 0
    assert torch.isnan(logprob).tolist() == [False] * 3 + [True] + [False] * 4
    assert torch.equal(token[others], before[0][others])
    assert torch.equal(logprob[others], before[1][others])


def test_rows_advance_and_ban_their_stop_tokens() -> None:
    """Slots 0 to 4 are requests, slot 5 is padding, which two rows use."""

    def state() -> SimpleNamespace:
        def column(*values: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        return SimpleNamespace(
            index=column(0, 4, 7, 2, 9, 0),
            position=column(10, 24, 37, 42, 59, 0),
            min_index=column(2, 4, 9, 0, 99, 0),
            key=column(11, -12, 13, 14, 15, 0),
            temperature=column(1, 0.5, 0, 2, 1, 1, dtype=torch.float32),
            stops=column(1, -1, 2, 3, 4, -1, 1, 2, 0, 69, -1, -1).view(6, 2),
        )

    slot = torch.tensor([4, 0, 5, 2, 1, 5], device=DEVICE)
    for by in (0, 1):
        got, wanted = state(), state()
        logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(6)).to(DEVICE)
        plain = logits.clone()
        mine = kernels.next_rows(logits, slot, got, by)
        theirs = reference.next_rows(plain, slot, wanted, by)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert torch.equal(logits, plain)
        assert torch.isinf(logits).sum() == 4  # of slot 4 two, of slots 0 and 2 one
        for name in vars(wanted):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert got.position.tolist() == [10 + by, 24 + by, 37 + by, 42, 59 + by, 0]


def test_a_step_looks_up_its_rows() -> None:
    """Slot 3's position lies beyond the table of turns: its row is not used, but must not be read there."""
    generator = torch.Generator().manual_seed(7)
    embedding, turns = (
        torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((30, 20), (8, 12))
    )
    state = SimpleNamespace(
        token=torch.tensor([3, 29, 0, 7], device=DEVICE),
        position=torch.tensor([5, 0, 7, 9], device=DEVICE),
        start=torch.tensor([40, 0, 10, 99], device=DEVICE),
    )
    slot = torch.tensor([2, 3, 0], device=DEVICE)
    got = kernels.open_rows(slot, state, embedding, 1.5, turns)
    assert torch.equal(got.x_BD, embedding[state.token[slot]] * 1.5)
    assert torch.equal(got.turn_BW, turns[[7, 7, 5]])
    assert [rows.tolist() for rows in got[2:]] == [[10, 99, 40], [17, 108, 45], [8, 10, 6]]


def test_rows_are_stored_where_they_belong() -> None:
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(1, 6, 2 * 48 + 5, generator=generator)[..., : 2 * 48].view(1, 6, 2, 48)
    value = torch.randn(1, 6, 2, 32, generator=generator)
    key, value = key.transpose(1, 2).to(DEVICE), value.transpose(1, 2).to(DEVICE)
    target = torch.tensor([4, 0, 9, 30, 2, 17], device=DEVICE)
    got = [torch.zeros(40, 2, size, device=DEVICE) for size in (48, 32)]
    wanted = [pool.clone() for pool in got]
    kernels.store_rows(key, value, *got, target)
    reference.store_rows(key, value, *wanted, target)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("few", [True, False])
def test_a_prompt_is_stored_in_several_regions(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are views of one product; each row goes where `target` says, or to several places."""
    if not few:
        monkeypatch.setattr(kernels, "_FEW_STORED", 4)  # several rows by one program
    product = torch.randn(5, 3 * 2 * 20, device=DEVICE)
    heads = product.view(5, 6, 20).transpose(0, 1)[None]
    key, value = heads[:, 2:4], heads[:, 4:]
    source = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 4], device=DEVICE)
    target = torch.tensor([7, 8, 9, 20, 21, 22, 3, 4, 30], device=DEVICE)
    got = [torch.zeros(31, 2, 20, device=DEVICE) for _ in range(2)]
    kernels.store_rows(key, value, *got, target, source)
    for pool, columns in zip(got, (slice(40, 80), slice(80, 120)), strict=True):
        wanted = torch.zeros(31, 2, 20, device=DEVICE)
        for row, token in zip(source.tolist(), target.tolist(), strict=True):
            wanted[token] = product[row, columns].view(2, 20)
        assert torch.equal(pool, wanted)
    others = [torch.zeros(31, 2, 20, device=DEVICE) for _ in range(2)]
    reference.store_rows(key, value, *others, target, source)
    assert all(torch.equal(a, b) for a, b in zip(got, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "turned", "offset"),
    [(14, 2, 64, 64, None), (3, 3, 20, 20, 0.0), (4, 1, 32, 24, 1.0), (5, 2, 16, 0, 0.0)],
)
def test_heads_are_normed_and_turned_and_keys_and_values_stored(
    heads: int, kv_heads: int, size: int, turned: int, offset: float | None, stores: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """The first `turned` numbers of a head turn; offset None: no norms; not stored: turned in place."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    def plain(heads_BHD: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        wide = heads_BHD.float()
        if norm is not None:
            scaled = wide * (wide.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
            wide = (scaled * (norm.weight.float() + norm.offset)).to(dtype).float()
        if turn is not None:
            part = wide[..., :turned]
            rolled = part.roll(turned // 2, -1)
            wide[..., :turned] = part * turn[0].float() + rolled * turn[1].float()
        return wide.to(dtype)

    half, turn = draw(2, 4, 1, turned // 2), None
    if turned:
        turn = (torch.cat([half[0], half[0]], -1), torch.cat([-half[1], half[1]], -1))
    norms = None
    if offset is not None:
        norms = tuple(Norm(draw(size), 1e-6, offset) for _ in range(2))
    product = draw(4, (heads + 2 * kv_heads) * size)
    every = product.clone().view(4, -1, size)
    query = plain(every[:, :heads], norms and norms[0])
    key = plain(every[:, heads : heads + kv_heads], norms and norms[1])
    value, limit = every[:, -kv_heads:], 1e-5 if dtype is torch.float32 else 1e-2
    sizes, target = (heads, kv_heads, size), torch.tensor([7, 0, 3, 9], device=DEVICE)
    pools = [torch.full((11, kv_heads, size), 5.0, dtype=dtype, device=DEVICE) for _ in range(4)]
    if not stores:
        assert kernels.turn_heads(product, sizes, turn, norms, None) is product
        wanted = torch.cat([query, key, value], 1).flatten(1)
        torch.testing.assert_close(product, wanted, rtol=limit, atol=limit)
        return
    got = kernels.turn_heads(product, sizes, turn, norms, (*pools[:2], target))
    pools[2][target], pools[3][target] = key, value
    torch.testing.assert_close(got, query, rtol=limit, atol=limit)
    torch.testing.assert_close(pools[0], pools[2], rtol=limit, atol=limit)
    assert torch.equal(pools[1], pools[3])
