"""Evaluation: one exact pass over a fixed list of problems.

Without padding or duplicates: each problem is asked `num_generations` times with seeds that
depend on the problem alone. A failed request counts as a wrong answer and as a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.sampler import PromptSource, stable_hash
from penstock.engine.protocol import (
    Generation,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from penstock.errors import RunError
from penstock.files import write_whole
from penstock.reward.protocol import Reward
from penstock.rollout.evaluation.agents import KeptCalls, MakeAgent, call_line, play
from penstock.types import Prompt, Rollout, Score, Status

SUMMARY = "summary.jsonl"
_Z95 = 1.959963984540054


@dataclass(slots=True, frozen=True, kw_only=True)
class EvalTask:
    """The prompts, settings and reward of one evaluation."""

    name: str
    problems: Sequence[Prompt]
    reward: Reward
    sampling: SamplingParams
    num_generations: int
    decode: Callable[[np.ndarray], str]
    seed: int
    agent: MakeAgent | None = None  # None: one prompt, one response


@dataclass(slots=True, frozen=True, kw_only=True)
class EvalResult:
    """The outcome of one pass."""

    task: str
    step: int
    policy_version: int
    problems: int
    samples: int
    accuracy: float | None  # mean over problems of the share of right samples; None: not judged
    low: float | None  # 95 % confidence interval of the accuracy
    high: float | None
    pass_at: dict[int, float] = field(default_factory=dict)  # k -> unbiased pass@k
    reward: float | None = None  # None: every sample failed
    format: float = 0.0
    response_length: float = 0.0
    failures: int = 0  # samples without a verdict; each counts as wrong
    error: str = ""  # of the first failure
    turns: float | None = None  # of an agent: mean number of model calls of a rollout

    def metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.task}"
        failed = {f"{prefix}/failed": self.failures / self.samples} if self.failures else {}
        if self.reward is None:
            return failed
        named = {f"{prefix}/pass@{k}": value for k, value in self.pass_at.items() if k > 1}
        if self.accuracy is not None:
            named = {f"{prefix}/accuracy": self.accuracy, **named}
        if self.turns is not None:
            named[f"{prefix}/turns"] = self.turns
        return {**named, f"{prefix}/reward": self.reward, **failed}


def choose_problems(name: str, dataset: PromptSource, most: int) -> list[Prompt]:
    """Return at most `most` problems (0: all), drawn by the task's name alone, in the data's order.

    The run's seed has no part in the draw, so that runs of several seeds answer the same problems.
    """
    size = len(dataset)
    if not most or most >= size:
        return [dataset[index] for index in range(size)]
    order = np.random.default_rng(stable_hash("eval", name)).permutation(size)
    return [dataset[int(index)] for index in sorted(order[:most])]


class OtherWeights(RunError):
    """An evaluation got samples of other weights than those it evaluates."""


async def evaluate(
    engine: InferenceEngine, task: EvalTask, *, step: int, version: int, folder: Path
) -> EvalResult:
    """Ask every problem, score every answer, write the samples to `folder`, return the result."""
    requests = [
        _request(task, problem, index)
        for problem in task.problems
        for index in range(task.num_generations)
    ]
    owners = [problem for problem in task.problems for _ in range(task.num_generations)]
    calls: KeptCalls | None = None
    if task.agent is None:
        rollouts, scores = await _ask(engine, task, requests)
    else:
        rollouts = [
            _unplayed(request, problem, version)
            for request, problem in zip(requests, owners, strict=True)
        ]
        size = task.num_generations
        groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        calls = await play(task.agent, engine, groups)
        scores = [rollout.score or _no_score(rollout) for rollout in rollouts]
    _check_pinned(task, rollouts, version)
    path = folder / f"{task.name}-step-{step}.jsonl"
    _write_samples(path, owners, rollouts, scores, calls)
    return _summarise(task, rollouts, scores, step=step, version=version, calls=calls)


async def _ask(
    engine: InferenceEngine, task: EvalTask, requests: list[GenerationRequest]
) -> tuple[list[Rollout], list[Score]]:
    """Sample one response per request, and score it."""
    generations = await engine.generate_many(requests)
    rollouts = [
        _rollout(task, request, generation)
        for request, generation in zip(requests, generations, strict=True)
    ]
    size = task.num_generations
    columns = await asyncio.gather(
        *(
            _score_problem(task, rollouts[number * size : (number + 1) * size], problem)
            for number, problem in enumerate(task.problems)
        )
    )
    return rollouts, [score for column in columns for score in column]


def _unplayed(request: GenerationRequest, problem: Prompt, version: int) -> Rollout:
    """Return the rollout that an agent is to make."""
    return Rollout(
        rollout_id=request.request_id,
        prompt_ids=request.prompt_ids,
        seed=request.seed,
        temperature=request.sampling.temperature,
        issued_version=version,
        prompt=problem,
    )


def _check_pinned(task: EvalTask, rollouts: Sequence[Rollout], version: int) -> None:
    """Raise unless every sample was made by the weights of `version`."""
    others = {s.version for rollout in rollouts for s in rollout.segments} - {version}
    if others:
        raise OtherWeights(
            f"evaluation {task.name}: got samples of versions {sorted(others)}, allowed: {version}"
        )


def _request(task: EvalTask, problem: Prompt, index: int) -> GenerationRequest:
    identity = f"{task.seed}|{problem.prompt_id}|{index}".encode()
    seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest()) >> 1
    return GenerationRequest(
        request_id=f"eval:{task.name}:{problem.prompt_id}.{index}",
        prompt_ids=problem.token_ids,
        sampling=task.sampling,
        seed=seed,
    )


def _rollout(task: EvalTask, request: GenerationRequest, generation: Generation) -> Rollout:
    rollout = Rollout(
        rollout_id=request.request_id,
        prompt_ids=request.prompt_ids,
        seed=request.seed,
        temperature=request.sampling.temperature,
    )
    rollout.append(generation.token_ids, generation.logprobs, generation.segments)
    rollout.finish_reason = generation.finish_reason
    rollout.text = task.decode(rollout.response_ids)
    finished = generation.finish_reason in ("stop", "length")
    rollout.move_to(Status.COMPLETED if finished else Status.FAILED)
    rollout.error = generation.error if finished else generation.error or "aborted"
    return rollout


async def _score_problem(
    task: EvalTask, rollouts: Sequence[Rollout], problem: Prompt
) -> list[Score]:
    """Score the answers to one problem: together if the reward compares them, else one by one."""
    if not task.reward.needs_group:
        return await asyncio.gather(*(_score(task, rollout, problem) for rollout in rollouts))
    finished = [rollout for rollout in rollouts if rollout.status is not Status.FAILED]
    scores: dict[str, Score] = {}
    if finished:
        try:
            made = await task.reward.score_group(finished, [problem] * len(finished))
            scores = {r.rollout_id: score for r, score in zip(finished, made, strict=True)}
        except Exception as error:  # the edge of one group: a failure is counted, not fatal
            for rollout in finished:
                rollout.fail(f"reward: {type(error).__name__}: {error}")
    return [scores.get(rollout.rollout_id) or _no_score(rollout) for rollout in rollouts]


async def _score(task: EvalTask, rollout: Rollout, problem: Prompt) -> Score:
    if rollout.status is Status.FAILED:
        return _no_score(rollout)
    try:
        return await task.reward.score(rollout, problem)
    except Exception as error:  # the edge of one rollout: a failure is counted, not fatal
        rollout.fail(f"reward: {type(error).__name__}: {error}")
        return _no_score(rollout)


def _no_score(rollout: Rollout) -> Score:
    return Score(0.0, format_ok=False, answer_ok=False, note=f"failed: {rollout.error}")


def _summarise(
    task: EvalTask,
    rollouts: list[Rollout],
    scores: list[Score],
    *,
    step: int,
    version: int,
    calls: KeptCalls | None,
) -> EvalResult:
    k = task.num_generations
    failed = [rollout.status is Status.FAILED for rollout in rollouts]
    answered = [score for score, fails in zip(scores, failed, strict=True) if not fails]
    accuracy, low, high, pass_at = None, None, None, {}
    if any(score.answer_ok is not None for score in answered):
        right_GK = np.array([bool(score.answer_ok) for score in scores]).reshape(-1, k)
        accuracy, (low, high) = float(right_GK.mean()), interval(right_GK.mean(axis=1), k)
        pass_at = {n: mean_pass_at(right_GK, n) for n in _powers_up_to(k)}
    return EvalResult(
        task=task.name,
        step=step,
        policy_version=version,
        problems=len(task.problems),
        samples=len(rollouts),
        accuracy=accuracy,
        low=low,
        high=high,
        pass_at=pass_at,
        reward=float(np.mean([score.value for score in scores])) if answered else None,
        format=float(np.mean([score.format_ok is not False for score in scores])),
        response_length=float(np.mean([rollout.num_sampled for rollout in rollouts])),
        failures=sum(failed),
        error=next((r.error for r, fails in zip(rollouts, failed, strict=True) if fails), ""),
        turns=None if calls is None else sum(map(len, calls.of.values())) / len(rollouts),
    )


def _powers_up_to(k: int) -> list[int]:
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})


def mean_pass_at(right_GK: np.ndarray, k: int) -> float:
    """Unbiased pass@k: 1 - C(n-c, k) / C(n, k), averaged over problems."""
    n = right_GK.shape[1]
    values = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in right_GK.sum(axis=1)]
    return float(np.mean(values))


def interval(means_G: np.ndarray, k: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean share of right samples, clustered by problem.

    Wilson's interval for `count` independent trials. With one sample per problem `count` is the number
    of problems. More samples raise it, up to problems x k, as far as the shares vary less between
    problems than a right-or-wrong verdict does. Half of z^2 right and as many wrong problems are
    added to that comparison, so that equal shares give no interval of width zero.
    """
    extra = _Z95**2 / 2
    size = len(means_G) + 2 * extra
    centre = (means_G.sum() + extra) / size
    variance = np.square(means_G - centre).sum() + extra * ((1 - centre) ** 2 + centre**2)
    verdict = centre * (1 - centre) * size
    count = min(len(means_G) * verdict / variance, len(means_G) * k)
    return wilson(float(means_G.mean()), count)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share of `count` independent yes/no trials."""
    spread = _Z95**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _write_samples(
    path: Path,
    problems: list[Prompt],
    rollouts: list[Rollout],
    scores: list[Score],
    calls: KeptCalls | None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem, rollout, score in zip(problems, rollouts, scores, strict=True):
            line = {
                "prompt_id": problem.prompt_id,
                "prompt": list(problem.messages),
                "prediction": rollout.text,
                "gold": problem.gt_answer,
                "parsed": score.parsed,
                "test_results": list(score.tests) or None,
                "note": score.note,
                "format_valid": score.format_ok,
                "ans_valid": score.answer_ok,
                "response_length": rollout.num_sampled,
                "reward": score.value,
                "finish_reason": rollout.finish_reason,
                "temperature": rollout.temperature,
                "policy_version": rollout.segments[0].version if rollout.segments else None,
                "error": rollout.error,
            }
            if calls is not None:
                line["calls"] = [call_line(call) for call in calls.of.get(rollout.rollout_id, [])]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def append_summary(folder: Path, result: EvalResult) -> None:
    """Append one evaluation to eval/summary.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SUMMARY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def restore_summaries(folder: Path, last_step: int) -> None:
    """Remove a torn line and lines of lost steps, before a run continues."""
    path = folder / SUMMARY
    if path.is_file():
        lines = [json.dumps(line) for line in _summaries(folder) if line["step"] <= last_step]
        write_whole(path, "".join(f"{line}\n" for line in lines))


def not_evaluated(tasks: Sequence[EvalTask], folder: Path, step: int) -> list[EvalTask]:
    """Return the tasks without a result for that step, for a resumed run."""
    done = {line["task"] for line in _summaries(folder) if line["step"] == step}
    return [task for task in tasks if task.name not in done]


def _summaries(folder: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    path = folder / SUMMARY
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and {"task", "step"} <= line.keys()]
