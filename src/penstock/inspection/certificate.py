"""The certificate of agents' runs: every trained id was given to an engine or sampled by it, and once.

Compares the rows of each taken rollout with the calls that the journal had before the agent got their
answers. The trainer's own record of what it trained is compared with the same rollouts in `evidence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.rollout.agent.tree import CallTree
from penstock.store.journal import Journal
from penstock.types import ModelCall, Rollout


@dataclass(slots=True, kw_only=True)
class Certificate:
    """What was compared, and what did not hold."""

    rollouts: int = 0
    rows: int = 0
    trained: int = 0  # sampled tokens in the loss
    given: int = 0  # tokens that an engine was given: prompts, tool results
    unheard: int = 0  # calls whose answer the agent never got: in no row
    pruned: int = 0  # rollouts whose tokens were removed
    tools: dict[str, int] = field(default_factory=dict)  # calls by outcome
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Say what was proved; empty if the run has no agent."""
        found = []
        if self.rollouts and not self.faults:
            gone = f"; {self.pruned} more were pruned" if self.pruned else ""
            lost = f"; {self.unheard} calls never reached their agent and are not trained"
            found.append(
                f"agents: {self.rollouts} rollouts, {self.rows} rows{gone}: every id was given to an engine "
                f"({self.given}) or sampled by it, each of {self.trained} sampled tokens trained once{lost if self.unheard else ''}"
            )
        if self.tools:
            begun = sum(self.tools.values())
            parts = " + ".join(f"{number} {outcome}" for outcome, number in self.tools.items())
            found.append(f"tool calls: {begun} begun = {parts}")
        return found


def certify(journal: Journal) -> Certificate:
    """Check the rollouts of agents that a step took."""
    found = Certificate()
    groups = journal.query(
        "SELECT DISTINCT group_id FROM calls JOIN groups USING(group_id)"
        " WHERE state IN ('taken', 'trained') ORDER BY group_id"
    )
    for (group_id,) in groups:
        calls = journal.calls(group_id)
        for rollout in journal.group(group_id).rollouts:
            made = calls.get((rollout.rollout_id, rollout.seed), [])
            if not rollout.rows and not made:
                found.pruned += 1
                continue
            found.rollouts += 1
            fault = _compare(rollout, made, found)
            if fault:
                found.faults.append(f"rollout {rollout.rollout_id}: {fault}")
    outcomes = dict(journal.query("SELECT outcome, COUNT(*) FROM tools GROUP BY outcome"))
    if outcomes:
        names = {"done": "done", "failed": "failed", None: "unknown"}
        found.tools = {name: outcomes.get(outcome, 0) for outcome, name in names.items()}
    return found


def _compare(rollout: Rollout, calls: Sequence[ModelCall], found: Certificate) -> str:
    """Return what is wrong with a rollout's rows; add to the counts."""
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
        found.rows += 1
        found.given += origin.count(None)
    sampled = sum(len(call.token_ids) for call in calls if call.number not in unheard)
    if len(seen) != sampled:
        return f"{sampled - len(seen)} of its {sampled} sampled tokens are not trained"
    found.trained += sampled
    found.unheard += len(unheard)
    return ""
