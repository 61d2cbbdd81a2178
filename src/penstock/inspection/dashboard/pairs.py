"""The first against the last answer to the same prompt: of held-out problems, or of prompts that were trained twice."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from penstock.inspection.compare import Answered, answered, evaluations, read_samples
from penstock.inspection.report.data import clip
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder

TRAINING = "training prompts"
AT_ONCE = 12


@dataclass(slots=True, frozen=True, kw_only=True)
class Pair:
    """Two answers to one prompt."""

    steps: tuple[int, int]
    first: Answered
    last: Answered

    @property
    def gap(self) -> float:
        return self.last.score - self.first.score


def sources(folder: RunFolder) -> list[str]:
    """Return what pairs can be taken from: evaluation tasks with two evaluations, and training prompts."""
    found = [task for task, files in evaluations(folder).items() if len(files) > 1]
    return [*sorted(found), TRAINING]


def read_pairs(folder: RunFolder, source: str) -> list[Pair]:
    """Return every prompt of the source that was answered twice, with its first and its last answer."""
    return _trained_pairs(folder) if source == TRAINING else _evaluated_pairs(folder, source)


def page_of(pairs: Sequence[Pair], order: str, offset: int) -> dict[str, Any]:
    """Return some pairs in an order (better, worse, all), and how many got better or worse."""
    if order == "all":
        chosen = list(pairs)
    elif order == "worse":
        chosen = sorted((pair for pair in pairs if pair.gap < 0), key=lambda pair: pair.gap)
    else:
        chosen = sorted((pair for pair in pairs if pair.gap > 0), key=lambda pair: -pair.gap)
    return {
        "all": len(pairs),
        "better": sum(pair.gap > 0 for pair in pairs),
        "worse": sum(pair.gap < 0 for pair in pairs),
        "pairs": [asdict(pair) for pair in chosen[offset : offset + AT_ONCE]],
        "more": len(chosen) > offset + AT_ONCE,
    }


def _evaluated_pairs(folder: RunFolder, task: str) -> list[Pair]:
    files = evaluations(folder).get(task, [])
    if len(files) < 2:
        return []
    (first_step, first), (last_step, last) = files[0], files[-1]
    rows = read_samples(first), read_samples(last)
    judged = all(row.get("ans_valid") is not None for own in rows for row in own)
    before, after = (answered(own, judged) for own in rows)
    return [
        Pair(steps=(first_step, last_step), first=_cut(before[name]), last=_cut(after[name]))
        for name in before
        if name in after
    ]


def _trained_pairs(folder: RunFolder) -> list[Pair]:
    """Pair the first and the last group of every prompt that more than one step trained."""
    if not folder.journal.is_file():
        return []
    with closing(Journal.look(folder.journal)) as journal, journal.snapshot():
        rows = journal.query(
            "SELECT task, prompt_id, MIN(step), MAX(step) FROM groups WHERE state = 'trained'"
            " GROUP BY task, prompt_id HAVING MIN(step) < MAX(step) ORDER BY 4 DESC LIMIT 200"
        )
        return [
            Pair(
                steps=(first, last),
                first=_trained(journal, task, prompt_id, first),
                last=_trained(journal, task, prompt_id, last),
            )
            for task, prompt_id, first, last in rows
        ]


def _trained(journal: Journal, task: str, prompt_id: str, step: int) -> Answered:
    group_id, reward, text = journal.query(
        "SELECT g.group_id, g.reward, r.text FROM groups g JOIN rollouts r USING(group_id)"
        " WHERE g.step = ? AND g.task = ? AND g.prompt_id = ? AND r.number = 0",
        (step, task, prompt_id),
    )[0]
    messages = journal.group(group_id).prompt.messages
    asked = str(messages[-1].get("content", "")) if messages else prompt_id
    return _cut(Answered(prompt=asked, response=text or "", score=float(reward or 0.0)))


def _cut(one: Answered) -> Answered:
    return Answered(prompt=clip(one.prompt), response=clip(one.response), score=one.score)
