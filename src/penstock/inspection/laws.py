"""The laws that the rows of a journal must keep; each yields a sentence for every fault.

Numbers of rows were written down when they were made, so a row that is missing is missed. Each step holds the
trainer's own record of what it trained, and a hash over that record and all before it. The sampler's formula
says which cursors draw the same prompt. Reads no tokens (`contents.py`) and no weights (`weight_chain.py`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.data.sampler import epoch_order
from penstock.store.journal import Journal
from penstock.store.journal.records import step_chain

_MOST = 20  # most faults of one kind that are listed


@dataclass(slots=True, frozen=True)
class EraBounds:
    """The staleness bound of one config, and the last step that was trained under it."""

    last_step: int | None  # None: this config is still in force
    allowed: dict[str, int]  # per task, in updates
    longest_wait: dict[str, int] = field(default_factory=dict)  # per task, in its steps
    seed: int = 0
    chosen: frozenset[str] = frozenset()  # tasks whose prompts a sampler chose by their pass rates


def row_faults(journal: Journal, eras: Sequence[EraBounds], *, recorded: bool) -> Iterator[str]:
    """Everything that the rows break. `recorded`: a fork, whose groups were drawn by another run."""
    yield from _life_faults(journal)
    yield from _batch_faults(journal)
    yield from _step_faults(journal)
    yield from _missing_rows(journal)
    if not recorded:  # in a fork, versions and steps belong to two runs
        chosen = frozenset().union(*(era.chosen for era in eras))
        yield from _prompt_faults(journal, eras[-1].seed, chosen)
        yield from _age_faults(journal, eras)
        yield from _staleness_faults(journal, eras)


# -- groups and batches ------------------------------------------------------------------------


def _life_faults(journal: Journal) -> Iterator[str]:
    """Groups in impossible states: dropped without a reason, trained but never landed."""
    rules = {
        "was dropped without a reason": "state = 'dropped' AND drop_reason IS NULL",
        "was taken but is not completed": "state IN ('taken', 'trained') AND status != 'completed'",
        "was taken but never landed": "state IN ('taken', 'trained') AND landed_at IS NULL",
        "was taken, but its landing is not recorded": "state IN ('taken', 'trained') AND group_id"
        " NOT IN (SELECT group_id FROM event_rows WHERE kind = 'landed')",
    }
    for what, where in rules.items():
        for (group_id,) in journal.query(
            f"SELECT group_id FROM groups WHERE {where} LIMIT {_MOST}"
        ):
            yield f"group {group_id}: {what}"


def _batch_faults(journal: Journal) -> Iterator[str]:
    """Compare batches with groups: one batch per group, equal members, no step missing."""
    for group_id, number in journal.query(
        "SELECT value, COUNT(*) FROM steps, json_each(group_ids) GROUP BY value HAVING COUNT(*) > 1"
    ):
        yield f"group {group_id}: trained {number} times"
    members: dict[int, list[str]] = {}
    for step, group_id in journal.query(
        "SELECT step, group_id FROM groups WHERE step IS NOT NULL ORDER BY step, position"
    ):
        members.setdefault(step, []).append(group_id)
    rows = journal.query("SELECT step, group_ids FROM steps ORDER BY step")
    for expected, (step, group_ids) in enumerate(rows, start=1):
        if step != expected:
            yield f"step {expected}: missing"
            return
        if group_ids is not None and json.loads(group_ids) != members.get(step, []):
            yield f"step {step}: its batch differs from what its groups record"


def _step_faults(journal: Journal) -> Iterator[str]:
    """Steps whose batch or chain is not what was committed and trained."""
    rows = journal.query(
        "SELECT step, group_ids, trained, num_events, chain FROM steps WHERE committed ORDER BY step"
    )
    before: str | None = None
    for step, group_ids, trained, num_events, chain in rows:
        batch = json.loads(group_ids or "[]")
        if not batch:
            yield f"step {step}: it was committed without a batch"
        if (chain or before) and chain != step_chain(before, step, group_ids, trained, num_events):
            yield f"step {step}: its record, or the one before it, is not what was committed"
        before = chain
        recorded = list(dict(json.loads(trained or "[]")))
        if recorded and recorded != batch:
            yield f"step {step}: the trainer trained {_few(recorded)}, its batch is {_few(batch)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _missing_rows(journal: Journal) -> Iterator[str]:
    """What is gone: events, records of weights, rollouts of groups that landed."""
    for table, what in (("event_rows", "events of groups"), ("weight_rows", "records of weights")):
        ((count, last),) = journal.query(f"SELECT COUNT(*), COALESCE(MAX(number), 0) FROM {table}")
        if count != last:
            yield f"{last - count} of {last} {what} are missing"
        if table == "event_rows":
            for step, number in journal.query(
                "SELECT step, num_events FROM steps WHERE num_events > ? LIMIT 1", (last,)
            ):
                yield f"step {step}: {number} events were there when it was committed, now {last}"
    for table in ("event_rows", "rollout_rows"):
        for (group_id,) in journal.query(
            f"SELECT DISTINCT group_id FROM {table} WHERE group_id NOT IN"
            f" (SELECT group_id FROM group_rows) LIMIT {_MOST}"
        ):
            yield f"group {group_id}: its draw is missing, but {table} has rows of it"
    yield from _missing_rollouts(journal)
    yield from _other_rewards(journal)


def _missing_rollouts(journal: Journal) -> Iterator[str]:
    rows = journal.query(
        "SELECT group_id, num_rollouts, found, groups.num_tokens, tokens FROM groups LEFT JOIN"
        " (SELECT group_id, COUNT(*) AS found, SUM(num_tokens) AS tokens FROM rollout_rows"
        " GROUP BY group_id) USING(group_id) WHERE landed_at IS NOT NULL AND (found IS NULL"
        f" OR found != COALESCE(num_rollouts, found) OR tokens IS NOT groups.num_tokens) LIMIT {_MOST}"
    )
    for group_id, expected, found, expected_tokens, tokens in rows:
        yield (
            f"group {group_id}: it has {found or 0} rollouts with {tokens or 0} tokens, "
            f"but {expected or 'its rollouts'} with {expected_tokens} tokens landed"
        )


def _other_rewards(journal: Journal) -> Iterator[str]:
    """Groups whose reward is not the mean of their rollouts' rewards; SQLite adds in another order."""
    rows = journal.query(
        "SELECT group_id, groups.reward, mean FROM groups JOIN (SELECT group_id, AVG(reward) AS mean"
        " FROM rollout_rows GROUP BY group_id) USING(group_id) WHERE landed_at IS NOT NULL"
        f" AND ABS(mean - groups.reward) > 1e-9 * (1 + ABS(mean)) LIMIT {_MOST}"
    )
    for group_id, reward, mean in rows:
        yield f"group {group_id}: its reward is {reward:g}, but the mean of its rollouts' is {mean:g}"


# -- prompts -----------------------------------------------------------------------------------


def _prompt_faults(journal: Journal, seed: int, chosen: frozenset[str]) -> Iterator[str]:
    """Draws that the sampler would not make: each prompt comes once in an epoch, unless it is `chosen`.

    Needs the number of prompts, which a run records; groups from before a change of the data are
    left out.
    """
    facts = journal.read_identity()
    tasks = [task for (task,) in journal.query("SELECT DISTINCT task FROM groups")]
    for task in tasks:
        size = json.loads(facts.get(f"tasks.{task}.data", "{}")).get("prompts")
        if size and task not in chosen:
            since = int(facts.get(f"tasks.{task}.data since cursor", "0"))
            yield from _task_prompt_faults(journal, task, seed, size, since)


def _task_prompt_faults(
    journal: Journal, task: str, seed: int, size: int, since: int
) -> Iterator[str]:
    rows = journal.query(
        "SELECT cursor, prompt_id FROM groups WHERE task = ? AND cursor >= ? ORDER BY cursor",
        (task, since),
    )
    order, epoch = np.zeros(0, dtype=np.int64), -1
    by_place: dict[int, tuple[int, str]] = {}  # place in the data -> a cursor and its prompt
    by_prompt: dict[str, tuple[int, int]] = {}  # prompt -> a cursor and its place in the data
    faults = 0
    for cursor, prompt_id in rows:
        if cursor // size != epoch:
            epoch = cursor // size
            order = epoch_order(seed, task, epoch, size)
        place = int(order[cursor % size])
        first, prompt = by_place.setdefault(place, (cursor, prompt_id))
        other, place_before = by_prompt.setdefault(prompt_id, (cursor, place))
        if prompt != prompt_id:
            yield f"task {task}: cursors {first} and {cursor} draw one prompt, got {prompt} and {prompt_id}"
        elif place_before != place:
            yield f"task {task}: cursors {other} and {cursor} draw different prompts, both got {prompt_id}"
        else:
            continue
        faults += 1
        if faults == _MOST:
            return


# -- ages --------------------------------------------------------------------------------------


def _age_faults(journal: Journal, eras: Sequence[EraBounds]) -> Iterator[str]:
    """Groups that wait longer than a run lets them: in flight, to be retried, to be trained."""
    yield from _waiting_faults(journal, eras[-1].longest_wait)
    (last,) = journal.query("SELECT MAX(step) FROM steps")[0]
    for task in eras[-1].allowed:
        bound = _bound(task, last or 1, eras)
        if bound is not None:
            yield from _unexpired(journal, task, bound)


def _waiting_faults(journal: Journal, longest_wait: Mapping[str, int]) -> Iterator[str]:
    """Groups that neither landed nor were issued again in `longest_wait` steps of their task.

    By the numbers of events, never by the clock, which can be put back under a run.
    """
    for task, limit in longest_wait.items():
        commits = _commits(journal, task)
        for group_id, state, since in _waiting(journal, task):
            first = bisect_left([num_events for _, num_events in commits], since)
            if len(commits) - first > limit:
                what = "in flight" if state == "in_flight" else "waiting to be generated again"
                yield (
                    f"group {group_id}: {what} since step {commits[first][0]}, for "
                    f"{len(commits) - first} steps of task {task}, allowed: {limit}"
                )


def _waiting(journal: Journal, task: str) -> Iterator[tuple[str, str, int]]:
    """(group, state, number of an event) of the groups to be generated: they wait since then or longer.

    That event is the group's own last one, or, if it has none, the first of a group that was drawn later.
    """
    rows = journal.query(
        "SELECT group_id, state, state = 'in_flight' OR (state = 'buffered' AND groups.status != 'completed'),"
        " MIN(number), MAX(number) FROM groups LEFT JOIN event_rows USING(group_id) WHERE task = ?"
        " GROUP BY group_id ORDER BY cursor DESC",
        (task,),
    )
    later: int | None = None  # the first event of the groups that were drawn later
    for group_id, state, waits, first, last in rows:
        since = later if last is None else last
        if waits and since is not None:
            yield group_id, state, since
        later = min(filter(None, (first, later)), default=None)


def _commits(journal: Journal, task: str) -> Sequence[tuple[int, int]]:
    """(step, number of events before its commit) of the steps that trained groups of the task."""
    return journal.query(
        "SELECT step, num_events FROM steps WHERE committed AND step IN"
        " (SELECT step FROM groups WHERE task = ? AND step IS NOT NULL) ORDER BY step",
        (task,),
    )


def _unexpired(journal: Journal, task: str, bound: int) -> Iterator[str]:
    """Buffered groups that the last step should have found too old: landed two commits before it."""
    (last,) = journal.query("SELECT MAX(step) FROM steps")[0]
    for group_id, version in journal.query(
        "SELECT group_id, oldest_version FROM groups WHERE task = ? AND state = 'buffered'"
        " AND status = 'completed' AND ? - oldest_version - 1 > ? AND"
        " (SELECT MAX(number) FROM event_rows WHERE event_rows.group_id = groups.group_id)"
        " <= (SELECT num_events FROM steps WHERE step = ? - 2)",
        (task, last, bound, last),
    ):
        yield (
            f"group {group_id}: buffered for step {last} with tokens of version {version}, "
            f"allowed: at most {bound} updates behind"
        )


def staleness(journal: Journal) -> list[tuple[str, int, int]]:
    """(task, step, largest staleness of a rollout that it trained), by the oldest token."""
    return journal.query(
        "SELECT task, step, MAX(step - oldest_version - 1) FROM rollouts"
        " WHERE step IS NOT NULL AND oldest_version IS NOT NULL GROUP BY task, step ORDER BY step"
    )


def _staleness_faults(journal: Journal, eras: Sequence[EraBounds]) -> Iterator[str]:
    for task, step, value in staleness(journal):
        bound = _bound(task, step, eras)
        if bound is not None and value > bound:
            yield f"task {task}: step {step} trained a sample of staleness {value}, allowed: {bound}"


def _bound(task: str, step: int, eras: Sequence[EraBounds]) -> int | None:
    """The bound of the era that the step was trained in; None: that era lacks the task.

    An era's first batch may have been taken under the settings before: the larger bound holds for it.
    """
    before, bounds = 0, []
    for era in eras:
        last = step if era.last_step is None else era.last_step
        if before < step <= last + 1 and task in era.allowed:
            bounds.append(era.allowed[task])
        before = last
    return max(bounds, default=None)
