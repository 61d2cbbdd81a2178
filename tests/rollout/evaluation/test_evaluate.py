"""Evaluation is one exact pass: every problem once per sample, failures counted, figures right."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock.config import SamplingConfig
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import RunError
from penstock.inspection.summary import print_evaluations
from penstock.reward.protocol import Reward
from penstock.rollout.evaluation.evaluate import (
    EvalTask,
    append_summary,
    choose_problems,
    evaluate,
    interval,
    mean_pass_at,
    wilson,
)
from penstock.types import Prompt, Rollout, Score, VersionSegment


class ScriptedEngine:
    """Answers with the problem's number; the requests of every third problem fail."""

    def __init__(self, failing: bool, version: int = 2) -> None:
        self.asked: list[GenerationRequest] = []
        self._version = version
        self._failing = failing

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        self.asked += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerationRequest) -> Generation:
        failed = self._failing and int(request.prompt_ids[0]) % 3 == 2
        count = 0 if failed else 1
        return Generation(
            request_id=request.request_id,
            token_ids=request.prompt_ids[:count],
            logprobs=np.zeros(count, dtype=np.float32),
            segments=(VersionSegment(self._version, 1),) if count else (),
            finish_reason="error" if failed else "stop",
            error="engine died" if failed else "",
        )


class EvenIsRight(Reward):
    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        right = int(rollout.text) % 2 == 0
        return Score(float(right), format_ok=True, answer_ok=right)

    async def close(self) -> None: ...


def task(problems: int, generations: int) -> EvalTask:
    prompts = [
        Prompt(f"p:{i}", ({"role": "user", "content": str(i)},), np.array([i]), gt_answer=str(i))
        for i in range(problems)
    ]
    return EvalTask(
        name="even",
        problems=prompts,
        reward=EvenIsRight(),
        sampling=SamplingConfig(temperature=0.0, max_tokens=4),
        num_generations=generations,
        decode=lambda ids: str(int(ids[0])) if len(ids) else "",
        seed=7,
    )


def run(engine: ScriptedEngine, spec: EvalTask, folder: Path):
    return asyncio.run(evaluate(engine, spec, step=3, version=2, folder=folder))  # type: ignore[arg-type]


def test_every_problem_is_asked_exactly_once_per_sample_and_the_same_way_again(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine(failing=False)
    result = run(engine, task(5, 2), tmp_path)
    first = [(request.request_id, request.seed) for request in engine.asked]
    assert len(set(first)) == 10
    run(engine, task(5, 2), tmp_path)
    assert [(request.request_id, request.seed) for request in engine.asked[10:]] == first
    assert (result.accuracy, result.problems, result.samples) == (0.6, 5, 10)
    assert result.pass_at == {1: pytest.approx(0.6), 2: pytest.approx(0.6)}


def test_a_failed_request_is_a_wrong_answer_and_is_counted(tmp_path: Path) -> None:
    result = run(ScriptedEngine(failing=True), task(6, 1), tmp_path)
    # problems 2 and 5 fail; of 0, 1, 3, 4 the even ones are right
    assert (result.failures, result.accuracy) == (2, pytest.approx(2 / 6))
    assert result.format == pytest.approx(4 / 6)
    lines = [json.loads(t) for t in (tmp_path / "even-step-3.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert lines[2]["error"] == "engine: engine died"
    assert {
        "prompt",
        "prediction",
        "gold",
        "parsed",
        "format_valid",
        "ans_valid",
        "response_length",
    } <= set(lines[0])


class HalfOfAll(Reward):
    """A reward of a number: it judges no answer."""

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return Score(0.5)

    async def close(self) -> None: ...


def test_where_nothing_is_judged_there_is_no_accuracy(tmp_path: Path) -> None:
    unjudged = dataclasses.replace(task(3, 2), reward=HalfOfAll())
    for failing in (False, True):
        result = run(ScriptedEngine(failing=failing), unjudged, tmp_path)
        assert (result.accuracy, result.low, result.high, result.pass_at) == (None, None, None, {})
        assert result.format is None
        failed = {"eval/even/failed"} if failing else set()
        assert result.metrics().keys() == {"eval/even/reward", *failed}
    append_summary(tmp_path, result)
    console = Console(file=io.StringIO(), width=100)
    print_evaluations(console, [result])
    assert "0.000" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_samples_of_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"samples of versions .1., allowed: 2"):
        run(ScriptedEngine(failing=False, version=1), task(2, 1), tmp_path)


def test_pass_at_k_by_hand() -> None:
    # of 4 samples 1 right: pass@2 = 1 - C(3,2)/C(4,2) = 1 - 3/6; of 4 none: 0
    right = np.array([[True, False, False, False], [False] * 4])
    assert mean_pass_at(right, 2) == pytest.approx(0.25)
    assert mean_pass_at(right, 4) == pytest.approx(0.5)


def test_wilsons_interval_by_hand() -> None:
    low, high = wilson(0.5, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)


def test_the_interval_never_collapses_and_is_wilsons_for_verdicts() -> None:
    for shares in ([1.0] * 20, [0.0] * 20, [1.0] * 13 + [0.0] * 7):  # right or wrong as a whole
        for k in (1, 8):  # equal samples of one problem tell no more than one of them
            expected = wilson(float(np.mean(shares)), 20)
            assert interval(np.array(shares), k) == pytest.approx(expected)
    assert interval(np.ones(20), 8)[0] == pytest.approx(0.8389, abs=1e-4)
    low, high = interval(np.full(20, 0.5), 4)  # 20 problems, half of each one's samples right
    assert wilson(0.5, 20)[0] < low <= wilson(0.5, 80)[0] < 0.5 < high < 1.0
    assert interval(np.array([0.5]), 2)[0] > 0.0  # a single problem


@pytest.mark.parametrize(("share", "spread"), [(0.9, 0.5), (0.97, 0.3), (0.5, 0.01)])
def test_nineteen_of_twenty_intervals_hold_the_truth(share: float, spread: float) -> None:
    """Problems differ in difficulty (a beta distribution), each is asked 16 times."""
    generator = np.random.default_rng(0)
    inverse = (1 - spread) / spread
    held = 0
    for _ in range(400):
        chances = generator.beta(share * inverse, (1 - share) * inverse, 20)
        low, high = interval(generator.binomial(16, chances) / 16, 16)
        held += low <= share <= high
    assert held >= 0.94 * 400


def test_a_subset_of_the_problems_is_drawn_from_all_of_them() -> None:
    problems = task(100, 1).problems
    chosen = [problem.prompt_id for problem in choose_problems("even", problems, 20)]
    assert chosen == [problem.prompt_id for problem in choose_problems("even", problems, 20)]
    assert len(set(chosen)) == 20
    numbers = [int(name.partition(":")[2]) for name in chosen]
    assert numbers == sorted(numbers)
    assert sum(number >= 50 for number in numbers) >= 5  # a sorted file biases the first 20
    assert numbers != [int(p.prompt_id[2:]) for p in choose_problems("odd", problems, 20)]
    for everything in (0, 100, 1000):
        assert list(choose_problems("even", problems, everything)) == list(problems)


def test_summaries_are_appended(tmp_path: Path) -> None:
    result = run(ScriptedEngine(failing=False), task(2, 1), tmp_path)
    append_summary(tmp_path, result)
    append_summary(tmp_path, result)
    lines = (tmp_path / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line)["accuracy"] for line in lines] == [0.5, 0.5]
