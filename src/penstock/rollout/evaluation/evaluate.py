"""Evaluation: one exact pass over a fixed list of problems.

Without padding or duplicates: each problem is a group of `num_generations` rollouts with seeds that depend
on the problem alone, generated and scored by an agent loop as in training. A rollout that fails is made
again a few times; what still fails counts as a wrong answer and as a failure. Nothing is journalled: an
evaluation that is interrupted begins again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.config import SamplingConfig
from penstock.data.sampler import PromptSource, stable_hash
from penstock.engine.protocol import InferenceEngine
from penstock.errors import RunError, UserError
from penstock.files import read_rows, write_whole
from penstock.reward.protocol import Reward
from penstock.rollout.agent.function import FunctionAgent
from penstock.rollout.agent.session import KeptCalls
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.agent_loop import AgentLoop
from penstock.types import Prompt, Rollout, Score, Status
from penstock.waits import WaitKind, Waits

SUMMARY = "summary.jsonl"
TRIES = 3  # of a rollout that fails
_MOST_AT_ONCE = 1024  # rollouts
_Z95 = 1.959963984540054

MakeAgent = Callable[..., AgentLoop]  # of an engine, and a recorder that keeps the calls


@dataclass(slots=True, frozen=True, kw_only=True)
class EvalTask:
    """The prompts, settings and reward of one evaluation."""

    name: str
    problems: Sequence[Prompt]
    reward: Reward
    sampling: SamplingConfig
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
    format: float | None = None  # share of the samples in the right form; None: not judged
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
    """At most `most` problems (0: all), drawn by the task's name alone, in the data's order.

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
    groups = [
        [_rollout(task, problem, index, version) for index in range(task.num_generations)]
        for problem in task.problems
    ]
    calls = await _play(task, engine, groups)
    rollouts = [rollout for group in groups for rollout in group]
    scores = [
        rollout.score
        or Score(0.0, format_ok=False, answer_ok=False, note=f"failed: {rollout.error}")
        for rollout in rollouts
    ]
    others = {s.version for rollout in rollouts for s in rollout.segments} - {version}
    if others:
        raise OtherWeights(
            f"evaluation {task.name}: got samples of versions {sorted(others)}, allowed: {version}"
        )
    path = folder / f"{task.name}-step-{step}.jsonl"
    _write_samples(path, rollouts, scores, calls)
    k = task.num_generations
    failed = [rollout.status is Status.FAILED for rollout in rollouts]
    answered = [score for score, fails in zip(scores, failed, strict=True) if not fails]
    accuracy, low, high, pass_at, in_form = None, None, None, {}, None
    if any(score.format_ok is not None for score in answered):
        in_form = float(np.mean([score.format_ok is not False for score in scores]))
    if any(score.answer_ok is not None for score in answered):
        right_GK = np.array([bool(score.answer_ok) for score in scores]).reshape(-1, k)
        accuracy, (low, high) = float(right_GK.mean()), interval(right_GK.mean(axis=1), k)
        pass_at = {
            n: mean_pass_at(right_GK, n)
            for n in {*(2**power for power in range(k.bit_length())), k}
        }
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
        format=in_form,
        response_length=float(np.mean([rollout.num_sampled for rollout in rollouts])),
        failures=sum(failed),
        error=next((r.error for r, fails in zip(rollouts, failed, strict=True) if fails), ""),
        turns=None if calls is None else sum(map(len, calls.calls.values())) / len(rollouts),
    )


def _rollout(task: EvalTask, problem: Prompt, index: int, version: int) -> Rollout:
    identity = f"{task.seed}|{problem.prompt_id}|{index}".encode()
    return Rollout(
        rollout_id=f"eval:{task.name}:{problem.prompt_id}.{index}",
        prompt_ids=problem.token_ids,
        seed=int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest()) >> 1,
        temperature=task.sampling.temperature,
        issued_version=version,
        prompt=problem,
    )


async def _play(
    task: EvalTask, engine: InferenceEngine, groups: Sequence[list[Rollout]]
) -> KeptCalls | None:
    """Make every rollout; each ends COMPLETED with its score, or FAILED. Raise if the engine died.

    Return the calls of an agent; None: each rollout is one response.
    """
    calls = KeptCalls()
    agent: Any
    if task.agent is not None:
        agent = task.agent(engine=engine, recorder=calls)
    else:
        agent = SingleTurn(
            engine=engine,
            reward=task.reward,
            sampling=task.sampling,
            decode=task.decode,
        )
    running = asyncio.Semaphore(max(1, _MOST_AT_ONCE // task.num_generations))

    async def play(group: list[Rollout]) -> None:
        async with running:
            await _play_group(agent, calls, group)

    try:
        async with asyncio.TaskGroup() as tasks:
            _ = [tasks.create_task(play(group)) for group in groups]
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    finally:
        if isinstance(agent, FunctionAgent):
            await agent.close()
    return None if task.agent is None else calls


async def _play_group(agent: AgentLoop, calls: KeptCalls, group: list[Rollout]) -> None:
    for _ in range(TRIES):
        for rollout in group:
            if rollout.status is Status.FAILED:
                calls.calls.pop(rollout.rollout_id, None)
                rollout.restart()
        await agent.generate_group(group)
        if all(rollout.status is Status.COMPLETED for rollout in group):
            return
    for rollout in group:
        if rollout.status is not Status.COMPLETED and rollout.status is not Status.FAILED:
            rollout.fail(f"the agent loop left it {rollout.status}")


def mean_pass_at(right_GK: np.ndarray, k: int) -> float:
    """Unbiased pass@k: 1 - C(n-c, k) / C(n, k), averaged over problems."""
    n = right_GK.shape[1]
    values = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in right_GK.sum(axis=1)]
    return float(np.mean(values))


def interval(means_G: np.ndarray, k: int) -> tuple[float, float]:
    """The 95 % interval of the mean share of right samples, clustered by problem.

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
    return wilson(float(means_G.mean()), float(count))


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95 % Wilson interval of a share of `count` independent yes/no trials."""
    spread = _Z95**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _write_samples(
    path: Path, rollouts: list[Rollout], scores: list[Score], calls: KeptCalls | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for rollout, score in zip(rollouts, scores, strict=True):
            problem = cast(Prompt, rollout.prompt)
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
                line["calls"] = [
                    {
                        "number": call.number,
                        "parent": call.parent,
                        "messages": list(call.messages),
                        "answer": call.answer,
                        "finish_reason": call.finish_reason,
                        "tokens": len(call.token_ids),
                    }
                    for call in calls.calls.get(rollout.rollout_id, [])
                ]
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
        lines = [json.dumps(line) for line in read_summaries(folder) if line["step"] <= last_step]
        write_whole(path, "".join(f"{line}\n" for line in lines))


def read_scores(folder: Path) -> dict[str, dict[int, float]]:
    """The held-out scores by step: of TASK/accuracy and TASK/reward; a repeated evaluation counts last."""
    scores: dict[str, dict[int, float]] = {}
    for line in sorted(read_summaries(folder), key=lambda line: line["step"]):
        for measure in ("accuracy", "reward"):
            if isinstance(value := line.get(measure), int | float):
                scores.setdefault(f"{line['task']}/{measure}", {})[line["step"]] = float(value)
    return scores


def best_step(scores: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Of these steps the one with the highest score, the latest of equal ones; None: none has a score."""
    return max(
        (step for step in steps if step in scores), key=lambda s: (scores[s], s), default=None
    )


def best_or_pending(
    folder: Path, measure: str, steps: Collection[int], *, every_steps: int
) -> set[int]:
    """Of these steps the one with the best score, and those whose evaluation is not done; none without a measure.

    every_steps: updates between evaluations; 0: only the end is evaluated, whose checkpoint is the newest.
    """
    if not measure:
        return set()
    scores = read_scores(folder).get(measure, {})
    task = measure.rpartition("/")[0]  # an evaluation that failed is done, and has no score
    done = [line["step"] for line in read_summaries(folder) if line["task"] == task]
    newest = max(done, default=0)
    pending = {step for step in steps if every_steps and step > newest and not step % every_steps}
    best = best_step(scores, steps)
    return pending if best is None else pending | {best}


def read_summaries(folder: Path) -> list[dict[str, Any]]:
    """The lines of eval/summary.jsonl: task, step, accuracy, low, high, reward; none without the file."""
    path = folder / SUMMARY
    rows = read_rows(path)[0] if path.is_file() else []
    return [row for row in rows if {"task", "step"} <= row.keys()]


_ATTEMPTS = 3  # tries of an evaluation that gets samples of other weights


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Consumes steps to evaluate, produces sample files and result lines, in the background of training.

    The loop lets the next weights, and the next evaluation, wait for the one before.
    """

    tasks: Sequence[EvalTask]
    folder: Path
    engine: InferenceEngine | None  # None only without tasks
    waits: Waits
    log: Callable[[int, dict[str, float]], None]
    note: Callable[[str], None]
    used: Collection[str] = ()  # scores that other settings name, such as heldout/accuracy

    async def evaluate(self, step: int, after: Sequence[asyncio.Task[None]]) -> None:
        """Evaluate the weights of `step` once `after` has loaded them, and ended earlier evaluations."""
        for task in after:
            await task
        for left in reversed(range(_ATTEMPTS)):
            try:
                done = {
                    line["task"] for line in read_summaries(self.folder) if line["step"] == step
                }
                for evaluated in [task for task in self.tasks if task.name not in done]:
                    await self._one(evaluated, step)
                return
            except OtherWeights:  # an engine was restarted, and has newer weights now
                if not left:
                    raise

    async def _one(self, task: EvalTask, step: int) -> None:
        engine = self.engine
        assert engine is not None
        with self.waits.wait("eval", WaitKind.EVAL, f"{task.name} after step {step}"):
            version = (await engine.stats()).policy_version
            result = await evaluate(engine, task, step=step, version=version, folder=self.folder)
        append_summary(self.folder, result)
        awaited = f"{task.name}/accuracy" in self.used
        if awaited and result.accuracy is None and result.reward is not None:
            raise UserError(
                f"checkpoint.keep_best, train.stop_when: got '{task.name}/accuracy', but the rewards of "
                f"eval.tasks.{task.name} do not say whether an answer is right, allowed: {task.name}/reward"
            )
        if result.failures:
            counted = f"{result.failures} of {result.samples} samples failed and count as wrong"
            self.note(
                f"warning: evaluation {task.name} after step {step}: {counted}: {result.error}"
            )
        self.log(step, result.metrics())
