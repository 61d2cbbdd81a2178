"""Every decoder family on the trainer: log-probs and gradients of the eager model, in sequences beyond each window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import UserError
from penstock.model.decoder_check import check_decoder
from penstock.model.decoder_weights import ModuleProducts, read_weights
from penstock.training.model_check import check_model
from penstock.training.pack import make_pack
from penstock.training.policy import Policy
from stages.decoder_cases import CASES, LENGTH, make_decoder, make_image_model

CPU = torch.device("cpu")
QUICK = {"llama 3", "gemma 2", "gpt oss", "phi 4 mini", "qwen 3 moe", "olmo 3"}
CONTEXT = 5


def make(case: str) -> Any:
    return make_image_model() if case == "image" else make_decoder(case)


def sequences() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    rows = [generator.integers(3, 97, length) for length in (LENGTH, 13, 40, 13)]
    rows[3][:CONTEXT] = rows[1][:CONTEXT]  # a pack holds their context once
    return rows


def policy_logprobs(policy: Policy, rows: list[np.ndarray]) -> torch.Tensor:
    predictors = [np.arange(CONTEXT - 1, len(ids) - 1) for ids in rows]
    first = np.cumsum([0, *(len(index) for index in predictors)])
    pack = make_pack(range(len(rows)), rows, predictors, first, CPU)
    logprobs, _ = policy(pack, torch.ones(len(pack.target_N)))
    return logprobs[np.argsort(pack.token_N)]


def eager_logprobs(model: Any, rows: list[np.ndarray], filler: int) -> torch.Tensor:
    """The log-probs of each row alone; `filler` tokens after it make it as long as the run's sequences."""
    parts = []
    for ids in rows:
        ids_T = torch.from_numpy(ids)
        longer = torch.nn.functional.pad(ids_T, (0, filler), value=3)
        scores = model(longer[None], use_cache=False).logits[0, : len(ids)].log_softmax(-1)
        parts.append(scores[:-1].gather(1, ids_T[1:, None])[CONTEXT - 1 :, 0])
    return torch.cat(parts)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# a dynamic rotation changes only beyond the model's positions, where no sequence goes
TRAINED = [*(case for case in CASES if case != "llama with dynamic"), "image"]


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in TRAINED]
)
def test_log_probs_and_gradients_are_the_eager_models(case: str) -> None:
    plain, policy = make(case), Policy(make(case), longest=80)
    check_model(policy, case)
    assert policy.packs
    assert policy.decodes
    wanted = eager_logprobs(plain, sequences(), 40 if case == "phi 4 mini" else 0)
    actual = policy_logprobs(policy, sequences())
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5)
    wanted.square().sum().backward()
    actual.square().sum().backward()
    expected = gradients(plain)
    assert float((gradients(policy.model) - expected).norm() / expected.norm()) < 1e-5


def test_a_soft_cap_is_trained_where_fused_attention_would_drop_it() -> None:
    plain, model = make_decoder("gemma 2"), make_decoder("gemma 2")
    model.set_attn_implementation("sdpa")  # transformers' default, which has no cap
    policy = Policy(model)
    check_model(policy, "gemma 2")
    assert policy.packs
    with torch.no_grad():
        wanted = eager_logprobs(plain, sequences(), 0)
        torch.testing.assert_close(policy_logprobs(policy, sequences()), wanted, rtol=0, atol=1e-5)


def with_wider_windows(family: Any) -> Any:
    layers = tuple(
        replace(layer, window=layer.window and layer.window + 1) for layer in family.layers
    )
    return replace(family, layers=layers)


def test_a_wrong_window_is_refused_with_its_difference_if_the_run_can_reach_it() -> None:
    """The window has 12 tokens, more than the short sequences of the check."""
    policy = Policy(make_decoder("mistral"))
    policy.family = with_wider_windows(policy.family)
    weights = read_weights(policy.model, policy.family, ModuleProducts())
    check_decoder(policy.model, policy.family, weights, longest=12)
    with pytest.raises(UserError, match=r"differ by [0-9.e-]+ .* in a sequence of 24 tokens"):
        check_decoder(policy.model, policy.family, weights, longest=100)
    with pytest.raises(UserError, match=r"would miss by [0-9.e-]+ in a sequence of 24 tokens"):
        check_model(policy, "mistral")


def test_checkpointed_layers_give_the_same_gradient() -> None:
    policies = [Policy(make_decoder("qwen 3")) for _ in range(2)]
    policies[1].checkpoint_layers()
    for policy in policies:
        policy_logprobs(policy, sequences()).sum().backward()
    assert torch.equal(gradients(policies[0].model), gradients(policies[1].model))
