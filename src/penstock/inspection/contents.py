"""What the tokens in a journal prove, in one pass over the groups that steps took.

The trainer hashed every group that it was given: the hashes are computed again. Of agents' rollouts, every
trained id was given to an engine or sampled by it, and trained once: their rows are compared with the calls
that the journal had before the agent got their answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import RunError
from penstock.rollout.agent.tree import CallTree
from penstock.store.journal import Journal
from penstock.types import Group, ModelCall, Rollout, contradicts


@dataclass(slots=True, kw_only=True)
class Contents:
    """What was compared, and what did not hold; the counts are of agents' rollouts."""

    rollouts: int = 0
    rows: int = 0
    trained: int = 0  # sampled tokens in the loss
    given: int = 0  # tokens that an engine was given: prompts, tool results
    unheard: int = 0  # calls whose answer the agent never got: in no row
    pruned: int = 0  # rollouts whose tokens were removed
    tools: dict[str, int] = field(default_factory=dict)  # calls by outcome
    faults: list[str] = field(default_factory=list)
    is_proved: bool = True  # no fault of an agent's rollout

    def lines(self) -> list[str]:
        """Say what was proved; empty if the run has no agent."""
        lines = []
        if self.rollouts and self.is_proved:
            gone = f"; {self.pruned} more were pruned" if self.pruned else ""
            lost = f"; {self.unheard} calls never reached their agent and are not trained"
            lines.append(
                f"agents: {self.rollouts} rollouts, {self.rows} rows{gone}: every id was given to an engine "
                f"({self.given}) or sampled by it, each of {self.trained} sampled tokens trained once{lost if self.unheard else ''}"
            )
        if self.tools:
            begun = sum(self.tools.values())
            parts = " + ".join(f"{number} {outcome}" for outcome, number in self.tools.items())
            lines.append(f"tool calls: {begun} begun = {parts}")
        return lines


def read_contents(journal: Journal) -> Contents:
    """Compare every group that a step took with the trainer's record, and with its calls."""
    contents = Contents()
    records = _records(journal)
    of_agents = {group_id for (group_id,) in journal.query("SELECT DISTINCT group_id FROM calls")}
    rows = journal.query(
        "SELECT group_id, step FROM groups WHERE state IN ('taken', 'trained') ORDER BY step, position"
    )
    for group_id, step in rows:
        record = records.get((step, group_id))
        if record is None and group_id not in of_agents:
            continue
        try:
            group = journal.group(group_id)
        except RunError as error:
            contents.faults.append(f"group {group_id}: its rollouts cannot be read: {error}")
            continue
        if record is not None and contradicts(record, group.fingerprint()):
            contents.faults.append(
                f"group {group_id}: the journal's rollouts are not those that the trainer "
                f"trained in step {step}"
            )
        if group_id in of_agents:
            _certify(journal, group, contents)
    outcomes = dict(journal.query("SELECT outcome, COUNT(*) FROM tools GROUP BY outcome"))
    if outcomes:
        ended = {name: outcomes.get(name, 0) for name in ("done", "failed", "unknown")}
        contents.tools = ended | {"unknown": ended["unknown"] + outcomes.get(None, 0)}
    return contents


def _records(journal: Journal) -> dict[tuple[int, str], str]:
    """The trainer's hash of each group that it trained and that has its tokens, by (step, group)."""
    rows = journal.query(
        "SELECT step, trained FROM steps WHERE committed AND trained IS NOT NULL AND pruned_at IS NULL"
    )
    return {
        (step, group_id): fingerprint
        for step, trained in rows
        for group_id, fingerprint in json.loads(trained)
    }


def _certify(journal: Journal, group: Group, contents: Contents) -> None:
    """Compare the rollouts of an agent's group with the calls that were journalled."""
    calls = journal.calls(group.group_id)
    for rollout in group.rollouts:
        journalled = calls.get((rollout.rollout_id, rollout.seed), [])
        if not rollout.rows and not journalled:
            contents.pruned += 1
            continue
        contents.rollouts += 1
        if fault := _compare(rollout, journalled, contents):
            contents.is_proved = False
            contents.faults.append(f"rollout {rollout.rollout_id}: {fault}")


def _compare(rollout: Rollout, calls: Sequence[ModelCall], contents: Contents) -> str:
    """What is wrong with a rollout's rows; add to the counts."""
    tree, unheard = CallTree(list(calls)), set(rollout.extra.get("unheard", ()))
    paths = [tree.path(leaf) for leaf in tree.leaves(unheard)]
    sequences = rollout.sequences()
    if len(paths) != len(sequences):
        return f"it has {len(sequences)} rows, but its calls have {len(paths)} ends"
    seen: set[tuple[int, int]] = set()  # (call, place) of the sampled tokens that are trained
    for number, ((prompt_ids, place), path) in enumerate(zip(sequences, paths, strict=True)):
        ids = np.concatenate([prompt_ids, rollout.response_ids[place]])
        if not np.array_equal(ids, tree.ids(path[-1])):
            return f"row {number}: its ids are not those that an engine was given or sampled"
        origin: list[tuple[int, int] | None] = []  # of each id: where it was sampled
        for call in path:
            origin += [None] * len(call.context_ids)
            origin += [(call.number, offset) for offset in range(len(call.token_ids))]
        mask = np.concatenate([np.zeros(len(prompt_ids), dtype=bool), rollout.loss_mask[place]])
        for at in np.flatnonzero(mask):
            source = origin[at]
            if source is None:
                return f"row {number}: it trains a token that was not sampled"
            if source in seen:
                return f"row {number}: it trains a token that another row trains"
            seen.add(source)
        contents.rows += 1
        contents.given += origin.count(None)
    sampled = sum(len(call.token_ids) for call in calls if call.number not in unheard)
    if len(seen) != sampled:
        return f"{sampled - len(seen)} of its {sampled} sampled tokens are not trained"
    contents.trained += sampled
    contents.unheard += len(unheard)
    return ""
