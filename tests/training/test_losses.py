"""Losses, KL estimators and importance weights on hand-worked numbers, and the whole table."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.config import AlgorithmConfig
from penstock.training.algo import ALGORITHMS, kl
from penstock.training.algo.method import Algorithm, TokenView, algorithm_class, resolve_settings
from penstock.training.algo.ratios import importance_weights
from penstock.training.algo.settings import AlgorithmSettings
from penstock.training.objective import TokenInputs, pack_loss
from penstock.training.pack import make_pack


def view(ratios, advantages, sequences=None) -> TokenView:
    """Make tokens with these ratios to the anchor."""
    ratios_N = torch.tensor(ratios, dtype=torch.float64)
    sequence_N = torch.tensor(sequences or [0] * len(ratios))
    return TokenView(
        logprobs_N=(ratios_N.log() - 1.0).requires_grad_(),
        anchor_N=torch.full_like(ratios_N, -1.0),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        sequence_N=sequence_N,
        num_sequences=int(sequence_N.max()) + 1,
    )


def algorithm(name: str, **fields) -> Algorithm:
    settings = resolve_settings(AlgorithmConfig(name=name, **fields))
    return algorithm_class(name)(settings)


def gradient(loss_N, logprobs_N):
    return torch.autograd.grad(loss_N.sum(), logprobs_N)[0].tolist()


def test_clip_bounds_the_ratio_only_where_that_lowers_the_objective() -> None:
    tokens = view([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0])
    got = algorithm("grpo").surrogate(tokens)
    assert got.loss_N.tolist() == pytest.approx([-1.2 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2, -1.1])
    assert got.clipped_N.tolist() == [True, False, False, True, False]
    # d(-ratio A) / d logprob = -ratio A where it is not clipped
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([0, 3.0, -1.0, 0, -1.1])


def test_dapo_clips_higher() -> None:
    got = algorithm("dapo").surrogate(view([1.5], [1.0]))
    assert got.loss_N.item() == pytest.approx(-1.28)


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    tokens = view([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0])
    got = algorithm("grpo").surrogate(tokens)  # 3 by default
    assert got.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([0.0, 2.0, 0.0])
    off = algorithm("grpo", dual_clip=0).surrogate(tokens)
    assert off.loss_N.tolist() == pytest.approx([10.0, 2.0, -1.2])


def test_gspo_ratio_is_the_geometric_mean_of_the_sequence() -> None:
    tokens = view([4.0, 1.0, 9.0], [1.0, 1.0, -1.0], sequences=[0, 0, 1])
    got = algorithm("gspo").surrogate(tokens)
    assert got.ratio_N.tolist() == pytest.approx([2.0, 2.0, 9.0])
    assert got.loss_N.tolist() == pytest.approx([-1.0004, -1.0004, 3.0])  # 9 is cut by dual clip
    tokens = view([1.0, 1.0], [1.0, 1.0])
    loss_N = algorithm("gspo").surrogate(tokens).loss_N
    # the sequence's mean of two equal losses: each token carries half of ratio x advantage
    assert gradient(loss_N / 2, tokens.logprobs_N) == pytest.approx([-0.5, -0.5])


def test_rloo_has_one_ratio_per_response() -> None:
    tokens = view([1.1, 1.05, 2.0], [1.0, 1.0, -1.0], sequences=[0, 0, 1])
    got = algorithm("rloo").surrogate(tokens)
    assert got.ratio_N.tolist() == pytest.approx([1.155, 1.155, 2.0])
    assert got.loss_N.tolist() == pytest.approx([-1.155, -1.155, 2.0])
    # the mean over a response's equal token losses: every token carries ratio x advantage
    weights_N = torch.tensor([0.5, 0.5, 1.0])
    assert gradient(got.loss_N * weights_N, tokens.logprobs_N) == pytest.approx(
        [-1.155, -1.155, 2.0]
    )
    clipped = algorithm("rloo").surrogate(view([1.2, 1.2], [1.0, 1.0]))  # 1.44 over the response
    assert clipped.loss_N.tolist() == pytest.approx([-1.2, -1.2])
    assert clipped.clipped_N.all()


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    tokens = view([8.0, 0.5], [1.0, -1.0])
    got = algorithm("cispo").surrogate(tokens)
    assert got.clipped_N.tolist() == [True, False]
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([-5.0, 0.5])


def test_reinforce_is_reward_times_logprob() -> None:
    tokens = view([8.0, 0.5], [1.0, -1.0])
    got = algorithm("reinforce").surrogate(tokens)
    assert gradient(got.loss_N, tokens.logprobs_N) == [-1.0, 1.0]


def test_a_token_far_below_the_reference_does_not_decide_an_update() -> None:
    """Two nats below: exp(2) - 1 of gradient; ten nats below: k3 is cut, and its gradient ends."""
    logprobs_N = torch.tensor([-3.0, -11.0], dtype=torch.float64, requires_grad=True)
    reference_N = torch.full((2,), -1.0, dtype=torch.float64)
    k3_N = kl.estimate("k3", logprobs_N, reference_N)
    assert k3_N.tolist() == pytest.approx([math.exp(2) - 3, 10.0])
    assert gradient(k3_N, logprobs_N) == pytest.approx([1 - math.exp(2), 0.0])
    k2_N = kl.estimate("k2", logprobs_N, reference_N)
    assert gradient(k2_N, logprobs_N) == pytest.approx([-2.0, -10.0])
    # the ratio's own gradient leaves -(log-ratio), which needs no bound
    weighted_N = (
        kl.estimate("k3_weighted", logprobs_N, reference_N)
        * (logprobs_N - logprobs_N.detach()).exp()
    )
    assert gradient(weighted_N, logprobs_N) == pytest.approx([-2.0, -10.0])


@pytest.mark.parametrize(
    ("kind", "values", "slopes"),
    [
        ("k1", [25.0, -25.0], [1.0, 1.0]),
        ("k2", [300.0, 300.0], [20.0, -20.0]),  # 20 x 25 - 20^2 / 2
    ],
)
def test_a_token_that_the_reference_or_the_teacher_finds_impossible_is_still_held(
    kind: str, values: list[float], slopes: list[float]
) -> None:
    logprobs_N = torch.tensor([-1.0, -26.0], dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor([-26.0, -1.0], dtype=torch.float64)
    kl_N = kl.estimate(kind, logprobs_N, reference_N)
    assert kl_N.tolist() == pytest.approx(values)
    assert gradient(kl_N, logprobs_N) == pytest.approx(slopes)


def test_huge_ratios_stay_finite() -> None:
    tokens = TokenView(
        logprobs_N=torch.tensor([0.0, -1e4], requires_grad=True),
        anchor_N=torch.tensor([-1e4, 0.0]),
        advantages_N=torch.tensor([0.0, 1.0]),
        sequence_N=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
    )
    for name in ALGORITHMS:
        got = algorithm(name).surrogate(tokens)
        assert torch.isfinite(got.loss_N).all()
        assert np.isfinite(gradient(got.loss_N, tokens.logprobs_N)).all()


def test_kl_estimators() -> None:
    own, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl.estimate("k1", own, reference).tolist() == pytest.approx([0.5, -1.0])
    assert kl.estimate("k2", own, reference).tolist() == pytest.approx([0.125, 0.5])
    expected = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1.0 - 1]
    assert kl.estimate("k3", own, reference).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1]),
        ("token", [2, 3, 0.5, 0.5]),
        ("token_truncate", [2, 2.5, 0.5, 0.5]),
        ("token_mask", [2, 0, 0, 0]),
        ("sequence_truncate", [2.5, 2.5, 0.25, 0.25]),
        ("sequence_mask", [0, 0, 0, 0]),
    ],
)
def test_importance_weights(kind, expected) -> None:
    settings = AlgorithmSettings(correction=kind, correction_cap=2.5, correction_floor=0.6)
    proximal = torch.tensor([2.0, 3.0, 0.5, 0.5]).log()
    got = importance_weights(proximal, torch.zeros(4), torch.tensor([0, 0, 1, 1]), 2, settings)
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_of_the_table_keeps_the_contract(name) -> None:
    method = algorithm_class(name)
    assert issubclass(method, Algorithm)
    tokens = view([1.0, 1.0, 1.0], [1.0, -1.0, 0.0], sequences=[0, 0, 1])
    got = algorithm(name).surrogate(tokens)
    assert got.loss_N.shape == got.ratio_N.shape == got.clipped_N.shape == (3,)
    assert not got.ratio_N.requires_grad
    # On-policy every method's gradient is -advantage at each token (GSPO, GMPO, RLOO: the sequence's).
    if name not in ("gspo", "gmpo", "rloo"):
        assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([-1.0, 1.0, 0.0])


@pytest.mark.parametrize("sampler", ["policy", "another"])
def test_gradients_of_kl_estimators_in_the_loss(sampler: str) -> None:
    """The mean gradient over all tokens of a vocabulary, each weighed by who sampled it."""
    logits_V = torch.tensor([0.3, -0.7, 1.1, 0.0, -1.2], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([1.0, 0.2, -0.5, 0.0, 0.4], dtype=torch.float64).log_softmax(0)
    other_V = torch.tensor([0.0, 0.5, 0.5, -1.0, 0.1], dtype=torch.float64).log_softmax(0)

    def mean_gradient(kind: str) -> torch.Tensor:
        policy_V = logits_V.log_softmax(0)
        sampled_V = policy_V.detach() if sampler == "policy" else other_V
        term_V = kl.estimate(kind, policy_V, reference_V)
        if kind == "k3_weighted":
            term_V = term_V * (policy_V - sampled_V).exp()
        return torch.autograd.grad((sampled_V.exp() * term_V).sum(), logits_V)[0]

    def of(left_V: torch.Tensor, right_V: torch.Tensor) -> torch.Tensor:
        """The gradient of KL(left || right)."""
        return torch.autograd.grad((left_V.exp() * (left_V - right_V)).sum(), logits_V)[0]

    reverse_V = of(logits_V.log_softmax(0), reference_V)
    forward_V = of(reference_V, logits_V.log_softmax(0))
    torch.testing.assert_close(mean_gradient("k3_weighted"), reverse_V)
    if sampler == "policy":
        torch.testing.assert_close(mean_gradient("k1"), torch.zeros_like(reverse_V))
        torch.testing.assert_close(mean_gradient("k2"), reverse_V)
        torch.testing.assert_close(mean_gradient("k3"), forward_V)
    else:
        for kind in ("k2", "k3"):
            assert (mean_gradient(kind) - reverse_V).abs().max() > 0.05


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "sft"])
def test_a_weighted_kl_term_has_the_gradient_of_the_reverse_kl_with_every_method(name: str) -> None:
    """At ratio 1 each token's slope is beta x weight x log (policy / reference), alone in its response or not."""
    own, reference = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.7]
    made = algorithm(name, kl_in="loss", kl_estimator="k3_weighted", kl_beta=0.1)
    logprobs_N = torch.tensor(own, dtype=torch.float64, requires_grad=True)
    pack = make_pack([0], [np.arange(4)], [np.arange(3)], [0], torch.device("cpu"))
    inputs = TokenInputs(
        behaviour_N=logprobs_N.detach(),
        temperature_N=torch.ones(3),
        early_N=None,
        advantage_N=torch.zeros(3, dtype=torch.float64),
        weight_N=torch.full((3,), 0.5, dtype=torch.float64),
        reference_N=torch.tensor(reference, dtype=torch.float64),
    )
    loss, _ = pack_loss(made, pack, inputs, logprobs_N, torch.zeros(3))
    assert gradient(loss, logprobs_N) == pytest.approx([0.025, -0.05, 0.01])


def test_sapo_gates_smoothly() -> None:
    """4 / t sigmoid(t (ratio - 1)): 2 / t at ratio 1 with slope 1, and a slope that fades away from it."""
    tokens = view([1.0, 1.0, 3.0], [2.0, -2.0, 2.0])
    got = algorithm("sapo").surrogate(tokens)
    far = 4 / (1 + math.exp(-2))
    assert got.loss_N.tolist() == pytest.approx([-2 * 2, 2 * 2 / 1.05, -2 * far])
    slope = 4 * (1 / (1 + math.exp(-2))) * (1 / (1 + math.exp(2)))
    # d gate / d logprob = slope x ratio
    wanted = [-2.0, 2.0, -2 * slope * 3]
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx(wanted)


def test_gmpo_clips_logarithms_and_takes_their_mean() -> None:
    e = math.exp
    tokens = view(
        [e(0.6), e(-0.6), e(0.6), e(-0.6)], [1.0, 1.0, -1.0, -1.0], sequences=[0, 0, 1, 1]
    )
    got = algorithm("gmpo").surrogate(tokens)
    # a good token is held from above at 0.4, a bad one from below at -0.4
    good, bad = e((0.4 - 0.6) / 2), e((0.6 - 0.4) / 2)
    assert got.loss_N.tolist() == pytest.approx([-good, -good, bad, bad])
    assert got.clipped_N.tolist() == [True, False, False, True]
    half_N = got.loss_N / 2  # the mean over each response's equal losses
    assert gradient(half_N, tokens.logprobs_N) == pytest.approx([0, -good / 2, bad / 2, 0])


def test_dppo_masks_by_the_difference_of_probabilities() -> None:
    old = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.01], dtype=torch.float64)
    new = torch.tensor([0.9, 0.3, 0.3, 0.9, 0.10], dtype=torch.float64)
    tokens = TokenView(
        logprobs_N=new.log().requires_grad_(),
        anchor_N=old.log(),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64),
        sequence_N=torch.zeros(5, dtype=torch.int64),
        num_sequences=1,
    )
    got = algorithm("dppo").surrogate(tokens)
    assert got.clipped_N.tolist() == [True, False, True, False, False]  # 0.01 -> 0.1: a ratio of 10
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([0, -0.5, 0, 1.5, -10.0])


def test_dppo_weighs_a_ratio_above_20_as_20() -> None:
    """0.001 -> 0.05 is a ratio of 50, and within the bound: its gradient is bounded, not removed."""
    tokens = view([50.0, 50.0, 15.0], [1.0, -1.0, 1.0])
    tokens = replace(tokens, anchor_N=tokens.anchor_N - 6, logprobs_N=tokens.logprobs_N - 6)
    got = algorithm("dppo").surrogate(tokens)
    assert got.loss_N.tolist() == pytest.approx([-20.0, 20.0, -15.0])
    assert got.clipped_N.tolist() == [True, True, False]
    assert gradient(got.loss_N, tokens.logprobs_N) == pytest.approx([-20.0, 20.0, -15.0])
