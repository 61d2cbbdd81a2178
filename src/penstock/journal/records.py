"""The journal's records, and the table changes that each makes inside the writer's transaction.

The caller makes a record from plain values; the writer's thread does the slow part here (encoding
tokens). A caller does not change a group until its record is durable.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.errors import RunError
from penstock.journal.checks import expression, rollout_key, row_check
from penstock.journal.codec import encode_prompt, encode_rollout, stored_number, stored_text
from penstock.types import Group, Prompt, Rollout, StepReport

_INSERT_ROLLOUT = f"INSERT OR REPLACE INTO rollout_rows VALUES ({', '.join('?' * 13)})"
_INSERT_EVENT = (
    "INSERT INTO event_rows(at, group_id, kind, status, tries, reason, num_tokens, reward, oldest_version,"
    " row_check) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_GROUP = (
    "INSERT INTO group_rows(group_id, task, cursor, prompt_id, drawn_at, place, row_check)"
    " VALUES (?, ?, ?, ?, ?, 'in_flight', ?)"
)
_AS_DRAWN = ("in_flight", "init", 0, *(None,) * 9)  # values of all other columns


def _update_group(*columns: str, where: str = "", **fixed: str) -> str:
    """Return the UPDATE that sets columns of a group from parameters and renews the row's checksum."""
    values = {column: f":{column}" for column in columns} | fixed
    sets = ", ".join(f"{column} = {value}" for column, value in values.items())
    check = expression("group_rows", **values)
    return f"UPDATE group_rows SET {sets}, row_check = {check} WHERE group_id = :group_id{where}"


_MOVED = ("place", "status", "tries", "drop_reason")
_LANDED = (*_MOVED, "oldest_version", "num_tokens", "reward", "landed_at", "error")
_LAND_GROUP, _MOVE_GROUP = _update_group(*_LANDED), _update_group(*_MOVED)
_TAKE_GROUP = _update_group(
    "step", "position", place="'taken'", where=" AND place = 'buffered' AND status = 'completed'"
)
_COMMITTED = {
    column: f":{column}" for column in ("committed_at", "policy_version", "digest", "metrics")
}
_AS_NEW = expression(
    "step_rows",
    step=":step",
    **dict.fromkeys(
        ("begun_at", "group_ids", "trained", "num_events", "chain", "pruned_at"), "NULL"
    ),
    **_COMMITTED,
)
_COMMIT_STEP = (
    f"INSERT INTO step_rows(step, {', '.join(_COMMITTED)}, row_check)"
    f" VALUES (:step, {', '.join(_COMMITTED.values())}, {_AS_NEW}) ON CONFLICT(step) DO UPDATE SET "
    + ", ".join(f"{column} = {value}" for column, value in _COMMITTED.items())
    + f", row_check = {expression('step_rows', **_COMMITTED)}"
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
            "INSERT OR IGNORE INTO prompt_rows VALUES (?, ?, ?, ?)",
            [_prompt_row(r) for r in records if r.new_prompt],
        )
        rows = [(r.group_id, r.task, r.cursor, r.prompt.prompt_id, r.at) for r in records]
        db.executemany(_INSERT_GROUP, [(*row, row_check(*row, *_AS_DRAWN)) for row in rows])


@dataclass(slots=True, frozen=True)
class Landed:
    """A group came back, with any status; its payload replaces an earlier one."""

    at: float
    group: Group
    place: str  # buffered | dropped | in_flight (it failed and will be tried again at once)
    drop_reason: str | None = None

    @classmethod
    def write_all(cls, db: sqlite3.Connection, records: Sequence[Landed]) -> None:
        rollouts: list[tuple] = []
        groups: list[dict[str, Any]] = []
        events: list[tuple] = []
        for record in records:
            record._add_rows(rollouts, groups, events)
        db.executemany(_INSERT_ROLLOUT, rollouts)
        changed = db.executemany(_LAND_GROUP, groups).rowcount
        _expect(len(records), changed, [record.group.group_id for record in records])
        db.executemany(_INSERT_EVENT, events)

    def _add_rows(
        self, rollouts: list[tuple], groups: list[dict[str, Any]], events: list[tuple]
    ) -> None:
        group, status = self.group, self.group.status.value
        scores = [r.score.value for r in group.rollouts if r.score is not None]
        reward = stored_number(sum(scores) / len(scores)) if scores else None
        oldest, tokens = group.oldest_version, group.num_response_tokens
        error = stored_text(group.error)
        rollouts.extend(
            _rollout_row(group.group_id, number, r) for number, r in enumerate(group.rollouts)
        )
        groups.append(
            {
                "group_id": group.group_id,
                "place": self.place,
                "status": status,
                "tries": group.tries,
                "drop_reason": self.drop_reason,
                "oldest_version": oldest,
                "num_tokens": tokens,
                "reward": reward,
                "landed_at": self.at,
                "error": error,
            }
        )
        kind = self.drop_reason if self.drop_reason == "filtered" else "landed"
        event = (self.at, group.group_id, kind, status, group.tries, error, tokens, reward, oldest)
        events.append((*event, row_check(*event)))


@dataclass(slots=True, frozen=True)
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

    def write(self, db: sqlite3.Connection) -> None:
        changed = db.execute(
            _MOVE_GROUP,
            {
                "group_id": self.group_id,
                "place": self.place,
                "status": self.status,
                "tries": self.tries,
                "drop_reason": self.drop_reason,
            },
        ).rowcount
        _expect(1, changed, [self.group_id])
        reason = stored_text(self.reason)
        event = (self.at, self.group_id, self.kind, self.status, self.tries, reason, *(None,) * 3)
        db.execute(_INSERT_EVENT, (*event, row_check(*event)))


@dataclass(slots=True, frozen=True)
class StepBegun:
    """The batch of a step, in its order."""

    at: float
    step: int
    group_ids: Sequence[str]

    def write(self, db: sqlite3.Connection) -> None:
        row = (self.step, self.at, json.dumps(list(self.group_ids)))
        db.execute(
            "INSERT INTO step_rows(step, begun_at, group_ids, row_check) VALUES (?, ?, ?, ?)",
            (*row, row_check(*row, *(None,) * 8)),
        )
        changed = db.executemany(
            _TAKE_GROUP,
            [
                {"group_id": group_id, "step": self.step, "position": position}
                for position, group_id in enumerate(self.group_ids)
            ],
        ).rowcount
        if changed != len(self.group_ids):
            raise RunError(
                f"journal: step {self.step} takes {len(self.group_ids)} groups, but only {changed} of "
                "them are completed and buffered"
            )


@dataclass(slots=True, frozen=True)
class StepCommitted:
    """The result of a step: version, digest and metrics."""

    at: float
    report: StepReport

    def write(self, db: sqlite3.Connection) -> None:
        report = self.report
        db.execute(
            _COMMIT_STEP,
            {
                "step": report.step,
                "committed_at": self.at,
                "policy_version": report.policy_version,
                "digest": report.digest,
                "metrics": json.dumps(report.metrics),
            },
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
            "INSERT INTO weight_rows(at, kind, engine, version, digest, row_check)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (*row, row_check(*row)),
        )


@dataclass(slots=True, frozen=True)
class Identified:
    """Facts that identify the run: its data, config and code."""

    values: dict[str, str]

    def write(self, db: sqlite3.Connection) -> None:
        db.executemany(
            "INSERT OR REPLACE INTO identity_rows(name, value, row_check) VALUES (?, ?, ?)",
            [(*pair, row_check(*pair)) for pair in self.values.items()],
        )


Record = Drawn | Landed | Moved | StepBegun | StepCommitted | WeightsSeen | Identified


def write_in_order(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Write the records in order; consecutive draws and landings go in one call each."""
    for kind, run in itertools.groupby(records, type):
        same = cast(Any, list(run))
        if kind in (Drawn, Landed):
            cast(Any, kind).write_all(db, same)
        else:
            for record in same:
                record.write(db)


def _prompt_row(record: Drawn) -> tuple:
    data = encode_prompt(record.prompt)
    key = (record.task, record.prompt.prompt_id)
    return (*key, data, row_check(*key, data[-4:]))


def _rollout_row(group_id: str, number: int, rollout: Rollout) -> tuple:
    segments = rollout.segments
    key = rollout_key(group_id, number, rollout.rollout_id)
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
        encode_rollout(rollout, with_text=False, key=key),
    )


def _expect(expected: int, changed: int, group_ids: Sequence[str]) -> None:
    if changed != expected:
        named = ", ".join(group_ids[:5])
        raise RunError(f"journal: got a record of a group that was never drawn, among {named}")
