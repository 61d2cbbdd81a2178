"""The same prompts answered twice, by two runs or early and late in one: which is better, by how much, how surely.

`penstock compare A B` pairs the problems of the newest evaluations; where the runs have no evaluation in
common, the newest trained group of each prompt. The dashboard and the report also compare the first with the
last evaluation of one run. The interval is that of the mean difference over pairs, which leaves out how hard
the prompts are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.config.changes import differing
from penstock.errors import UserError
from penstock.files import read_rows
from penstock.inspection.track.console import fact_table
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

TRAINING = "training prompts"
_Z95 = 1.959963984540054
_SAMPLES = re.compile(r"(?P<task>.+)-step-(?P<step>\d+)\.jsonl")
_FEW, _MANY = 2, 50  # examples of each kind: of two runs, of one run
_PROMPTS_TRAINED_TWICE = 200
_CHARACTERS = 300


@dataclass(slots=True, frozen=True, kw_only=True)
class Answered:
    """The answer to one prompt."""

    prompt: str
    response: str
    score: float  # the mean over the responses
    step: int  # the step before the evaluation, or that trained the response


Answers = dict[str, Answered]  # by the prompt's id


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Two sets of answers, on the prompts that both hold."""

    task: str
    measure: str  # accuracy | reward
    steps: tuple[int, int]  # of the evaluations; 0, 0: trained groups
    pairs: int
    first: float  # mean score of A
    second: float  # mean score of B
    difference: float  # B - A
    low: float  # 95 % interval of the difference
    high: float
    first_wins: int
    second_wins: int
    # the largest differences: where B wins, where A wins, then equal ones
    examples: list[tuple[Answered, Answered]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "B is better"
        return "A is better" if self.high < 0 else "no difference is shown"


def compare(a: RunFolder, b: RunFolder) -> list[Comparison]:
    """A comparison for each evaluation task that both runs have; else one of training prompts."""
    files_a, files_b = evaluations(a), evaluations(b)
    results = []
    for task in sorted(files_a.keys() & files_b.keys()):
        results += _compare_evaluations(task, files_a[task][-1], files_b[task][-1], _FEW, 0)
    results = results or _pair(TRAINING, "reward", (0, 0), _trained(a), _trained(b), _FEW, 0)
    if not results:
        raise UserError(
            f"compare: {a.name} and {b.name} have no prompt in common, allowed: runs with the same "
            "evaluation or training data"
        )
    return results


def first_and_last(folder: RunFolder) -> list[Comparison]:
    """The first against the last evaluation of each task, and prompts that were trained more than once."""
    results = []
    for task, files in sorted(evaluations(folder).items()):
        if len(files) > 1:
            results += _compare_evaluations(task, files[0], files[-1], _MANY, _MANY)
    first, last = _trained_twice(folder)
    return results + _pair(TRAINING, "reward", (0, 0), first, last, _MANY, _MANY)


def _compare_evaluations(
    task: str, a: tuple[int, Path], b: tuple[int, Path], most: int, most_equal: int
) -> list[Comparison]:
    (step_a, path_a), (step_b, path_b) = a, b
    rows_a, rows_b = read_samples(path_a), read_samples(path_b)
    judged = all(row.get("ans_valid") is not None for row in (*rows_a, *rows_b))
    answers_a, answers_b = _answers(rows_a, judged, step_a), _answers(rows_b, judged, step_b)
    measure = "accuracy" if judged else "reward"
    return _pair(task, measure, (step_a, step_b), answers_a, answers_b, most, most_equal)


def evaluations(folder: RunFolder) -> dict[str, list[tuple[int, Path]]]:
    """The samples of each task's evaluations with their step, the oldest first."""
    by_task: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.evaluations.glob("*.jsonl"):
        if match := _SAMPLES.fullmatch(path.name):
            by_task.setdefault(match["task"], []).append((int(match["step"]), path))
    return {task: sorted(files) for task, files in by_task.items()}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The scored lines of an evaluation; damaged ones are left out."""
    return [row for row in read_rows(path)[0] if isinstance(row.get("reward"), int | float)]


def _answers(rows: Sequence[dict[str, Any]], judged: bool, step: int) -> Answers:
    """The first response to each prompt of an evaluation, with the mean score of all responses."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(str(row.get("prompt_id")), []).append(row)
    answers = {}
    for prompt_id, responses in by_prompt.items():
        messages = responses[0].get("prompt")
        prompt = messages[-1].get("content", "") if isinstance(messages, list) and messages else ""
        answers[prompt_id] = Answered(
            prompt=str(prompt),
            response=str(responses[0].get("prediction", "")),
            score=fmean(float(row["ans_valid" if judged else "reward"]) for row in responses),
            step=step,
        )
    return answers


def _trained(folder: RunFolder) -> Answers:
    """The newest trained group of every prompt."""
    if not folder.journal.is_file():
        return {}
    with closing(Journal.look(folder.journal)) as journal:
        rows = journal.query(
            "SELECT g.prompt_id, g.reward, r.text, g.step FROM groups g JOIN rollouts r USING(group_id)"
            " WHERE g.state = 'trained' AND r.number = 0 AND g.reward IS NOT NULL ORDER BY g.step"
        )
    return {
        str(prompt_id): Answered(
            prompt=str(prompt_id), response=text or "", score=float(reward), step=step
        )
        for prompt_id, reward, text, step in rows
    }


def _trained_twice(folder: RunFolder) -> tuple[Answers, Answers]:
    """The first and the last group of every prompt that more than one step trained."""
    first, last = Answers(), Answers()
    if not folder.journal.is_file():
        return first, last
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        rows = journal.query(
            "SELECT task, prompt_id, MIN(step), MAX(step) FROM groups WHERE state = 'trained' GROUP BY"
            " task, prompt_id HAVING MIN(step) < MAX(step) ORDER BY 4 DESC LIMIT ?",
            (_PROMPTS_TRAINED_TWICE,),
        )
        for task, prompt_id, first_step, last_step in rows:
            first[f"{task} {prompt_id}"] = _trained_in(journal, task, prompt_id, first_step)
            last[f"{task} {prompt_id}"] = _trained_in(journal, task, prompt_id, last_step)
    return first, last


def _trained_in(journal: Journal, task: str, prompt_id: str, step: int) -> Answered:
    group_id, reward, text = journal.query(
        "SELECT g.group_id, g.reward, r.text FROM groups g JOIN rollouts r USING(group_id)"
        " WHERE g.step = ? AND g.task = ? AND g.prompt_id = ? AND r.number = 0",
        (step, task, prompt_id),
    )[0]
    messages = journal.group(group_id).prompt.messages
    prompt = str(messages[-1].get("content", "")) if messages else prompt_id
    return Answered(prompt=prompt, response=text or "", score=float(reward or 0.0), step=step)


def _pair(
    task: str,
    measure: str,
    steps: tuple[int, int],
    a: Answers,
    b: Answers,
    most: int,
    most_equal: int,
) -> list[Comparison]:
    """The comparison over the prompts that both have, with so many examples; nothing if there is none."""
    pairs = [(a[name], b[name]) for name in sorted(a.keys() & b.keys())]
    if not pairs:
        return []
    gaps = [second.score - first.score for first, second in pairs]
    low, high = interval(gaps)
    ranked = sorted(zip(gaps, pairs, strict=True), key=lambda row: row[0])
    worse = [pair for gap, pair in ranked if gap < 0]
    better = [pair for gap, pair in reversed(ranked) if gap > 0]
    equal = [pair for gap, pair in ranked if gap == 0]
    return [
        Comparison(
            task=task,
            measure=measure,
            steps=steps,
            pairs=len(pairs),
            first=fmean(first.score for first, _ in pairs),
            second=fmean(second.score for _, second in pairs),
            difference=fmean(gaps),
            low=low,
            high=high,
            first_wins=len(worse),
            second_wins=len(better),
            examples=better[:most] + worse[:most] + equal[:most_equal],
        )
    ]


def interval(gaps: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences.

    One pair that differs by one, each way, is added to the spread, so that equal answers to a few
    prompts are no proof.
    """
    size, mean = len(gaps), fmean(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) + 2.0) / size
    half = _Z95 * math.sqrt(spread / size)
    return mean - half, mean + half


def print_comparison(
    a: RunFolder,
    b: RunFolder,
    results: Sequence[Comparison],
    console: Console,
    *,
    as_json: bool = False,
) -> None:
    """Print the comparisons as tables, or one JSON list."""
    if as_json:
        console.file.write(json.dumps([asdict(result) for result in results]) + "\n")
        return
    changes = [
        f"{change}" for change in differing(a.config(), b.config()) if not change.startswith("run.")
    ]
    console.print(Text(f"A  {a.name}\nB  {b.name}", style="bold"))
    console.print(Text("B differs in " + (", ".join(changes) or "no setting"), style="dim"))
    for result in results:
        (step_a, step_b), wins = result.steps, (result.first_wins, result.second_wins)
        where = f"steps {step_a} and {step_b}" if step_a or step_b else "newest groups"
        ties = result.pairs - sum(wins)
        bounds = f"95 % interval {result.low:+.3f} to {result.high:+.3f}: "
        verdict = (result.verdict, "bold")
        table = fact_table()
        table.add_row(result.task, Text(f"{result.pairs} prompts that both answered, {where}"))
        table.add_row(result.measure, Text(f"A {result.first:.3f}, B {result.second:.3f}"))
        difference = Text.assemble(f"{result.difference:+.3f}, {bounds}", verdict)
        table.add_row("difference", difference)
        table.add_row("prompts", Text(f"B wins {wins[1]}, A wins {wins[0]}, {ties} equal"))
        console.print()
        console.print(table)
        for first, second in result.examples:
            console.print(Text(f"\n  {_line(first.prompt)}", style="cyan"), soft_wrap=True)
            console.print(Text(f"  A {first.score:.2f}  {_line(first.response)}"), soft_wrap=True)
            console.print(Text(f"  B {second.score:.2f}  {_line(second.response)}"), soft_wrap=True)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CHARACTERS else f"...{line[-_CHARACTERS:]}"
