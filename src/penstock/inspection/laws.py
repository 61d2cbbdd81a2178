"""The laws that a journal must keep: its rows, the chain of weights, and the tokens.

Numbers of rows were written down when they were made, so a row that is missing is missed. Each step holds the
trainer's own record of what it trained, and a hash over that record and all before it. The sampler's formula
says which cursors draw the same prompt. Weights are trained, published, loaded and confirmed under one digest.
Every trained id was given to an engine or sampled by it, and trained once.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.data.sampler import epoch_order
from penstock.errors import RunError
from penstock.rollout.agent.tree import CallTree
from penstock.store.journal import Journal
from penstock.store.journal.records import step_chain
from penstock.types import ModelCall, Rollout, contradicts

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
    for sentence, rows in _LAWS:
        for row in journal.query(f"{rows} LIMIT {_MOST}"):
            yield sentence.format(*row)
    yield from _batch_faults(journal)
    yield from _step_faults(journal)
    if not recorded:  # in a fork, versions and steps belong to two runs
        chosen = frozenset().union(*(era.chosen for era in eras))
        yield from _prompt_faults(journal, eras[-1].seed, chosen)
        yield from _age_faults(journal, eras)
        for task, step, value in staleness(journal):
            bound = _bound(task, step, eras)
            if bound is not None and value > bound:
                yield f"task {task}: step {step} trained a sample of staleness {value}, allowed: {bound}"


# -- groups and batches ------------------------------------------------------------------------


_TAKEN = "SELECT group_id FROM groups WHERE state IN ('taken', 'trained') AND"
_NO_DRAW = "WHERE group_id NOT IN (SELECT group_id FROM group_rows)"
_GAPS = (
    "SELECT last - rows, last FROM (SELECT COUNT(*) AS rows, COALESCE(MAX(number), 0) AS last FROM"
)
_LAWS = (  # (sentence, the rows that break it), at most `_MOST` of each
    (
        "group {}: was dropped without a reason",
        "SELECT group_id FROM groups WHERE state = 'dropped' AND drop_reason IS NULL",
    ),
    ("group {}: was taken but is not completed", f"{_TAKEN} status != 'completed'"),
    ("group {}: was taken but never landed", f"{_TAKEN} landed_at IS NULL"),
    (
        "group {}: was taken, but its landing is not recorded",
        f"{_TAKEN} group_id NOT IN (SELECT group_id FROM event_rows WHERE kind = 'landed')",
    ),
    (
        "group {}: trained {} times",
        "SELECT value, COUNT(*) FROM steps, json_each(group_ids) GROUP BY value HAVING COUNT(*) > 1",
    ),
    ("{} of {} events of groups are missing", f"{_GAPS} event_rows) WHERE rows != last"),
    ("{} of {} records of weights are missing", f"{_GAPS} weight_rows) WHERE rows != last"),
    (
        "step {}: {} events were there when it was committed, now {}",
        "SELECT MIN(step), num_events, last FROM steps, (SELECT COALESCE(MAX(number), 0) AS last"
        " FROM event_rows) WHERE num_events > last GROUP BY last",
    ),
    (
        "group {}: its draw is missing, but event_rows has rows of it",
        f"SELECT DISTINCT group_id FROM event_rows {_NO_DRAW}",
    ),
    (
        "group {}: its draw is missing, but rollout_rows has rows of it",
        f"SELECT DISTINCT group_id FROM rollout_rows {_NO_DRAW}",
    ),
    (
        "group {}: it has {} rollouts with {} tokens, but {} with {} tokens landed",
        "SELECT group_id, COALESCE(found, 0), COALESCE(tokens, 0), COALESCE(num_rollouts, 'its rollouts'),"
        " groups.num_tokens FROM groups LEFT JOIN (SELECT group_id, COUNT(*) AS found,"
        " SUM(num_tokens) AS tokens FROM rollout_rows GROUP BY group_id) USING(group_id) WHERE landed_at"
        " IS NOT NULL AND (found IS NULL OR found != COALESCE(num_rollouts, found)"
        " OR tokens IS NOT groups.num_tokens)",
    ),
    (  # SQLite adds in another order
        "group {}: its reward is {:g}, but the mean of its rollouts' is {:g}",
        "SELECT group_id, groups.reward, mean FROM groups JOIN (SELECT group_id, AVG(reward) AS mean"
        " FROM rollout_rows GROUP BY group_id) USING(group_id) WHERE landed_at IS NOT NULL"
        " AND ABS(mean - groups.reward) > 1e-9 * (1 + ABS(mean))",
    ),
)


def _batch_faults(journal: Journal) -> Iterator[str]:
    """Compare batches with groups: equal members, no step missing."""
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


# -- prompts -----------------------------------------------------------------------------------


def _prompt_faults(journal: Journal, seed: int, chosen: frozenset[str]) -> Iterator[str]:
    """Draws that the sampler would not make: each prompt comes once in an epoch, unless it is `chosen`.

    Needs the number of prompts, which a run records; groups from before a change of the data are
    left out.
    """
    facts = journal.read_identity()
    for (task,) in journal.query("SELECT DISTINCT task FROM groups"):
        size = json.loads(facts.get(f"tasks.{task}.data", "{}")).get("prompts")
        if not size or task in chosen:
            continue
        rows = journal.query(
            "SELECT cursor, prompt_id FROM groups WHERE task = ? AND cursor >= ? ORDER BY cursor",
            (task, int(facts.get(f"tasks.{task}.data since cursor", "0"))),
        )
        order, epoch = np.zeros(0, dtype=np.int64), -1
        by_place: dict[int, tuple[int, str]] = {}  # place in the data -> a cursor and its prompt
        by_prompt: dict[str, tuple[int, int]] = {}  # prompt -> a cursor and its place in the data
        faults = list[str]()
        for cursor, prompt_id in rows:
            if cursor // size != epoch:
                epoch = cursor // size
                order = epoch_order(seed, task, epoch, size)
            place = int(order[cursor % size])
            first, prompt = by_place.setdefault(place, (cursor, prompt_id))
            other, place_before = by_prompt.setdefault(prompt_id, (cursor, place))
            if prompt != prompt_id:
                pair = f"cursors {first} and {cursor} draw one prompt, got {prompt} and {prompt_id}"
                faults.append(f"task {task}: {pair}")
            elif place_before != place:
                pair = f"cursors {other} and {cursor} draw different prompts, both got {prompt_id}"
                faults.append(f"task {task}: {pair}")
        yield from faults[:_MOST]


# -- ages --------------------------------------------------------------------------------------


def _age_faults(journal: Journal, eras: Sequence[EraBounds]) -> Iterator[str]:
    """Groups that wait longer than a run lets them: in flight, to be retried, to be trained."""
    # By the numbers of events, never by the clock, which can be put back under a run.
    for task, limit in eras[-1].longest_wait.items():
        commits = journal.query(  # of steps that trained groups of the task, with the events before
            "SELECT step, num_events FROM steps WHERE committed AND step IN"
            " (SELECT step FROM groups WHERE task = ? AND step IS NOT NULL) ORDER BY step",
            (task,),
        )
        for group_id, state, since in _waiting(journal, task):
            first = bisect_left([num_events for _, num_events in commits], since)
            if len(commits) - first > limit:
                what = "in flight" if state == "in_flight" else "waiting to be generated again"
                yield (
                    f"group {group_id}: {what} since step {commits[first][0]}, for "
                    f"{len(commits) - first} steps of task {task}, allowed: {limit}"
                )
    (last,) = journal.query("SELECT MAX(step) FROM steps")[0]
    for task in eras[-1].allowed:
        bound = _bound(task, last or 1, eras)
        if bound is not None:
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


def staleness(journal: Journal) -> list[tuple[str, int, int]]:
    """(task, step, largest staleness of a rollout that it trained), by the oldest token."""
    return journal.query(
        "SELECT task, step, MAX(step - oldest_version - 1) FROM rollouts"
        " WHERE step IS NOT NULL AND oldest_version IS NOT NULL GROUP BY task, step ORDER BY step"
    )


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


# -- tokens -------------------------------------------------------------------------------------


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
    trained = journal.query(
        "SELECT step, trained FROM steps WHERE committed AND trained IS NOT NULL AND pruned_at IS NULL"
    )
    records = {  # the trainer's hash of each group that it trained and that has its tokens
        (step, group_id): fingerprint
        for step, groups in trained
        for group_id, fingerprint in json.loads(groups)
    }
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
    outcomes = dict(journal.query("SELECT outcome, COUNT(*) FROM tools GROUP BY outcome"))
    if outcomes:
        ended = {name: outcomes.get(name, 0) for name in ("done", "failed", "unknown")}
        contents.tools = ended | {"unknown": ended["unknown"] + outcomes.get(None, 0)}
    return contents


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


# -- the chain of weights -----------------------------------------------------------------------


def chain_faults(journal: Journal, *, recorded: bool = False) -> list[str]:
    """What breaks the chain. `recorded`: a fork, whose versions are those of its origin."""
    published, confirmed, redone = (
        _seen(journal, kind) for kind in ("published", "confirmed", "redone")
    )
    faults = [
        f"weights {version}: an engine confirmed digest {digest}, the trainer published "
        f"{_words(published.get(version))}"
        # a restarted trainer publishes what it redid
        for version, digests in sorted(confirmed.items())
        for digest in sorted(digests - published.get(version, set()) - redone.get(version, set()))
    ]
    rows = journal.query("SELECT step, policy_version, digest FROM steps WHERE committed")
    for step, version, digest in () if recorded else rows:
        if version != step:
            faults.append(f"step {step}: committed version {version}, expected version {step}")
        known = published.get(version, set()) | redone.get(version, set())
        if version in published and digest not in known:
            faults.append(
                f"weights {version}: published with digest {_words(published[version])}, "
                f"committed with {digest}"
            )
    versions: set[int] = set()
    rows = journal.query(
        "SELECT DISTINCT oldest_version, newest_version FROM rollouts"
        " WHERE step IS NOT NULL AND oldest_version IS NOT NULL"
    )
    for oldest, newest in rows:
        versions |= {oldest, newest}
        if newest - oldest > 1:  # versions in between are only in the payloads
            for (group_id,) in journal.query(
                "SELECT DISTINCT group_id FROM rollouts"
                " WHERE step IS NOT NULL AND oldest_version = ? AND newest_version = ?",
                (oldest, newest),
            ):
                rollouts = journal.group(group_id).rollouts
                versions |= {s.version for rollout in rollouts for s in rollout.segments}
    for version in sorted(versions):
        named = f"weights {version}: trained rollouts name them"
        if version not in published:
            faults.append(f"{named}, the trainer never published them")
        elif version not in confirmed:
            faults.append(f"{named}, no engine confirmed them")
    return faults


def redone_versions(journal: Journal) -> list[str]:
    """A line per version whose step was redone where bits do not repeat, with all its digests."""
    published, redone = _seen(journal, "published"), _seen(journal, "redone")
    lines = []
    for version in sorted(published.keys() | redone.keys()):
        digests = published.get(version, set()) | redone.get(version, set())
        if len(digests) > 1 or version in redone:
            lines.append(
                f"weights {version}: redone after a crash, with other bits ({_words(digests)})"
            )
    return lines


def _seen(journal: Journal, kind: str) -> dict[int, set[str]]:
    by_version: dict[int, set[str]] = {}
    for version, digest in journal.query(
        "SELECT DISTINCT version, digest FROM weights WHERE kind = ?", (kind,)
    ):
        by_version.setdefault(version, set()).add(digest)
    return by_version


def _words(digests: set[str] | None) -> str:
    return " and ".join(sorted(digests)) if digests else "nothing"
