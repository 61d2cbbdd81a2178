"""The losses of the protocol on numbers worked by hand, and payloads that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import UserError
from penstock.service import batches
from penstock.service.batches import LOSSES, Examples
from penstock.store.wire import FLOAT32, INT64

LOGPROBS = torch.tensor([-1.0, -2.0], dtype=torch.float64)
INPUTS = {
    "weights": torch.tensor([1.0, -0.5], dtype=torch.float64),
    "logprobs": torch.tensor([-1.5, -1.0], dtype=torch.float64),
    "advantages": torch.tensor([2.0, -1.0], dtype=torch.float64),
}
UP, DOWN = np.exp(0.5), np.exp(-1.0)  # the two ratios


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cross_entropy", [1.0, -1.0]),
        ("importance_sampling", [-2 * UP, DOWN]),
        ("ppo", [-2 * 1.2, 0.8]),
        ("cispo", [1.2 * 2.0, 0.8 * -2.0]),
        ("dro", [-(-2.0 - 0.025 * 0.25), -(2.0 - 0.025 * 1.0)]),
    ],
)
def test_losses_of_two_tokens(name: str, wanted: list[float]) -> None:
    loss = LOSSES[name]
    got = loss.of_tokens(LOGPROBS, INPUTS, loss.settings)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12)


def test_a_clipped_token_of_ppo_has_no_gradient_and_one_of_cispo_has() -> None:
    for name, wanted in (("ppo", 0.0), ("cispo", -1.2 * 2.0)):
        logprobs = LOGPROBS.clone().requires_grad_()
        loss = LOSSES[name]
        loss.of_tokens(logprobs, INPUTS, loss.settings).sum().backward()
        assert logprobs.grad is not None
        assert float(logprobs.grad[0]) == pytest.approx(wanted)


def tensor(values: Any, dtype: int = FLOAT32) -> dict[str, Any]:
    array = np.array(values, "<f4" if dtype == FLOAT32 else "<i8")
    return {"dense": array.tobytes(), "dtype": dtype, "shape": list(array.shape)}


def request(loss: str = "cross_entropy", tokens: Any = (1, 2), **changes: Any) -> dict[str, Any]:
    inputs = {"target_tokens": tensor([2, 3], INT64), "weights": tensor([1.0, 1.0]), **changes}
    chunk = {"encoded_text": {"tokens": np.array(tokens, "<i4").tobytes()}}
    datum = {"model_input": [chunk], "loss_fn_inputs": {k: v for k, v in inputs.items() if v}}
    return {"data": [datum], "loss_fn": loss}


def parse(message: dict[str, Any]) -> Examples:
    return Examples.of(message, vocabulary=9, longest=4)


def test_several_targets_of_a_position_are_one_row() -> None:
    wide = tensor([[2, 3], [4, 0]], INT64)
    examples = parse(request(target_tokens=wide, weights=tensor([[1.0, 0.5], [1.0, 0.0]])))
    assert examples.width == 2
    assert examples.rows.predictors[0].tolist() == [0, 0, 1, 1]
    assert examples.rows.targets_N.tolist() == [2, 3, 4, 0]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (request("reinforce"), "loss_fn: got 'reinforce', allowed: cross_entropy"),
        (request("ppo"), "data[0]: got no logprobs"),
        (request(weights=None), "data[0]: got no weights"),
        (request(weights=tensor([1.0])), "data[0].weights: got shape [1]"),
        (request(weights=tensor([1.0, np.nan])), "data[0].weights: got NaN"),
        (request(tokens=()), "data[0].model_input: got 0 tokens"),
        (request(tokens=(1, 2, 3, 4, 5)), "data[0].model_input: got 5 tokens, allowed: 1 to 4"),
        (request(tokens=(1, 9)), "data[0].model_input: got token ids from 1 to 9, allowed: 0 to 8"),
        (request(target_tokens=tensor([2, -1], INT64)), "data[0].target_tokens: got token ids"),
        (request(weights={"dense": b"abc", "dtype": FLOAT32}), "data[0].weights: got 3 bytes"),
        (request(weights={"dense": b"abcd", "dtype": 9}), "data[0].weights: got another dtype"),
        ({"loss_fn": "dro"}, "data: got no datum"),
        ({**request(), "loss_fn_config": {"beta": 1.0}}, "loss_fn_config: got beta=1.0"),
        (
            {"data": [{"model_input": [{"image": {}}]}], "loss_fn": "dro"},
            "data[0]: got a chunk that is no text",
        ),
    ],
)
def test_a_payload_that_does_not_fit_is_named(message: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(message)
    assert says in str(caught.value)


def sparse(tokens: int, width: int, dtype: int) -> dict[str, Any]:
    """A wide tensor of zeros in a few bytes."""
    rows = {"values": b"", "crow_indices": bytes(8 * (tokens + 1)), "col_indices": b""}
    return {"sparse_csr": rows, "dtype": dtype, "shape": [tokens, width]}


def test_a_small_request_takes_no_large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_MOST_VALUES", 8)
    for width in (5, 2):  # too many in one tensor, and in two datums
        targets, weights = sparse(2, width, INT64), sparse(2, width, FLOAT32)
        message = request(target_tokens=targets, weights=weights)
        message["data"] *= 2
        with pytest.raises(UserError, match=r"data\[[01]\]"):
            parse(message)


def test_thresholds_of_tokens_are_in_every_datum_or_in_none() -> None:
    inputs: dict[str, Any] = {
        "logprobs": tensor([0.0, 0.0]),
        "advantages": tensor([1.0, 1.0]),
        "weights": None,
    }
    message = request("ppo", **inputs)
    message["data"] += request("ppo", clip_low_threshold=tensor([0.5, 0.5]), **inputs)["data"]
    for missing in (0, 1):
        with pytest.raises(UserError, match=rf"data\[{missing}\]: got no clip_low_threshold"):
            parse(message)
        message["data"].reverse()
