"""What a journal proves about itself: rows that are gone, batches, content and prompts that differ.

Numbers of rows were written down when they were made, so a row that is missing is missed. Each step
holds the trainer's own record of what it trained, and a hash over that record and all before it. The
sampler's formula says which cursors draw the same prompt. Used by `audit.py`, which prints the faults.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.data.sampler import epoch_order
from penstock.errors import JournalDamaged
from penstock.store.journal import Journal
from penstock.store.journal.records import step_chain
from penstock.types import contradicts

_MOST = 20  # most faults of one kind that are listed


def missing_rows(journal: Journal) -> Iterator[str]:
    """Yield what is gone: events, records of weights, rollouts of groups that landed."""
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


def step_faults(journal: Journal) -> Iterator[str]:
    """Yield steps whose batch, chain or content is not what was committed and trained."""
    rows = journal.query(
        "SELECT step, group_ids, trained, num_events, chain, pruned_at FROM steps WHERE committed"
        " ORDER BY step"
    )
    before: str | None = None
    for step, group_ids, trained, num_events, chain, pruned_at in rows:
        batch = json.loads(group_ids or "[]")
        if not batch:
            yield f"step {step}: it was committed without a batch"
        if (chain or before) and chain != step_chain(before, step, group_ids, trained, num_events):
            yield f"step {step}: its record, or the one before it, is not what was committed"
        before = chain
        recorded = dict(json.loads(trained or "[]"))
        if recorded and list(recorded) != batch:
            yield f"step {step}: the trainer trained {_few(list(recorded))}, its batch is {_few(batch)}"
        if recorded and pruned_at is None:
            yield from _content_faults(journal, step, recorded)


def _content_faults(journal: Journal, step: int, recorded: Mapping[str, str]) -> Iterator[str]:
    try:
        groups = journal.batch(step).groups
    except JournalDamaged as error:
        yield f"step {step}: its batch cannot be read: {error}"
        return
    for group in groups:
        if contradicts(recorded.get(group.group_id, ""), group.fingerprint()):
            yield (
                f"group {group.group_id}: the journal's rollouts are not those that the trainer "
                f"trained in step {step}"
            )


def unrecorded_steps(journal: Journal) -> str:
    """Return a line about the steps that a trainer left no record of; empty if there are none."""
    ((count, first, last),) = journal.query(
        "SELECT COUNT(*), MIN(step), MAX(step) FROM steps WHERE committed AND trained IS NULL"
    )
    if not count:
        return ""
    return (
        f"{count} of steps {first} to {last} have no record by the trainer of what it trained, so "
        "their rollouts cannot be compared with one"
    )


def pruned_steps(journal: Journal) -> str:
    """Return a line about the steps whose tokens were removed; empty if there are none."""
    last = journal.pruned_to()
    if not last:
        return ""
    return (
        f"steps 1 to {last}: their tokens were removed (journal.keep_payloads), so they are not "
        "compared with the trainer's record; replay begins at the oldest checkpoint, forks cannot begin"
    )


# -- prompts -----------------------------------------------------------------------------------


def prompt_faults(journal: Journal, seed: int) -> Iterator[str]:
    """Yield draws that the sampler would not make: each prompt comes once in an epoch.

    Needs the number of prompts, which a run records; groups from before a change of the data are
    left out.
    """
    facts = journal.read_identity()
    tasks = [task for (task,) in journal.query("SELECT DISTINCT task FROM groups")]
    for task in tasks:
        size = json.loads(facts.get(f"tasks.{task}.data", "{}")).get("prompts")
        if size:
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
    found = 0
    for cursor, prompt_id in rows:
        if cursor // size != epoch:
            epoch = cursor // size
            order = epoch_order(seed, task, epoch, size)
        place = int(order[cursor % size])
        one, prompt = by_place.setdefault(place, (cursor, prompt_id))
        other, place_before = by_prompt.setdefault(prompt_id, (cursor, place))
        if prompt != prompt_id:
            yield f"task {task}: cursors {one} and {cursor} draw one prompt, got {prompt} and {prompt_id}"
        elif place_before != place:
            yield f"task {task}: cursors {other} and {cursor} draw different prompts, both got {prompt_id}"
        else:
            continue
        found += 1
        if found == _MOST:
            return


# -- ages --------------------------------------------------------------------------------------


def age_faults(
    journal: Journal, bounds: Mapping[str, int], longest_wait: Mapping[str, int]
) -> Iterator[str]:
    """Yield groups that wait longer than a run lets them: in flight, to be retried, to be trained.

    `bounds`: how many updates a sample may be behind; `longest_wait`: in how many steps of its task a
    group may neither land nor be issued again; both by task.
    """
    touched = dict(
        journal.query(
            "SELECT group_id, MAX(at) FROM event_rows WHERE group_id IN (SELECT group_id FROM groups"
            " WHERE state IN ('in_flight', 'buffered')) GROUP BY group_id"
        )
    )
    for task, limit in longest_wait.items():
        commits = _commits(journal, task)
        for group_id, state, drawn_at in journal.query(
            "SELECT group_id, state, drawn_at FROM groups WHERE task = ? AND"
            " (state = 'in_flight' OR (state = 'buffered' AND status != 'completed'))",
            (task,),
        ):
            since = touched.get(group_id, drawn_at)
            first = bisect_right([at for _, at in commits], since)
            if len(commits) - first > limit:
                what = "in flight" if state == "in_flight" else "waiting to be generated again"
                yield (
                    f"group {group_id}: {what} since step {commits[first][0]}, for "
                    f"{len(commits) - first} steps of task {task}, allowed: {limit}"
                )
    for task, bound in bounds.items():
        yield from _unexpired(journal, task, bound)


def _commits(journal: Journal, task: str) -> Sequence[tuple[int, float]]:
    """Return (step, time of its commit) of the steps that trained groups of the task, by time."""
    return journal.query(
        "SELECT step, committed_at FROM steps WHERE committed AND step IN"
        " (SELECT step FROM groups WHERE task = ? AND step IS NOT NULL) ORDER BY committed_at",
        (task,),
    )


def _unexpired(journal: Journal, task: str, bound: int) -> Iterator[str]:
    """Yield buffered groups that the last two steps should have found too old."""
    begun = journal.query("SELECT step, begun_at FROM steps ORDER BY step DESC LIMIT 2")
    if len(begun) < 2:
        return
    (last, _), (_, before) = begun
    for group_id, version in journal.query(
        "SELECT group_id, oldest_version FROM groups WHERE task = ? AND state = 'buffered'"
        " AND status = 'completed' AND landed_at < ? AND ? - oldest_version - 1 > ?",
        (task, before, last, bound),
    ):
        yield (
            f"group {group_id}: buffered for step {last} with tokens of version {version}, "
            f"allowed: at most {bound} updates behind"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
