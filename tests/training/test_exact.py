"""`model.arithmetic = "exact"`: the trainer's log-probs are the engine's, bit for bit, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from penstock.cli import app
from penstock.engine.transformers.cpu import invariance
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import UserError
from penstock.model.families import family_of
from penstock.training.exact import CpuArithmetic
from penstock.training.pack import make_pack
from penstock.training.policy import Policy
from stages import tiny_policy as tiny
from stages.decoder_cases import CASES, make_decoder
from stages.engine_case import run

QUICK = {"llama", "gemma 2", "gpt oss", "phi 4 mini", "qwen 3 moe"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[5, 6, 7], list(range(3, 20)), [9] * 17, [5, 6, 7], [8] * 17]
# a dynamic rotation changes only beyond the model's positions, where no request goes
FAMILIES = [case for case in CASES if case != "llama with dynamic"]


def made(case: str, device: str) -> Any:
    return make_decoder(case, torch.float32 if device == "cpu" else torch.bfloat16).to(device)


def exact_policy(case: str, device: str) -> Policy:
    policy = Policy(made(case, device), longest=60)
    if device == "cuda":  # as a trainer, whose layers are then computed once
        policy.add_gradients_to({id(p): nn.Parameter(p.float()) for p in policy.model.parameters()})
    policy.make_exact()
    return policy


def taken_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, which are dropped; each is its own or its master's."""
    found = {}
    for name, parameter in policy.model.named_parameters():
        owner = policy._masters.get(id(parameter), parameter)
        owner = parameter if owner.grad is None else owner
        assert owner.grad is not None, name
        found[name], owner.grad = owner.grad.double(), None
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in FAMILIES]
)
def test_a_packed_trainer_has_the_bits_of_an_engine_that_decoded_other_batches(
    case: str, device: str
) -> None:
    async def main() -> None:
        engine = TransformersEngine(
            lambda: made(case, device),
            fetch=tiny.fetch,
            options=TransformersOptions(
                max_slots=4, max_tokens_in_flight=1024, device=device, arithmetic="exact"
            ),
            text_of=tiny.text_of,
        )
        await engine.start()
        requests = [
            tiny.request(str(n), prompt, seed=n, max_tokens=20 + 2 * n)
            for n, prompt in enumerate(PROMPTS)
        ]
        answers = await engine.generate_many(requests)
        await engine.close()
        rows = [
            np.array([*prompt, *a.token_ids]) for prompt, a in zip(PROMPTS, answers, strict=True)
        ]
        predictors = [
            np.arange(len(p) - 1, len(row) - 1) for p, row in zip(PROMPTS, rows, strict=True)
        ]
        firsts = np.cumsum([0, *map(len, predictors)])
        policy = exact_policy(case, device)
        pack = make_pack(range(len(rows)), rows, predictors, firsts, torch.device(device))
        logprobs_N, _ = policy(pack, torch.ones(len(pack.target_N), device=device))
        sampled_N = np.concatenate([answer.logprobs for answer in answers])[pack.token_N]
        assert np.array_equal(
            logprobs_N.detach().cpu().numpy().view(np.int32), sampled_N.view(np.int32)
        )
        logprobs_N.sum().backward()
        exact = taken_gradients(policy)
        policy.exact = policy._kernels = None
        policy(pack, torch.ones(len(pack.target_N), device=device))[0].sum().backward()
        plain = taken_gradients(policy)
        gap = sum((exact[n] - g).square().sum() for n, g in plain.items())
        gap = gap / sum(g.square().sum() for g in plain.values())
        # in half precision a router may choose other experts
        assert gap.sqrt() < (1e-4 if device == "cpu" else 0.3)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["sampling.top_p=0.9", "sampling.min_tokens=4", "sampling.temperature=0.8"]]
)
def test_the_ratio_of_a_run_without_staleness_is_exactly_one(
    tmp_path: Path, words: list[str]
) -> None:
    command = ["train", "model.arithmetic=exact", "produce.strategy=sync", "train.steps=2"]
    command += ["launch.kind=inline", "train.groups_per_step=4"]
    result = CliRunner().invoke(app, [*command, f"run.dir={tmp_path}", "run.name=exact", *words])
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "exact" / "metrics.jsonl").read_text().splitlines()
    for line in lines:
        metrics = json.loads(line)
        assert metrics["mismatch/kl"] == 0
        assert metrics["ratio/mean"] == metrics["ratio/max"] == 1
    assert len(lines) == 2


def test_a_model_without_a_row_is_refused() -> None:
    policy = Policy(make_decoder("llama"))
    policy.family = None
    with pytest.raises(UserError, match=r"model\.arithmetic: got exact"):
        policy.make_exact()


def test_threads_of_the_trainer_do_not_change_how_the_engine_is_seen_to_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 896, "intermediate_size": 896, "num_hidden_layers": 1}
    monkeypatch.setitem(CASES, "wide", ("llama", sizes))
    model = make_decoder("wide")
    threads, quanta = torch.get_num_threads(), []
    try:
        for count in (1, 2):  # with 2, tried products would pass with fewer rows, or with none
            invariance._linear_is_invariant.cache_clear()
            torch.set_num_threads(count)
            quanta.append(CpuArithmetic(model, family_of(model.config)).quantum)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
        invariance._linear_is_invariant.cache_clear()
    assert quanta[0] == quanta[1]
