"""What one journal record does to the tables. Layer 1; runs inside the writer's transaction.

Each record is made on the caller's side with plain values; the heavy part (encoding tokens) is done
here, on the writer's side. Callers leave a group alone until its record is durable.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.errors import RunError
from penstock.journal.codec import encode_prompt, encode_rollout, stored_text
from penstock.types import Group, Prompt, Rollout, StepReport

_INSERT_ROLLOUT = f"INSERT OR REPLACE INTO rollout_rows VALUES ({', '.join('?' * 13)})"
_INSERT_EVENT = (
    "INSERT INTO event_rows(at, group_id, kind, status, tries, reason, num_tokens, reward, oldest_version)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(slots=True, frozen=True)
class Drawn:
    """A group was made from a prompt."""

    at: float
    group_id: str
    task: str
    cursor: int
    prompt: Prompt
    new_prompt: bool

    @classmethod
    def write_all(cls, db: sqlite3.Connection, records: Sequence[Drawn]) -> None:
        db.executemany(
            "INSERT OR IGNORE INTO prompt_rows VALUES (?, ?, ?)",
            [
                (r.task, r.prompt.prompt_id, encode_prompt(r.prompt))
                for r in records
                if r.new_prompt
            ],
        )
        db.executemany(
            "INSERT INTO group_rows(group_id, task, cursor, prompt_id, drawn_at, place)"
            " VALUES (?, ?, ?, ?, ?, 'in_flight')",
            [(r.group_id, r.task, r.cursor, r.prompt.prompt_id, r.at) for r in records],
        )


@dataclass(slots=True, frozen=True)
class Landed:
    """A group came back, whatever its status; its payload replaces an earlier one."""

    at: float
    group: Group
    place: str  # buffered | dropped | in_flight (it failed and will be tried again at once)
    drop_reason: str | None = None

    @classmethod
    def write_all(cls, db: sqlite3.Connection, records: Sequence[Landed]) -> None:
        rollouts: list[tuple] = []
        groups: list[tuple] = []
        events: list[tuple] = []
        for record in records:
            record._add_rows(rollouts, groups, events)
        db.executemany(_INSERT_ROLLOUT, rollouts)
        changed = db.executemany(
            "UPDATE group_rows SET place = ?, status = ?, tries = ?, oldest_version = ?, num_tokens = ?,"
            " reward = ?, landed_at = ?, drop_reason = ?, error = ? WHERE group_id = ?",
            groups,
        ).rowcount
        _expect(len(records), changed, [record.group.group_id for record in records])
        db.executemany(_INSERT_EVENT, events)

    def _add_rows(self, rollouts: list[tuple], groups: list[tuple], events: list[tuple]) -> None:
        group, status = self.group, self.group.status.value
        scores = [r.score.value for r in group.rollouts if r.score is not None]
        reward = sum(scores) / len(scores) if scores else None
        oldest, tokens = group.oldest_version, group.num_response_tokens
        error = stored_text(group.error)
        rollouts.extend(
            _rollout_row(group.group_id, number, r) for number, r in enumerate(group.rollouts)
        )
        fate = (oldest, tokens, reward, self.at, self.drop_reason, error, group.group_id)
        groups.append((self.place, status, group.tries, *fate))
        kind = self.drop_reason if self.drop_reason == "filtered" else "landed"
        event = (self.at, group.group_id, kind, status, group.tries, error)
        events.append((*event, tokens, reward, oldest))


@dataclass(slots=True, frozen=True)
class Moved:
    """A group changed its place without a new payload: retried, expired or dropped."""

    at: float
    group_id: str
    kind: str  # retried | expired | dropped
    place: str
    status: str
    tries: int
    reason: str
    drop_reason: str | None = None

    def write(self, db: sqlite3.Connection) -> None:
        changed = db.execute(
            "UPDATE group_rows SET place = ?, status = ?, tries = ?, drop_reason = ? WHERE group_id = ?",
            (self.place, self.status, self.tries, self.drop_reason, self.group_id),
        ).rowcount
        _expect(1, changed, [self.group_id])
        event = (self.at, self.group_id, self.kind, self.status, self.tries)
        db.execute(_INSERT_EVENT, (*event, stored_text(self.reason), None, None, None))


@dataclass(slots=True, frozen=True)
class StepBegun:
    """The batch of a step, in its order."""

    at: float
    step: int
    group_ids: Sequence[str]

    def write(self, db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO step_rows(step, begun_at, group_ids) VALUES (?, ?, ?)",
            (self.step, self.at, json.dumps(list(self.group_ids))),
        )
        changed = db.executemany(
            "UPDATE group_rows SET place = 'taken', step = ?, position = ?"
            " WHERE group_id = ? AND place = 'buffered' AND status = 'completed'",
            [(self.step, position, group_id) for position, group_id in enumerate(self.group_ids)],
        ).rowcount
        if changed != len(self.group_ids):
            raise RunError(
                f"journal: step {self.step} takes {len(self.group_ids)} groups, but only {changed} of "
                "them are completed and buffered"
            )


@dataclass(slots=True, frozen=True)
class StepCommitted:
    """What the step did to the weights."""

    at: float
    report: StepReport

    def write(self, db: sqlite3.Connection) -> None:
        report = self.report
        db.execute(
            "INSERT INTO step_rows(step, committed_at, policy_version, digest, metrics) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT(step) DO UPDATE SET committed_at = excluded.committed_at,"
            " policy_version = excluded.policy_version, digest = excluded.digest, metrics = excluded.metrics",
            (
                report.step,
                self.at,
                report.policy_version,
                report.digest,
                json.dumps(report.metrics),
            ),
        )


@dataclass(slots=True, frozen=True)
class WeightsSeen:
    """Weights were published by the trainer or confirmed by an engine."""

    at: float
    kind: str  # published | confirmed
    engine: str | None
    version: int
    digest: str

    def write(self, db: sqlite3.Connection) -> None:
        row = (self.at, self.kind, self.engine, self.version, self.digest)
        db.execute(
            "INSERT INTO weight_rows(at, kind, engine, version, digest) VALUES (?, ?, ?, ?, ?)", row
        )


Record = Drawn | Landed | Moved | StepBegun | StepCommitted | WeightsSeen


def write_in_order(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Write the records one after another; runs of those that come in numbers go in one call."""
    for kind, run in itertools.groupby(records, type):
        same = cast(Any, list(run))
        if kind in (Drawn, Landed):
            cast(Any, kind).write_all(db, same)
        else:
            for record in same:
                record.write(db)


def _rollout_row(group_id: str, number: int, rollout: Rollout) -> tuple:
    segments = rollout.segments
    return (
        group_id,
        number,
        rollout.rollout_id,
        rollout.status.value,
        rollout.finish_reason,
        len(rollout.response_ids),
        min((s.version for s in segments), default=None),
        max((s.version for s in segments), default=None),
        rollout.temperature,
        None if rollout.score is None else rollout.score.value,
        stored_text(rollout.text),
        stored_text(rollout.error),
        encode_rollout(rollout, with_text=False),
    )


def _expect(expected: int, changed: int, group_ids: Sequence[str]) -> None:
    if changed != expected:
        named = ", ".join(group_ids[:5])
        raise RunError(f"journal: got a record of a group that was never drawn, among {named}")
