"""Sampling on hand-worked numbers and against its own distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.model.sampling import (
    MOST_KEPT,
    RowSampling,
    _first_past,
    filter_top_k_top_p,
    pick,
    sample,
    stream_key,
    uniforms,
)


def how(rows: int, uniform: list[float] | None = None, **fields: object) -> RowSampling:
    given = {
        "uniform_N": torch.tensor(uniform or [0.5] * rows),
        "temperature_N": torch.ones(rows),
        "greedy_N": None,
        "top_k_N": None,
        "top_p_N": None,
        **fields,
    }
    return RowSampling(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.099, 0), (0.1, 1), (0.39, 1), (0.41, 3), (0.9999, 3)]
)
def test_inverse_cdf_by_hand(uniform: float, token: int) -> None:
    probs = torch.tensor([[0.1, 0.3, 0.0, 0.6, 0.0]])
    for scale in (1.0, 8.0):  # weights need not add up to one
        chosen, total = pick(scale * probs, torch.tensor([uniform]))
        assert chosen.item() == token
        assert total.item() == pytest.approx(scale)


@pytest.mark.parametrize("vocabulary", [50, 512, 513, 5000])
def test_a_token_without_probability_is_never_sampled(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(64, vocabulary, generator=generator)
    probs[:, ::2] = 0
    probs[:, vocabulary // 2 :] = 0
    edge = torch.tensor([0.0, 1 - 2**-23] * 32)
    token, _ = pick(probs, edge)
    assert (probs.gather(1, token[:, None]) > 0).all()


@pytest.mark.parametrize("vocabulary", [7, 1000])
def test_frequencies_are_those_of_the_distribution(vocabulary: int) -> None:
    draws = 20_000
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    keys = np.full(draws, stream_key(3), np.uint64)
    uniform = torch.from_numpy(uniforms(keys, np.arange(draws)))
    token, logprob, _ = sample(
        logits.expand(draws, -1),
        how(draws, uniform_N=uniform, temperature_N=torch.full((draws,), 0.7)),
    )
    wanted = (logits[0] / 0.7).softmax(0)
    got = torch.bincount(token, minlength=vocabulary) / draws
    assert (got - wanted).abs().max() < 0.015
    assert torch.allclose(logprob, wanted.log()[token], atol=1e-5)


def test_greedy_is_judged_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    token, logprob, _ = sample(logits, how(1, greedy_N=torch.tensor([True])))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(logits.log_softmax(1)[0, 1].item(), abs=1e-6)


def test_filters_by_hand() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(4, -1)
    top_k = torch.tensor([0, 2, 0, 3])
    top_p = torch.tensor([1.0, 1.0, 0.6, 0.5])
    kept = filter_top_k_top_p(logits, top_k, top_p)[0] > -torch.inf
    # last row: the top token holds 4/9 of the top three, below one half, so the second stays too
    assert kept.tolist() == [
        [True, True, True, True],
        [True, True, False, False],
        [True, True, False, False],
        [True, True, False, False],
    ]


def test_the_tokens_that_were_left_are_told() -> None:
    logits = torch.tensor([[0.4, 0.1, 0.2, 0.3]]).log().expand(3, -1)
    cuts = {"top_k_N": torch.tensor([0, 2, 0]), "top_p_N": torch.tensor([1.0, 1.0, 0.75])}
    token, logprob, kept = sample(logits.clone(), how(3, [0.99, 0.99, 0.99], **cuts))
    assert kept is not None
    assert [ids.tolist() for ids in kept] == [[], [0, 3], [0, 2, 3]]
    wanted = [0.3, 0.3 / 0.7, 0.3 / 0.9]
    assert token.tolist() == [3, 3, 3]
    assert logprob.exp().tolist() == pytest.approx(wanted, abs=1e-6)


def test_no_more_tokens_are_left_than_a_record_holds() -> None:
    logits = torch.zeros(2, MOST_KEPT + 500)
    token, logprob, kept = sample(logits, how(2, [0.1, 0.999], top_p_N=torch.tensor([1.0, 0.99])))
    assert kept is not None
    assert [len(ids) for ids in kept] == [0, MOST_KEPT]
    assert token[1].item() in kept[1]
    assert logprob[1].item() == pytest.approx(-np.log(MOST_KEPT), abs=1e-5)


def test_banned_tokens_are_never_sampled_and_the_rest_is_renormalised() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    banned = (torch.tensor([0]), torch.tensor([0]))
    token, logprob, _ = sample(logits, how(1, [0.1], banned=banned))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(np.log(0.5), abs=1e-6)


def test_streams_are_uniform_and_unlike() -> None:
    index = np.arange(4000)
    streams = [uniforms(np.full(4000, stream_key(seed), np.uint64), index) for seed in range(4)]
    for stream in streams:
        assert stream.min() >= 0
        assert stream.max() < 1
        assert abs(stream.mean() - 0.5) < 0.02
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(streams[0], streams[1])[0, 1]) < 0.05


def test_a_prefix_sum_that_is_not_monotone_never_leads_outside() -> None:
    """A parallel prefix sum may fall by a rounding error; counting cells would be wrong then."""
    mass = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    ends = torch.tensor([[0.25, 0.2499, 0.75, 1.0, 0.9999]])
    for target, cell in ((0.0, 0), (0.24999, 0), (0.25, 2), (0.9999, 3), (1.0, 3), (2.0, 3)):
        assert _first_past(torch.tensor([target]), mass, ends).item() == cell


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_distribution_give_no_log_prob(wrong: float) -> None:
    logits = torch.zeros(3, 700)
    logits[1] = wrong
    token, logprob, _ = sample(logits, how(3))
    assert torch.isnan(logprob).tolist() == [False, True, False]
    assert int(token.min()) >= 0
    assert int(token.max()) < 700


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [5, 26, 64, 300, 1003])
def test_the_bits_of_a_row_do_not_depend_on_its_batch(vocabulary: int) -> None:
    """Thousands of rows: a remainder of a batch that other code computes changes few of them."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3000, vocabulary, generator=draw) * 4
    uniform = torch.rand(3000, generator=draw).tolist()
    token, logprob, _ = sample(logits.clone(), how(3000, uniform))
    for size in (1, 3):
        for first in range(0, 3000, size):
            rows = slice(first, first + size)
            alone = sample(logits[rows].clone(), how(size, uniform[rows]))
            assert torch.equal(alone[0], token[rows])
            assert torch.equal(alone[1], logprob[rows])
