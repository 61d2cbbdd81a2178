"""`penstock score`: runs a reward over recorded responses, one JSON line each.

Reads and checks every line of a JSONL file (or of a run's rollouts.jsonl), then scores a bounded number at a
time and writes the results in the order of the input. A line whose reward fails gets an
`error` instead of a reward and is counted; it never becomes a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console

from penstock import files
from penstock.config import RewardConfig
from penstock.data.dataset import REWARDS_THAT_NEED_AN_ANSWER
from penstock.errors import RewardError, UserError
from penstock.reward import VerifiableReward, build_reward, fields_read
from penstock.types import Prompt, Rollout, Score, VersionSegment

CONCURRENCY = 64
MAX_TOKENS = 4096
SHOWN_MALFORMED = 10


@dataclass(slots=True)
class ScoreSummary:
    """Totals of a scoring, for the last lines of its output."""

    count: int = 0
    failed: int = 0
    reward_sum: float = 0.0
    format_judged: int = 0
    format_right: int = 0
    answer_judged: int = 0
    answer_right: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def add(self, score: Score | None) -> None:
        self.count += 1
        if score is None:
            self.failed += 1
            return
        self.reward_sum += score.value
        self.format_judged += score.format_ok is not None
        self.format_right += bool(score.format_ok)
        self.answer_judged += score.answer_ok is not None
        self.answer_right += bool(score.answer_ok)

    def lines(self) -> list[str]:
        """The summary as text."""
        scored = self.count - self.failed
        mean = self.reward_sum / scored if scored else float("nan")
        text = [f"{self.count} responses in {self.seconds:.1f} s, mean reward {mean:.4f}"]
        if self.format_judged:
            text.append(f"format right: {self.format_right / self.format_judged:.1%}")
        if self.answer_judged:
            text.append(f"answer right: {self.answer_right / self.answer_judged:.1%}")
        if self.failed:
            text.append(f"failed: {self.failed} (see `error` in their lines)")
        return text


@dataclass(slots=True, frozen=True)
class Record:
    """One input line: a finished rollout and its prompt."""

    number: int  # number of the line, from 1
    group: str
    rollout: Rollout
    prompt: Prompt


def score_file(
    data: Path,
    reward: str,
    out: Path | None = None,
    options: dict[str, Any] | None = None,
    *,
    console: Console | None = None,
) -> ScoreSummary:
    """Score every line of `data`; write results to `out` or stdout, progress and summary to stderr."""
    console = console or files.console(stderr=True)
    path = data / "rollouts.jsonl" if data.is_dir() else data
    if not path.is_file():
        raise UserError(
            f"score: got {str(data)!r}, allowed: a JSONL file, or a folder with rollouts.jsonl, which a run "
            "writes every track.rollouts_every_steps"
        )
    named = [RewardConfig(type=reward, options=options or {})]
    compares = reward in REWARDS_THAT_NEED_AN_ANSWER or "gt_answer" in fields_read(named)
    records, wrong = list[Record](), list[str]()
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    records.append(_read_record(number, line, compares))
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
    if wrong:
        shown = "; ".join(wrong[:SHOWN_MALFORMED])
        numbers = ", ".join(entry.partition(":")[0].removeprefix("line ") for entry in wrong)
        more = f" (all malformed lines: {numbers})" if len(wrong) > SHOWN_MALFORMED else ""
        raise UserError(f"data {path} {shown}{more}")
    if not records:
        raise UserError(f"score: got no line in {str(path)!r}, allowed: one JSON object a line")
    fields = records[0].prompt.extra
    prompt = fields.get("messages", fields.get("prompt"))
    # a run writes messages for any data
    is_chat = isinstance(prompt, list) and "rollout_id" not in fields
    scorer = build_reward(named, max_tokens=MAX_TOKENS, is_chat=is_chat)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(out.open("w", encoding="utf-8")) if out else sys.stdout
        show = stack.enter_context(files.progress_bar("scoring", console))
        count = len(records)
        summary = asyncio.run(_score_all(records, scorer, target, lambda done: show(done, count)))
    for line in summary.lines():
        console.print(line, highlight=False)
    return summary


def _read_record(number: int, line: str, compares: bool) -> Record:
    """Parse one line; raise ValueError with the reason if it is malformed, or lacks what a reward compares with."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"got a {type(fields).__name__}, allowed: an object")
    response = fields.get("response", fields.get("prediction"))
    if not isinstance(response, str):
        raise ValueError("`response` is missing or not text")
    gold, tests = fields.get("gt_answer", fields.get("gold")), fields.get("test_cases")
    if gold is not None and not isinstance(gold, str | int | float):
        raise ValueError(f"`gt_answer` is a {type(gold).__name__}, allowed: text or a number")
    if tests is not None and not isinstance(tests, dict):
        raise ValueError(f"`test_cases` is a {type(tests).__name__}, allowed: an object")
    if compares and gold is None and tests is None:
        raise ValueError("neither `gt_answer` nor `test_cases`")
    length = fields.get("response_length", 0)
    length = length if isinstance(length, int) and 0 < length < 1 << 24 else 0
    messages = fields.get("messages", fields.get("prompt")) or []
    messages = messages if isinstance(messages, list) else [messages]
    prompt = Prompt(
        prompt_id=f"line:{number}",
        messages=tuple(message for message in messages if isinstance(message, dict)),
        token_ids=np.zeros(1),
        gt_answer=None if gold is None else str(gold),
        test_cases=tests,
        extra=fields,
    )
    rollout_id = str(fields.get("rollout_id", f"line:{number}"))
    rollout = answered(rollout_id, prompt, response, length)
    rollout.finish_reason = str(fields.get("finish_reason", "stop"))
    return Record(number, str(fields.get("group_id", f"line:{number}")), rollout, prompt)


def answered(rollout_id: str, prompt: Prompt, text: str, length: int) -> Rollout:
    """A rollout to score, of which the text and the number of tokens are known."""
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=prompt.token_ids,
        seed=0,
        response_ids=np.zeros(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        loss_mask=np.zeros(length, dtype=np.bool_),
        segments=(VersionSegment(0, length),) if length else (),
        finish_reason="stop",
        text=text,
    )


async def _score_all(
    records: list[Record],
    reward: VerifiableReward,
    target: TextIO,
    show: Callable[[int], None],
) -> ScoreSummary:
    summary, started = ScoreSummary(), time.monotonic()
    try:
        # one by one, or neighbours of one group together
        whole = reward.needs_group
        keyed = groupby(records, lambda record: record.group if whole else record.number)
        async for group, outcomes in _in_order((list(some) for _, some in keyed), reward):
            for record, (score, error, seconds) in zip(group, outcomes, strict=True):
                summary.add(score)
                target.write(json.dumps(_output(record, score, error, seconds)) + "\n")
            show(summary.count)
    finally:
        await reward.close()
    summary.seconds = time.monotonic() - started
    return summary


Scored = tuple[Score | None, str, float]  # (score or None, reason for None, seconds)


async def _in_order(
    groups: Iterator[list[Record]], reward: VerifiableReward
) -> AsyncIterator[tuple[list[Record], list[Scored]]]:
    """Score up to CONCURRENCY groups at once; yield them in order."""
    running: deque[tuple[list[Record], asyncio.Task[list[Scored]]]] = deque()
    async with asyncio.TaskGroup() as tasks:
        for records in groups:
            running.append((records, tasks.create_task(_score_group(reward, records))))
            if len(running) >= CONCURRENCY:
                done, task = running.popleft()
                yield done, await task
        while running:
            done, task = running.popleft()
            yield done, await task


async def _score_group(reward: VerifiableReward, records: list[Record]) -> list[Scored]:
    started = time.perf_counter()
    try:
        rollouts, prompts = [r.rollout for r in records], [r.prompt for r in records]
        scores = await reward.score_group(rollouts, prompts)
    except RewardError as error:
        seconds = time.perf_counter() - started
        return [(None, str(error), seconds) for _ in records]
    seconds = time.perf_counter() - started
    return [(score, "", seconds) for score in scores]


def _output(record: Record, score: Score | None, error: str, seconds: float) -> dict[str, Any]:
    time_ms = round(seconds * 1000, 3)
    if score is None:
        return {"line": record.number, "reward": None, "error": error, "time_ms": time_ms}
    return {
        "line": record.number,
        "reward": score.value,
        "format_ok": score.format_ok,
        "answer_ok": score.answer_ok,
        "parts": score.parts,
        "note": score.note,
        "time_ms": time_ms,
    }
