"""The command log of a service: an SQLite file with every command, its answer, and what the answers made.

A command is committed before it is promised, its answer before it is given; so a kill at any moment leaves each
command without an answer (it runs again from the same state) or with the one that the client gets. Rows carry
a checksum. The file is written by one thread; a file of another format is refused. Bodies and results are the
last columns: a look at the others does not read through them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import RunError
from penstock.store import wire
from penstock.store.journal.schema import Schema, named_errors, open_database

FILE = "commands.db"
FORWARD_BACKWARD, OPTIM_STEP = "forward_backward", "optim_step"  # kinds whose answers have metrics
_TABLES = """
CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions(
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, begun_at REAL NOT NULL, ended_at REAL) WITHOUT ROWID;
CREATE TABLE commands(
    number INTEGER PRIMARY KEY, line TEXT NOT NULL, seq INTEGER NOT NULL, owner TEXT NOT NULL,
    kind TEXT NOT NULL, at REAL NOT NULL,
    outcome TEXT,                   -- done | failed; NULL: it has no answer yet
    digest TEXT, done_at REAL, runs INTEGER NOT NULL DEFAULT 0,
    emptied INTEGER NOT NULL DEFAULT 0,  -- 1: body and result were kept long enough
    metrics TEXT,                   -- those of the result, which stay
    row_check TEXT NOT NULL, result_check TEXT,
    body BLOB NOT NULL, result BLOB, UNIQUE(line, seq));
CREATE TABLE checkpoints(
    path TEXT PRIMARY KEY, model_id TEXT NOT NULL, owner TEXT NOT NULL, folder TEXT NOT NULL,
    digest TEXT NOT NULL, kind TEXT NOT NULL, size_bytes INTEGER NOT NULL, at REAL NOT NULL,
    expires_at REAL, metadata TEXT) WITHOUT ROWID;
CREATE TABLE samplers(
    sampler_id TEXT PRIMARY KEY, owner TEXT NOT NULL, model_path TEXT, folder TEXT, digest TEXT) WITHOUT ROWID;
"""
_LOG = Schema("command log", f"the {FILE} of a service's folder", _TABLES, 3)


@dataclass(slots=True, frozen=True, kw_only=True)
class Command:
    """One row of the log. A line is what orders commands: a model, a sampler, or the models of a session."""

    number: int
    line: str
    seq: int
    owner: str
    kind: str
    body: bytes
    outcome: str | None = None  # done | failed
    result: bytes = b""
    digest: str | None = None  # of the trained weights after it
    emptied: bool = False  # its body and result are not kept any more

    @property
    def request_id(self) -> str:
        return f"{self.line}#{self.seq}"

    @property
    def fields(self) -> dict[str, Any]:
        """The body of a command in JSON."""
        fields: dict[str, Any] = json.loads(self.body)
        return fields

    def is_asked_by(self, kind: str, body: bytes) -> bool:
        """Whether a request is this command again; the order of a map's keys in its bytes means nothing."""
        if kind != self.kind or self.emptied or body == self.body:
            return kind == self.kind
        if kind != FORWARD_BACKWARD:
            return False
        one, other = (wire.decode("ForwardBackwardRequest", each) for each in (body, self.body))
        return one == other


_COLUMNS = "number, line, seq, owner, kind, body, outcome, result, digest, emptied"
Values = Sequence[object] | Mapping[str, object]


class CommandLog:
    """Reads and writes the file."""

    def __init__(self, path: Path, *, readonly: bool = False, brief: bool = False) -> None:
        self._path = path
        self._file = open_database(path, readonly=readonly, brief=brief, kind=_LOG)

    @classmethod
    @contextmanager
    def look(cls, path: Path) -> Iterator[CommandLog]:
        """The log at one moment, also that of a live service; nothing is written, and no query runs for ever."""
        with closing(cls(path, readonly=True, brief=True)) as log:
            with named_errors(path, "be read", _LOG):
                log.query("BEGIN")
                yield log

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Commit what is written inside at once, or none of it."""
        self.query("BEGIN IMMEDIATE")
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            if self._file.in_transaction:  # a full disk has ended it already
                self.query("ROLLBACK")
            raise

    def query(self, sql: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        with named_errors(self._path, "be used", _LOG):
            return self._file.execute(sql, values).fetchall()

    def records(self, sql: str, values: Values = ()) -> list[dict[str, Any]]:
        """The rows of a statement, by the names of their columns."""
        cursor = self._file.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def fact(self, name: str, value: str | None = None) -> str:
        """A fact about the service; with a value, keep it if there is none yet."""
        if value is not None:
            self.query("INSERT OR IGNORE INTO facts VALUES(?, ?)", (name, value))
        rows = self.query("SELECT value FROM facts WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else ""

    # ---- commands

    def add(self, line: str, seq: int, owner: str, kind: str, body: bytes) -> Command:
        """Write a new command."""
        check = _check(line, seq, owner, kind, body)
        rows = self.query(
            "INSERT INTO commands(line, seq, owner, kind, body, at, row_check) "
            f"VALUES(?, ?, ?, ?, ?, ?, ?) RETURNING {_COLUMNS}",
            (line, seq, owner, kind, body, time.time(), check),
        )
        return _command(rows[0])

    def begin(self, command: Command) -> int:
        """Note that a command runs; how often it has: one that was killed while it ran has several runs and one answer."""
        sql = "UPDATE commands SET runs = runs + 1 WHERE number = ? RETURNING runs"
        return int(self.query(sql, (command.number,))[0][0])

    def answer(self, command: Command, outcome: str, result: bytes, digest: str | None) -> None:
        """Write the answer of a command, which never changes."""
        metrics = _metrics_of(command.kind, result) if outcome == "done" else None
        check = _check(outcome, result, digest, metrics)
        done = self.query(
            "UPDATE commands SET outcome = ?, result = ?, digest = ?, metrics = ?, done_at = ?, "
            "result_check = ? WHERE number = ? AND outcome IS NULL RETURNING number",
            (outcome, result, digest, metrics, time.time(), check, command.number),
        )
        if not done:
            raise RunError(f"command log: {command.request_id} was answered twice")

    def find(self, line: str, seq: int) -> Command | None:
        return next(self.select("line = ? AND seq = ?", (line, seq)), None)

    def select(self, where: str, values: Values = ()) -> Iterator[Command]:
        """The commands in the order of their lines, then of their numbers."""
        sql = f"SELECT {_COLUMNS} FROM commands WHERE {where} ORDER BY line, seq"
        cursor = self._file.execute(sql, values)
        return (_command(row) for row in iter(cursor.fetchone, None))

    def empty(self, where: str, values: Values) -> None:
        """Drop bodies and results of answered commands; what is left of them has its checksums."""
        columns = "number, line, seq, owner, kind, outcome, digest, metrics"
        sql = f"SELECT {columns} FROM commands WHERE NOT emptied AND {where}"
        for number, *row, outcome, digest, metrics in self.query(sql, values):
            checks = _check(*row, b""), _check(outcome, b"", digest, metrics)
            self.query(
                "UPDATE commands SET body = x'', result = x'', row_check = ?, result_check = ?, "
                "emptied = 1 WHERE number = ?",
                (*checks, number),
            )

    def emptied_to(self, line: str) -> int:
        """The last command of a model that was emptied, with all before it; 0: none."""
        sql = "SELECT max(seq) FROM commands WHERE line = ? AND emptied"
        return int(self.query(sql, (line,))[0][0] or 0)

    def digest_at(self, line: str, seq: int) -> str | None:
        """The digest of a model's weights after a command; None: no command had changed them."""
        changed = "line = ? AND seq <= ? AND digest IS NOT NULL ORDER BY seq DESC LIMIT 1"
        rows = self.query(f"SELECT digest FROM commands WHERE {changed}", (line, seq))
        return str(rows[0][0]) if rows else None

    def damaged(self) -> Iterator[str]:
        """Name the commands that are not what was written."""
        columns = "line, seq, owner, kind, body, outcome, result, digest, metrics, row_check, result_check"
        for row in self._file.execute(f"SELECT {columns} FROM commands ORDER BY number"):
            answer = _check(*row[5:9]) if row[5] is not None else None
            if (_check(*row[:5]), answer) != row[9:]:
                yield f"{row[0]}#{row[1]}"


def _command(row: tuple[Any, ...]) -> Command:
    fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return Command(
        **fields | {"result": fields["result"] or b"", "emptied": bool(fields["emptied"])}
    )


def _metrics_of(kind: str, result: bytes) -> str | None:
    """The numbers in an answer, as JSON; null for one that is not finite."""
    if kind == FORWARD_BACKWARD:
        answer = wire.decode("ForwardBackwardOutput", result)
    elif kind == OPTIM_STEP:
        answer = json.loads(result)
    else:
        return None
    metrics = answer.get("metrics", {}).items()
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics})


def _check(*values: object) -> str:
    """The checksum of a row's values."""
    hasher = hashlib.blake2b(digest_size=12)
    for value in values:
        octets = value if isinstance(value, bytes) else str(value).encode()
        hasher.update(len(octets).to_bytes(8, "little") + octets)
    return hasher.hexdigest()
