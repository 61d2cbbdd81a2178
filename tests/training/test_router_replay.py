"""The trainer takes the experts that the engine took, and samples' distributions are those that were cut."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import UserError
from penstock.model import ops
from penstock.model.families import Experts
from penstock.model.ops import route
from penstock.training.model_check import check_model
from penstock.training.pack import Pack, make_pack
from penstock.training.policy import Policy
from penstock.types import Choices, ModelCall, Rollout
from stages.decoder_cases import make_decoder

CASES = ("qwen 3 moe", "gpt oss", "mixtral")
CPU = torch.device("cpu")
PROMPT = np.arange(3, 15, dtype=np.int32)
CUT = {"max_tokens": 8, "top_k": 9, "top_p": 0.9}


def tied_routers(model: Any, noise: float = 0.0) -> Any:
    """The model with routers that give all experts one score, moved by a little noise that decides who is chosen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp.gate." in name or ".mlp.router." in name:
                same = parameter[:1] if parameter.ndim > 1 else torch.zeros(1)
                noisy = torch.randn(parameter.shape, generator=generator) * noise
                parameter.copy_(same.expand_as(parameter) + noisy)
    return model


def generate(
    model: Any, *requests: GenerationRequest, rounds: int = 1, **options: Any
) -> list[Generation]:
    """The answers of an engine that records experts; later rounds find what earlier ones left in its cache."""

    async def run() -> list[Generation]:
        how = TransformersOptions(**{"max_slots": 4, "router_replay": True, **options})
        engine = TransformersEngine(lambda: copy.deepcopy(model), fetch=lambda _: [], options=how)
        await engine.start()
        try:
            for _ in range(rounds):
                made = await engine.generate_many(list(requests))
            return made
        finally:
            await engine.close()

    return asyncio.run(run())


def request(seed: int, prompt: np.ndarray = PROMPT, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": 8, **fields.pop("sampling", {})})
    return GenerationRequest(str(seed), prompt, sampling, seed, **fields)


def packed(requests: list[GenerationRequest], made: list[Generation], *, replays: bool) -> Pack:
    rows = [
        np.concatenate([r.prompt_ids, m.token_ids]) for r, m in zip(requests, made, strict=True)
    ]
    predictors = [
        np.arange(len(r.prompt_ids) - 1, len(ids) - 1)
        for r, ids in zip(requests, rows, strict=True)
    ]
    first = np.cumsum([0, *map(len, predictors)])
    choices = [generation.choices for generation in made]
    numbers = range(len(rows))
    return make_pack(numbers, rows, predictors, first, CPU, None, choices, replays=replays)


def scores(model: Any, pack: Pack, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    policy = Policy(model.to(dtype), longest=80)
    logprobs_N, _ = policy(pack, torch.ones(len(pack.target_N), dtype=dtype))
    ordered: torch.Tensor = logprobs_N[np.argsort(pack.token_N)]
    return ordered


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES)
def test_the_engines_experts_give_the_engines_log_probs(case: str, device: str) -> None:
    """Routers whose scores are tied choose other experts after noise that changes no weight beyond rounding."""
    requests = [request(seed, sampling=CUT) for seed in range(4)]
    model = tied_routers(make_decoder(case), 1e-5)
    made = generate(model.to(device), *requests, rounds=2, device=device)
    wanted = torch.from_numpy(np.concatenate([generation.logprobs for generation in made]))
    other = tied_routers(make_decoder(case), -1e-5)
    taken = scores(copy.deepcopy(other), packed(requests, made, replays=True))
    torch.testing.assert_close(taken, wanted, rtol=0, atol=1e-3 if device == "cuda" else 2e-4)
    own = scores(other, packed(requests, made, replays=False))
    assert (own - wanted).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_nearly_tied_experts_are_no_fault_of_a_model(case: str) -> None:
    """Rounding decides between scores that differ by 1e-8, in the check of the engine and in the trainer's."""
    model = tied_routers(make_decoder(case), 1e-8)
    generate(model, request(0))
    policy = Policy(model, longest=80)
    check_model(policy, case)
    assert policy.packs


def test_other_experts_than_the_best_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs at the unchanged model's experts are right: the scores of the chosen ones are not."""

    def route_worst(row: Experts, logits: torch.Tensor, choose: Any) -> Any:
        return route(row, logits, lambda own: choose((own + 2) % 4))

    monkeypatch.setattr(ops, "route", route_worst)
    with pytest.raises(UserError, match=r"or the scores of its experts differ by [0-9.]+"):
        generate(make_decoder("qwen 3 moe"), request(0))


def test_the_gradient_of_the_routers_is_that_of_their_weights_at_these_experts() -> None:
    """Central differences in float64, with experts that the router itself would not choose."""
    requests = [request(seed) for seed in range(2)]
    made = generate(make_decoder("qwen 3 moe"), *requests)
    for generation in made:
        assert generation.choices is not None
        generation.choices.experts[:] = np.where(
            generation.choices.experts, generation.choices.experts % 4 + 1, 0
        )
    pack = packed(requests, made, replays=True)
    model = make_decoder("qwen 3 moe").to(torch.float64)
    routers = [(n, p) for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")]
    scores(model, pack, torch.float64).sum().backward()
    for _, weight in routers[:2]:
        assert weight.grad is not None
        row, column = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
        found = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[row, column] += step
                found.append(float(scores(model, pack, torch.float64).sum()))
                weight[row, column] -= step
        slope = (found[0] - found[1]) / 2e-6
        assert abs(slope) > 1e-3
        assert float(weight.grad[row, column]) == pytest.approx(slope, rel=1e-4)


def test_weights_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    third_and_first = torch.tensor([[2, 0]])
    for renormalises, wanted in ((True, [2 / 7, 5 / 7]), (False, [0.2, 0.5])):
        row = Experts(router="gate", count=2, renormalises=renormalises)
        weights, experts = route(row, logits, lambda own: third_and_first)
        assert experts is third_and_first
        assert weights[0].tolist() == pytest.approx(wanted)
        assert route(row, logits, lambda own: own)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"max_tokens_in_flight": 44}]
)
def test_a_response_in_parts_has_the_choices_of_a_whole_one(options: dict[str, int]) -> None:
    """Continued from its tokens, sent back to the queue for want of memory, and as the context of a turn."""
    model = make_decoder("qwen 3 moe")
    wholes = generate(model, *(request(seed, sampling=CUT) for seed in range(3)), **options)
    for seed, whole in enumerate(wholes):
        rollout = Rollout(rollout_id="t:0.0", prompt_ids=PROMPT, seed=seed)
        for most in (3, 5, 8):
            more = {**CUT, "max_tokens": most}
            part = request(seed, sampling=more, response_ids=rollout.response_ids)
            (made,) = generate(model, part)
            rollout.append(made.token_ids, made.logprobs, made.segments, made.choices)
        assert_same(rollout.choices, whole.choices)
    assert whole.choices is not None
    longer = np.concatenate([PROMPT, whole.token_ids, PROMPT])
    (turn,) = generate(model, request(0, longer), rounds=2)
    assert turn.choices is not None
    assert len(turn.choices) == len(longer) + 7
    count = len(whole.choices)
    # a prompt's tokens but the last take no experts in the last layer: nothing of theirs is used there
    before = whole.choices.experts[:, :-2], turn.choices.experts[:count, :-2]
    assert np.array_equal(*before)
    assert before[0][:, [0, 1, 4, 5]].min() > 0  # the second layer is dense


def assert_same(one: Choices | None, other: Choices | None) -> None:
    assert one is not None
    assert other is not None
    assert one.num_kept.tolist() == other.num_kept.tolist()
    assert one.kept_ids.tolist() == other.kept_ids.tolist()
    assert one.experts.tolist() == other.experts.tolist()


def test_the_calls_of_an_agent_make_a_row_with_their_choices() -> None:
    from penstock.rollout.agent.tree import CallTree

    model = make_decoder("qwen 3 moe")
    (first,) = generate(model, request(1, sampling=CUT))
    whole = np.concatenate([PROMPT, first.token_ids])
    (second,) = generate(model, request(2, np.concatenate([whole, PROMPT[:3]]), sampling=CUT))
    assert first.choices is not None
    assert second.choices is not None
    calls = [
        call_of(0, None, PROMPT, replace(first)),
        call_of(1, 0, PROMPT[:3], replace(second, choices=second.choices[len(whole) - 1 :])),
    ]
    rollout = Rollout(rollout_id="t:0.0", prompt_ids=PROMPT, seed=1)
    CallTree(calls).fill(rollout)
    (row,) = rollout.row_choices()
    assert row is not None
    assert len(row) == len(whole) + 3 + len(second.token_ids) - 1
    assert_same(row[: len(first.choices)], first.choices)
    assert_same(row[len(whole) - 1 :], second.choices[len(whole) - 1 :])


def call_of(number: int, parent: int | None, context: np.ndarray, made: Generation) -> ModelCall:
    return ModelCall(
        number=number,
        parent=parent,
        context_ids=context,
        token_ids=made.token_ids,
        logprobs=made.logprobs,
        segments=made.segments,
        finish_reason="stop",
        messages=(),
        answer={},
        choices=made.choices,
    )


def test_rows_without_a_record_share_a_pack_with_rows_that_have_one() -> None:
    """The shared prompt takes the experts that are known; tokens of which none are known choose themselves."""
    requests = [request(seed) for seed in range(3)]
    made = generate(make_decoder("mixtral"), *requests)
    plain = [replace(made[0], choices=None), *made[1:]]
    pack = packed(requests, plain, replays=True)
    assert pack.experts_TN is not None
    known_T = pack.experts_TN.any(1)
    assert known_T[: len(PROMPT)].all()
    assert int(known_T.sum()) == len(PROMPT) + 2 * (len(made[0].token_ids) - 1)
    wanted = np.concatenate([generation.logprobs for generation in made])
    actual = scores(make_decoder("mixtral"), pack).detach().numpy()
    assert np.allclose(actual, wanted, atol=3e-5)
    other_model = [replace(m, choices=replace(m.choices, experts=m.choices.experts[:, :3])) for m in made if m.choices]  # fmt: skip
    actual = scores(make_decoder("mixtral"), packed(requests, other_model, replays=True))
    assert np.allclose(actual.detach().numpy(), wanted, atol=3e-5)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"router_replay: got true .* qwen3, which has no experts"):
        generate(make_decoder("qwen 3"), request(0))
