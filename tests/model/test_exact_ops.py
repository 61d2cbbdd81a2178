"""The steps of an exact trainer on a GPU, or by Triton's interpreter: near the plain values, with the plain gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from model.test_train_ops import CASES, assert_gradients, cut_layers, decoder, gradients, run_pack
from stages.plain_flash import use_plain_flash

pytestmark = pytest.mark.gpu(stand_in=True)
pytest.importorskip("triton")
from penstock.model.kernels import exact_ops  # noqa: E402
from penstock.training.exact import CudaArithmetic, ExactForward  # noqa: E402
from penstock.training.policy import Policy  # noqa: E402

QUICK = {"olmo 2"}
WITHOUT_STEPS = {"gemma 2", "gpt oss", "mixtral", "qwen 3 moe", "qwen 3 moe, renormalised"}
WITHOUT_STEPS |= {"llama with dynamic", "llama with gelu"}


def exact_policy(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Policy, dict[int, nn.Parameter]]:
    """A policy that computes as on a GPU with model.arithmetic = "exact", and the masters of its parameters."""
    monkeypatch.setattr(exact_ops, "can_use_flash", lambda *_: True)
    monkeypatch.setattr(exact_ops, "flash_aligns_ends", lambda _: True)
    policy = Policy(decoder(case), longest=80)
    assert policy.family is not None
    masters = {id(p): nn.Parameter(p.detach().clone()) for p in policy.model.parameters()}
    how = CudaArithmetic(policy.model, policy.family)
    policy.exact = ExactForward(policy.model, policy.family, how)
    table = policy.exact.table(masters)
    assert (table is None) == (case in WITHOUT_STEPS)
    if table is not None:
        policy._table = lambda: table  # type: ignore[method-assign]
    return policy, masters


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        pytest.param(case, shared, marks=[] if case in QUICK and shared else [pytest.mark.slow])
        for case in CASES
        if case not in WITHOUT_STEPS
        for shared in (True, False)
    ],
)
def test_values_are_near_and_gradients_those_of_plain_torch(
    case: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_plain_flash(monkeypatch)
    plain = Policy(decoder(case), longest=80)
    policy, masters = exact_policy(case, monkeypatch)
    cut_layers(plain, policy)
    wanted, actual = run_pack(plain, shared=shared), run_pack(policy, shared=shared)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=3e-5)
    for logprobs in (wanted, actual):
        logprobs.square().sum().backward()
    assert_gradients(gradients(policy, masters), gradients(plain, {}))


@pytest.mark.parametrize(
    "case",
    [
        "qwen 3 moe",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("gemma 2", "llama with gelu")),
    ],
)
def test_a_family_with_other_parts_is_computed_twice(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, (policy, _) = Policy(decoder(case), longest=80), exact_policy(case, monkeypatch)
    cut_layers(plain, policy)
    torch.testing.assert_close(run_pack(policy), run_pack(plain), rtol=0, atol=3e-5)


def test_a_row_of_a_pack_sees_its_context_and_what_comes_before_it() -> None:
    from penstock.training.pack import make_pack

    rows = [np.arange(7), np.array([0, 1, 2, 9, 9])]
    predictors = [np.arange(3, 6), np.arange(2, 4)]
    pack = make_pack([0, 1], rows, predictors, [0, 3, 5], torch.device("cpu"))
    step = exact_ops.RegionsOfPack(exact_ops.PackedStep(pack.layout), {None: None})
    seen = [pack.position_ids_T.tolist(), (step.length_T - 1).tolist()]
    assert seen[0] == seen[1]
