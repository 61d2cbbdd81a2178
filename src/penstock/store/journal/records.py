"""The journal's records, and the table changes that each makes inside the writer's transaction.

The caller makes a record from plain values; the writer's thread does the slow part here (encoding
tokens). A caller does not change a group until its record is durable.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from penstock.errors import RunError
from penstock.store.journal.calls import CallMade, ToolBegun, ToolEnded, prune_calls
from penstock.store.journal.codec import (
    CHECKED,
    GroupTable,
    ManyRows,
    encode_prompt,
    encode_rollout,
    expression,
    prune_payload,
    rollout_key,
    row_check,
    stored_number,
    stored_text,
)
from penstock.types import Arithmetic, Group, Prompt, StepReport

_INSERT_ROLLOUTS = ManyRows("INSERT OR REPLACE INTO rollout_rows VALUES {rows}", 13)
_INSERT_EVENTS = ManyRows(
    "INSERT INTO event_rows(at, group_id, kind, status, tries, reason, num_tokens, reward, oldest_version,"
    " row_check) VALUES {rows}",
    10,
)
_COMMIT_STEP = (
    "UPDATE step_rows SET committed_at = ?, policy_version = ?, digest = ?, metrics = ?, trained = ?,"
    " num_events = ?, chain = ?, row_check = ? WHERE step = ?"
)
_PRUNE_STEP = (
    "UPDATE step_rows SET pruned_at = :pruned_at, row_check ="
    f" {expression('step_rows', pruned_at=':pruned_at')} WHERE step = :step"
)
_REDO_STEP = (
    f"UPDATE step_rows SET digest = :digest, row_check = {expression('step_rows', digest=':digest')}"
    " WHERE step = :step AND committed_at IS NOT NULL"
)


# Records are not frozen: a frozen dataclass takes three times as long to make.


@dataclass(slots=True)
class Drawn:
    """A group was made from a prompt."""

    at: float
    group_id: str
    task: str
    cursor: int
    prompt: Prompt

    @classmethod
    def write_all(cls, tables: GroupTable, records: Sequence[Drawn]) -> None:
        prompts = []
        for record in records:
            key = (record.task, record.prompt.prompt_id)
            if tables.is_new_prompt(*key):
                data = encode_prompt(record.prompt)
                prompts.append((*key, data, row_check(*key, data[-4:])))
        tables.db.executemany("INSERT OR IGNORE INTO prompt_rows VALUES (?, ?, ?, ?)", prompts)
        tables.draw([(r.group_id, r.task, r.cursor, r.prompt.prompt_id, r.at) for r in records])


@dataclass(slots=True)
class Landed:
    """A group came back, with any status; its payload replaces an earlier one."""

    at: float
    group: Group
    place: str  # buffered | dropped | in_flight (it failed and will be tried again at once)
    drop_reason: str | None = None

    @classmethod
    def write_all(cls, tables: GroupTable, records: Sequence[Landed]) -> None:
        rollouts: list[Any] = []
        events: list[Any] = []
        landed = [record._add_values(rollouts, events) for record in records]
        _INSERT_ROLLOUTS.write(tables.db, rollouts)
        tables.land(landed)
        _INSERT_EVENTS.write(tables.db, events)

    def _add_values(self, rollouts: list[Any], events: list[Any]) -> tuple[str, tuple, tuple]:
        """Add the values of the rollouts' rows and of the event's; return the columns of the group."""
        group, at, place = self.group, self.at, self.place
        group_id, status, tries = group.group_id, group.status._value_, group.tries
        total, rewards, version = 0, [], None
        for number, rollout in enumerate(group.rollouts):
            segments, score = rollout.segments, rollout.score
            rollout_id, text, error = rollout.rollout_id, rollout.text, rollout.error
            oldest = newest = segments[0].version if segments else None
            if len(segments) > 1:
                versions = [segment.version for segment in segments]
                oldest, newest = min(versions), max(versions)
            if version is None or (oldest is not None and oldest < version):
                version = oldest
            num_tokens = len(rollout.response_ids)
            total += num_tokens
            reward = None if score is None else score.value
            if reward is not None:
                rewards.append(reward)
            if not text.isascii():
                text = stored_text(text)
            key = rollout_key(group_id, number, rollout_id)
            rollouts += (
                group_id,
                number,
                rollout_id,
                rollout.status._value_,
                rollout.finish_reason,
                num_tokens,
                oldest,
                newest,
                rollout.temperature,
                reward,
                text,
                error and stored_text(error),
                # sqlite3 looks for an adapter of bytes, and for none of a bytearray
                bytearray(encode_rollout(rollout, text=text, key=key)),
            )
        mean = stored_number(sum(rewards) / len(rewards)) if rewards else None
        error = group.error and stored_text(group.error)
        kind = "filtered" if self.drop_reason == "filtered" else "landed"
        event = (at, group_id, kind, status, tries, error, total, mean, version)
        events += (*event, row_check(*event))
        values = (place, status, tries, version, total, mean, at)
        return group_id, values, (self.drop_reason, error, len(group.rollouts))


@dataclass(slots=True)
class Moved:
    """A group moved without a new payload: retried, expired or dropped."""

    at: float
    group_id: str
    kind: str  # retried | expired | dropped
    place: str
    status: str
    tries: int
    reason: str
    drop_reason: str | None = None

    def write(self, tables: GroupTable) -> None:
        values = (self.place, self.status, self.tries)
        tables.move(self.kind, self.group_id, values, self.drop_reason)
        reason = stored_text(self.reason)
        event = (self.at, self.group_id, self.kind, self.status, self.tries, reason, *(None,) * 3)
        _INSERT_EVENTS.write(tables.db, (*event, row_check(*event)))


@dataclass(slots=True)
class StepBegun:
    """The batch of a step, in its order."""

    at: float
    step: int
    group_ids: Sequence[str]

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        if not self.group_ids:
            raise RunError(f"journal: step {self.step} begins without a group, allowed: at least 1")
        last = db.execute("SELECT step, committed_at FROM step_rows ORDER BY step DESC LIMIT 1")
        last_step, committed_at = last.fetchone() or (0, 0.0)
        if last_step != self.step - 1 or committed_at is None:
            state = "not committed" if committed_at is None else "committed"
            raise RunError(
                f"journal: step {self.step} begins, but the last step is {last_step}, which is {state}; "
                f"allowed: after the commit of step {self.step - 1}"
            )
        row = (self.step, self.at, json.dumps(list(self.group_ids)))
        db.execute(
            "INSERT INTO step_rows(step, begun_at, group_ids, row_check) VALUES (?, ?, ?, ?)",
            (*row, row_check(*row, *(None,) * (len(CHECKED["step_rows"]) - len(row)))),
        )
        tables.take(self.step, self.group_ids)


@dataclass(slots=True)
class StepCommitted:
    """The result of a step: version, digest, metrics, and what the trainer says it trained."""

    at: float
    report: StepReport

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        report, step = self.report, self.report.step
        begun_at, group_ids = self._begun(db)
        trained = json.dumps(report.trained) if report.trained else None
        last = db.execute("SELECT chain FROM step_rows WHERE step = ?", (step - 1,)).fetchone()
        (before,) = last or (None,)
        (num_events,) = db.execute("SELECT COALESCE(MAX(number), 0) FROM event_rows").fetchone()
        chain = step_chain(before, step, group_ids, trained, num_events)
        row = (
            *(self.at, report.policy_version, report.digest, json.dumps(report.metrics)),
            *(trained, num_events, chain),
        )
        db.execute(_COMMIT_STEP, (*row, row_check(step, begun_at, group_ids, *row, None), step))
        _record_arithmetic(tables, report)

    def _begun(self, db: sqlite3.Connection) -> tuple[float, str]:
        """When the step was begun, and its batch; raise unless this commit is its own."""
        report, step = self.report, self.report.step
        if report.policy_version != step:
            raise RunError(
                f"journal: step {step} is committed with weights of version "
                f"{report.policy_version}, allowed: version {step}"
            )
        begun = db.execute(
            "SELECT begun_at, group_ids, committed_at FROM step_rows WHERE step = ?", (step,)
        ).fetchone()
        if begun is None or begun[2] is not None:
            state = "was never begun" if begun is None else "is committed already"
            raise RunError(f"journal: step {step} is committed, but it {state}")
        trained = [group_id for group_id, _ in report.trained]
        if trained and trained != json.loads(begun[1]):
            raise RunError(
                f"journal: step {step}: the trainer trained {', '.join(trained)}, allowed: its batch "
                f"{', '.join(json.loads(begun[1]))}"
            )
        return begun[0], begun[1]


def step_chain(
    before: str | None, step: int, group_ids: str | None, trained: str | None, num_events: int
) -> str:
    """The hash of what a committed step says for good, and of the steps before it.

    The digest of the weights is not in it: a step that is redone on a GPU may get another.
    """
    text = json.dumps([before, step, group_ids, trained, num_events])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class StepRedone:
    """A committed step was trained again where bits do not repeat: its weights have a new digest."""

    at: float
    report: StepReport

    def write(self, tables: GroupTable) -> None:
        db, step, digest = tables.db, self.report.step, self.report.digest
        if db.execute(_REDO_STEP, {"step": step, "digest": digest}).rowcount != 1:
            raise RunError(f"journal: step {step} is redone, but it was never committed")
        WeightsSeen(self.at, "redone", None, step, digest).write(tables)
        _record_arithmetic(tables, self.report)


_ARITHMETIC, _UNTIL = "arithmetic", "arithmetic until step "  # names of facts


def _record_arithmetic(tables: GroupTable, report: StepReport) -> None:
    """Record the trainer's arithmetic where it changes; the one before counts until the step before."""
    if report.arithmetic is None:
        return
    now = json.dumps(asdict(report.arithmetic))
    row = tables.db.execute(
        "SELECT value FROM identity_rows WHERE name = ?", (_ARITHMETIC,)
    ).fetchone()
    if row is None or row[0] != now:
        earlier = row is not None and report.step > 1
        before = {f"{_UNTIL}{report.step - 1}": row[0]} if earlier else {}
        Identified({**before, _ARITHMETIC: now}).write(tables)


def arithmetic_since(facts: Mapping[str, str], step: int) -> list[Arithmetic]:
    """Every arithmetic that the journal's facts name for a step or later ones, in order."""
    ends = sorted(int(name.removeprefix(_UNTIL)) for name in facts if name.startswith(_UNTIL))
    names = [*(f"{_UNTIL}{end}" for end in ends if end >= step), _ARITHMETIC]
    return [Arithmetic(**json.loads(facts[name])) for name in names if name in facts]


@dataclass(slots=True)
class StepPruned:
    """The tokens of a step's groups, and of groups dropped during it, are removed for good."""

    at: float
    step: int
    keep_text: bool

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        trained = db.execute("SELECT group_id FROM group_rows WHERE step = ?", (self.step,))
        dropped = db.execute(  # between the commit of the step before and its own
            "SELECT DISTINCT group_id FROM event_rows WHERE kind IN ('dropped', 'filtered') AND number"
            " > COALESCE((SELECT num_events FROM step_rows WHERE step = ? - 1), 0) AND number"
            " <= (SELECT num_events FROM step_rows WHERE step = ?)",
            (self.step, self.step),
        )
        groups = [group_id for (group_id,) in (*trained, *dropped)]
        db.executemany(
            "UPDATE rollout_rows SET data = ?, text = ? WHERE group_id = ? AND number = ?",
            [row for group_id in groups for row in self._pruned(db, group_id)],
        )
        for group_id in groups:
            prune_calls(db, group_id, keep_text=self.keep_text)
        db.execute(_PRUNE_STEP, {"step": self.step, "pruned_at": self.at})

    def _pruned(self, db: sqlite3.Connection, group_id: str) -> Iterator[tuple]:
        rows = db.execute(
            "SELECT number, rollout_id, text, data FROM rollout_rows WHERE group_id = ?",
            (group_id,),
        )
        for number, rollout_id, text, data in rows.fetchall():
            kept = text if self.keep_text else ""
            pruned = prune_payload(data, text, rollout_key(group_id, number, rollout_id), kept)
            if pruned is not None:  # what is damaged stays as it is, for the audit to find
                yield pruned, kept, group_id, number


@dataclass(slots=True)
class WeightsSeen:
    """Weights were published by the trainer or confirmed by an engine."""

    at: float
    kind: str  # published | confirmed | redone
    engine: str | None
    version: int
    digest: str

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        row = (self.at, self.kind, self.engine, self.version, self.digest)
        db.execute(
            "INSERT INTO weight_rows(at, kind, engine, version, digest, row_check)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (*row, row_check(*row)),
        )


@dataclass(slots=True)
class Identified:
    """Facts that identify the run: its data, config and code."""

    values: dict[str, str]

    def write(self, tables: GroupTable) -> None:
        db = tables.db
        db.executemany(
            "INSERT OR REPLACE INTO identity_rows(name, value, row_check) VALUES (?, ?, ?)",
            [(*pair, row_check(*pair)) for pair in self.values.items()],
        )


Record = (
    Drawn
    | Landed
    | Moved
    | StepBegun
    | StepCommitted
    | StepRedone
    | StepPruned
    | WeightsSeen
    | Identified
    | CallMade
    | ToolBegun
    | ToolEnded
)


def write_in_order(tables: GroupTable, records: Sequence[Record]) -> None:
    """Write the records in order; consecutive draws and landings go in one call each."""
    for kind, run in itertools.groupby(records, type):
        same = cast(Any, list(run))
        if kind in (Drawn, Landed):
            cast(Any, kind).write_all(tables, same)
        else:
            for record in same:
                record.write(tables)
