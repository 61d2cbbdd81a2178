"""The table of groups: each move says from which places it may start, and renews the row's checksum.

Keeps the rows of unfinished groups in memory as they were last written: the checksum of a moved row is
computed from what was written, not from what the file has by now, so damage stays visible.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import RunError
from penstock.store.journal.schema import CHECKED, row_check

_COLUMNS = CHECKED["group_rows"]
_PLACE, _STEP, _REASON = map(_COLUMNS.index, ("place", "step", "drop_reason"))
# the columns behind those of a draw
_AS_DRAWN = ("in_flight", "init", 0, *(None,) * (len(_COLUMNS) - _PLACE - 3))

MOST_KNOWN_PROMPTS = 2**16  # kept in memory, so that a prompt is not encoded at every draw

# The moves of a group: from which places each may start. A move from elsewhere is a fault.
_FROM = {
    "landed": ("in_flight",),  # completed, aborted, failed or refused
    "retried": ("in_flight", "buffered"),  # in flight: it failed, or the run was resumed
    "expired": ("buffered", "in_flight"),  # in flight: it was put back when the run was resumed
    "dropped": ("in_flight", "buffered"),
    "taken": ("buffered",),
}


def _update(kind: str, columns: Sequence[str], also: str = "", sets: str = "") -> str:
    """The UPDATE that moves a group: parameters are the columns, the checksum and the id."""
    sets += ", ".join(f"{column} = ?" for column in (*columns, "row_check"))
    places = ", ".join(f"'{place}'" for place in _FROM[kind])
    return f"UPDATE group_rows SET {sets} WHERE group_id = ? AND place IN ({places}){also}"


class ManyRows:
    """A statement for many rows: up to 64 at once.

    A statement costs more than a row. It also gives the interpreter lock away, and a busy event loop
    keeps the lock for a while before the writer's thread has it again.
    """

    def __init__(self, statement: str, num_columns: int) -> None:
        """statement: `{rows}` stands for the rows."""
        row = f"({', '.join(['?'] * num_columns)})"
        self._sizes = [
            (number * num_columns, statement.format(rows=", ".join([row] * number)))
            for number in (64, 8, 1)
        ]

    def write(self, db: sqlite3.Connection, values: Sequence[Any]) -> None:
        """Write rows; `values` are those of all of them, one row after another."""
        start = 0
        for size, statement in self._sizes:
            end = len(values) - (len(values) - start) % size
            if start < end:
                rows = [values[at : at + size] for at in range(start, end, size)]
                db.executemany(statement, rows)
            start = end


_DRAW = ManyRows(
    "INSERT INTO group_rows(group_id, task, cursor, prompt_id, drawn_at, place, row_check)"
    " VALUES {rows}",
    7,
)
_LAND = _update("landed", (*_COLUMNS[_PLACE:_STEP], *_COLUMNS[_REASON:]))
_MOVE = {
    kind: _update(kind, (*_COLUMNS[_PLACE : _PLACE + 3], "drop_reason"))
    for kind in ("retried", "expired", "dropped")
}
_IS_WHOLE = """ AND status = 'completed' AND num_rollouts <=
    (SELECT COUNT(*) FROM rollout_rows WHERE rollout_rows.group_id = group_rows.group_id)"""
_TAKE = _update("taken", ("step", "position"), _IS_WHOLE, sets="place = 'taken', ")
_READ = f"SELECT {', '.join(_COLUMNS)} FROM group_rows WHERE group_id = ?"


class GroupTable:
    """Writes the rows of groups inside the writer's transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self._unfinished: dict[str, tuple] = {}  # group id -> its row, in the order of _COLUMNS
        self._known_prompts: set[tuple[str, str]] = set()

    def is_new_prompt(self, task: str, prompt_id: str) -> bool:
        """Whether a prompt must be written; True again for one that was forgotten."""
        if len(self._known_prompts) >= MOST_KNOWN_PROMPTS:
            self._known_prompts.clear()
        is_new = (task, prompt_id) not in self._known_prompts
        self._known_prompts.add((task, prompt_id))
        return is_new

    def draw(self, drawn: Iterable[tuple]) -> None:
        """Insert groups: (group id, task, cursor, prompt id, time) each."""
        written: list[Any] = []
        for values in drawn:
            row = self._unfinished[values[0]] = values + _AS_DRAWN
            written += (*values, row[_PLACE], row_check(*row))
        _DRAW.write(self.db, written)

    def land(self, landed: Iterable[tuple[str, tuple, tuple]]) -> None:
        """Move groups that came back: id, columns from place to landed_at, columns from drop_reason on."""
        rows = []
        for group_id, values, last in landed:
            before = self._pop(group_id)
            row = before[:_PLACE] + values + before[_STEP:_REASON] + last
            if values[0] != "dropped":
                self._unfinished[group_id] = row
            rows.append((*values, *last, row_check(*row), group_id))
        self._move_all("landed", _LAND, rows)

    def move(self, kind: str, group_id: str, values: tuple, drop_reason: str | None) -> None:
        """Move a group without a new payload: `values` are place, status and tries."""
        before = self._pop(group_id)
        kept = before[_PLACE + len(values) : _REASON]
        row = (*before[:_PLACE], *values, *kept, drop_reason, *before[_REASON + 1 :])
        if values[0] != "dropped":
            self._unfinished[group_id] = row
        self._move_all(kind, _MOVE[kind], [(*values, drop_reason, row_check(*row), group_id)])

    def take(self, step: int, group_ids: Iterable[str]) -> None:
        """Move the groups of a step's batch, in their order."""
        rows = []
        for position, group_id in enumerate(group_ids):
            row = self._pop(group_id)
            kept = row[_PLACE + 1 : _STEP]
            row = (*row[:_PLACE], "taken", *kept, step, position, *row[_REASON:])
            rows.append((step, position, row_check(*row), group_id))
        self._move_all("taken", _TAKE, rows, f"step {step}: ")

    def _pop(self, group_id: str) -> tuple:
        """The group's row as it was last written, and forget it; all None if never drawn."""
        row = self._unfinished.pop(group_id, None)
        if row is None:
            row = self.db.execute(_READ, (group_id,)).fetchone() or (None,) * len(_COLUMNS)
        return row

    def _move_all(self, kind: str, update: str, rows: Sequence[tuple], who: str = "") -> None:
        """Move the groups; raise an error that names the first one which is not where it should be."""
        if not rows:
            return
        db = self.db
        db.execute("SAVEPOINT move")
        if db.executemany(update, rows).rowcount == len(rows):
            db.execute("RELEASE move")
            return
        db.execute("ROLLBACK TO move")
        for row in rows:  # one by one, to find it
            if db.execute(update, row).rowcount != 1:
                state, allowed = self._state_of(row[-1]), " or ".join(_FROM[kind])
                raise RunError(
                    f"journal: {who}group {row[-1]} is {kind}: got {state}, allowed: {allowed}"
                )

    def _state_of(self, group_id: str) -> str:
        """Say where a group is, as far as a move needs it."""
        row = self.db.execute(
            "SELECT place, status, step, num_rollouts FROM group_rows WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            return "a group that was never drawn"
        place, status, step, num_rollouts = row
        (stored,) = self.db.execute(
            "SELECT COUNT(*) FROM rollout_rows WHERE group_id = ?", (group_id,)
        ).fetchone()
        where = place if step is None else f"{place} by step {step}"
        return f"{where}, {status}, with {stored} of {num_rollouts or 0} rollouts"
