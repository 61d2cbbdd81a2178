"""`penstock compare A B`: the same prompts answered by two runs: which run is better, by how much, how surely.

Pairs the problems of the newest evaluations; where the runs have no evaluation in common, the newest
trained group of each prompt. The interval is that of the mean difference over pairs, which leaves out
how hard the prompts are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.config.changes import differing
from penstock.errors import UserError
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

_Z95 = 1.959963984540054
_SAMPLES = re.compile(r"(?P<task>.+)-step-(?P<step>\d+)\.jsonl")
_EXAMPLES, _CHARACTERS = 2, 300


@dataclass(slots=True, frozen=True, kw_only=True)
class Answered:
    """What one run made of one prompt."""

    prompt: str
    response: str
    score: float  # the mean over the responses


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Two runs on the prompts that both answered."""

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
    # the largest differences
    examples: list[tuple[Answered, Answered]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "B is better"
        return "A is better" if self.high < 0 else "no difference is shown"


def compare(a: RunFolder, b: RunFolder) -> list[Comparison]:
    """Return a comparison for each evaluation task that both runs have; else one of training prompts."""
    newest_a, newest_b = (
        {task: files[-1] for task, files in evaluations(folder).items()} for folder in (a, b)
    )
    found = []
    for task in sorted(newest_a.keys() & newest_b.keys()):
        (step_a, path_a), (step_b, path_b) = newest_a[task], newest_b[task]
        rows_a, rows_b = read_samples(path_a), read_samples(path_b)
        judged = all(row.get("ans_valid") is not None for row in (*rows_a, *rows_b))
        own_a, own_b = answered(rows_a, judged), answered(rows_b, judged)
        measure = "accuracy" if judged else "reward"
        found += _pair(task, measure, (step_a, step_b), own_a, own_b)
    found = found or _pair("training prompts", "reward", (0, 0), _trained(a), _trained(b))
    if not found:
        raise UserError(
            f"compare: {a.name} and {b.name} have no prompt in common, allowed: runs with the same "
            "evaluation or training data"
        )
    return found


def evaluations(folder: RunFolder) -> dict[str, list[tuple[int, Path]]]:
    """Return the samples of each task's evaluations with their step, the oldest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.evaluations.glob("*.jsonl"):
        if match := _SAMPLES.fullmatch(path.name):
            found.setdefault(match["task"], []).append((int(match["step"]), path))
    return {task: sorted(files) for task, files in found.items()}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the scored lines of an evaluation; damaged ones are left out."""
    rows = []
    for line in path.read_bytes().splitlines():  # as text it would end at U+2028 too
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("reward"), int | float):
            rows.append(row)
    return rows


def answered(rows: Sequence[dict[str, Any]], judged: bool) -> dict[str, Answered]:
    """Return what a run made of each prompt, by its id: its first response and the mean score."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(str(row.get("prompt_id")), []).append(row)
    found = {}
    for prompt_id, own in by_prompt.items():
        scores = [float(row["ans_valid"]) if judged else float(row["reward"]) for row in own]
        messages = own[0].get("prompt")
        asked = messages[-1].get("content", "") if isinstance(messages, list) and messages else ""
        found[prompt_id] = Answered(
            prompt=str(asked),
            response=str(own[0].get("prediction", "")),
            score=sum(scores) / len(scores),
        )
    return found


def _trained(folder: RunFolder) -> dict[str, Answered]:
    """Return the newest trained group of every prompt."""
    if not folder.journal.is_file():
        return {}
    with closing(Journal.look(folder.journal)) as journal:
        rows = journal.query(
            "SELECT g.prompt_id, g.reward, r.text FROM groups g JOIN rollouts r USING(group_id)"
            " WHERE g.state = 'trained' AND r.number = 0 AND g.reward IS NOT NULL ORDER BY g.step"
        )
    return {
        str(prompt_id): Answered(prompt=str(prompt_id), response=text or "", score=float(reward))
        for prompt_id, reward, text in rows
    }


def _pair(
    task: str, measure: str, steps: tuple[int, int], a: dict[str, Answered], b: dict[str, Answered]
) -> list[Comparison]:
    """Return the comparison over the prompts that both have; nothing if there is none."""
    common = sorted(a.keys() & b.keys())
    if not common:
        return []
    gaps = [b[name].score - a[name].score for name in common]
    mean = sum(gaps) / len(gaps)
    low, high = interval(gaps)
    ranked = sorted(common, key=lambda name: b[name].score - a[name].score)
    worst = [name for name in ranked[:_EXAMPLES] if b[name].score < a[name].score]
    best = [name for name in reversed(ranked[-_EXAMPLES:]) if b[name].score > a[name].score]
    return [
        Comparison(
            task=task,
            measure=measure,
            steps=steps,
            pairs=len(common),
            first=sum(a[name].score for name in common) / len(common),
            second=sum(b[name].score for name in common) / len(common),
            difference=mean,
            low=low,
            high=high,
            first_wins=sum(gap < 0 for gap in gaps),
            second_wins=sum(gap > 0 for gap in gaps),
            examples=[(a[name], b[name]) for name in best + worst],
        )
    ]


def interval(gaps: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences.

    One pair that differs by one, each way, is added to the spread, so that equal answers to a few
    prompts are no proof.
    """
    size, mean = len(gaps), sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) + 2.0) / size
    half = _Z95 * math.sqrt(spread / size)
    return mean - half, mean + half


def print_comparison(
    a: RunFolder,
    b: RunFolder,
    found: Sequence[Comparison],
    console: Console,
    *,
    as_json: bool = False,
) -> None:
    """Print the comparisons as tables, or one JSON list."""
    if as_json:
        console.file.write(json.dumps([asdict(one) for one in found]) + "\n")
        return
    changes = [
        f"{change}" for change in differing(a.config(), b.config()) if not change.startswith("run.")
    ]
    console.print(Text(f"A  {a.name}\nB  {b.name}", style="bold"))
    console.print(Text("B differs in " + (", ".join(changes) or "no setting"), style="dim"))
    for one in found:
        where = f"steps {one.steps[0]} and {one.steps[1]}" if any(one.steps) else "newest groups"
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(one.task, Text(f"{one.pairs} prompts that both answered, {where}"))
        table.add_row(one.measure, Text(f"A {one.first:.3f}, B {one.second:.3f}"))
        table.add_row(
            "difference",
            Text.assemble(
                f"{one.difference:+.3f}, 95 % interval {one.low:+.3f} to {one.high:+.3f}: ",
                (one.verdict, "bold"),
            ),
        )
        ties = one.pairs - one.first_wins - one.second_wins
        table.add_row(
            "prompts", Text(f"B wins {one.second_wins}, A wins {one.first_wins}, {ties} equal")
        )
        console.print()
        console.print(table)
        for first, second in one.examples:
            console.print(Text(f"\n  {_line(first.prompt)}", style="cyan"), soft_wrap=True)
            console.print(Text(f"  A {first.score:.2f}  {_line(first.response)}"), soft_wrap=True)
            console.print(Text(f"  B {second.score:.2f}  {_line(second.response)}"), soft_wrap=True)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CHARACTERS else f"...{line[-_CHARACTERS:]}"
