"""The journal's tables and public views, and how its file is opened.

The tables (`*_rows`) may change with the format. The views `groups`, `rollouts`, `steps`, `weights`,
`events`, `identity`, `calls` and `tools` are public and stay: any SQLite tool can read them while a run
writes. A file of another format is refused. The log of a service is opened the same way, with tables of its own.
"""

from __future__ import annotations

import functools
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import JournalDamaged, RunError, UserError
from penstock.files import ScratchFolder, can_write, sync
from penstock.store.journal.codec import ROW_CHECK, readable, row_check

_LOG_HEADER = 32  # bytes of SQLite's log before its first row
_BRIEF_S = 60.0  # the longest look
_OPERATIONS = 1_000_000  # of SQLite between two looks at the clock
_INDEX_PART = 32768  # bytes; SQLite makes the index of its log in such parts
_LOG_BYTES = 16 * 2**20  # of the write-ahead log, once nobody reads what is older
_TABLES = """
CREATE TABLE prompt_rows(
    task TEXT NOT NULL, prompt_id TEXT NOT NULL, data BLOB NOT NULL, row_check INTEGER,
    PRIMARY KEY(task, prompt_id));
CREATE TABLE group_rows(
    group_id TEXT PRIMARY KEY, task TEXT NOT NULL, cursor INTEGER NOT NULL, prompt_id TEXT NOT NULL,
    drawn_at REAL NOT NULL,
    place TEXT NOT NULL,            -- in_flight | buffered | taken | dropped
    status TEXT NOT NULL DEFAULT 'init', tries INTEGER NOT NULL DEFAULT 0,
    oldest_version INTEGER, num_tokens INTEGER, reward REAL, landed_at REAL,
    step INTEGER, position INTEGER, drop_reason TEXT, error TEXT, num_rollouts INTEGER, row_check INTEGER
) WITHOUT ROWID;
CREATE INDEX group_rows_by_step ON group_rows(step, position) WHERE step IS NOT NULL;
CREATE TABLE rollout_rows(
    group_id TEXT NOT NULL, number INTEGER NOT NULL, rollout_id TEXT NOT NULL, status TEXT NOT NULL,
    finish_reason TEXT, num_tokens INTEGER, oldest_version INTEGER, newest_version INTEGER,
    temperature REAL, reward REAL, text TEXT, error TEXT, data BLOB NOT NULL,
    PRIMARY KEY(group_id, number)) WITHOUT ROWID;
CREATE TABLE step_rows(
    step INTEGER PRIMARY KEY, begun_at REAL, group_ids TEXT,
    committed_at REAL, policy_version INTEGER, digest TEXT, metrics TEXT,
    trained TEXT, num_events INTEGER, chain TEXT, pruned_at REAL, row_check INTEGER);
CREATE TABLE event_rows(
    number INTEGER PRIMARY KEY, at REAL NOT NULL, group_id TEXT NOT NULL, kind TEXT NOT NULL,
    status TEXT, tries INTEGER, reason TEXT, num_tokens INTEGER, reward REAL, oldest_version INTEGER,
    row_check INTEGER);
CREATE TABLE weight_rows(
    number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, engine TEXT,
    version INTEGER NOT NULL, digest TEXT NOT NULL, row_check INTEGER);
CREATE TABLE identity_rows(
    name TEXT PRIMARY KEY, value TEXT NOT NULL, row_check INTEGER) WITHOUT ROWID;
CREATE TABLE call_rows(
    rollout_id TEXT NOT NULL, seed INTEGER NOT NULL, number INTEGER NOT NULL, parent INTEGER,
    group_id TEXT NOT NULL, at REAL NOT NULL, finish_reason TEXT NOT NULL, num_context INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, messages TEXT NOT NULL, answer TEXT NOT NULL, tools TEXT NOT NULL,
    data BLOB NOT NULL, row_check INTEGER,
    PRIMARY KEY(rollout_id, seed, number)) WITHOUT ROWID;
CREATE INDEX call_rows_by_group ON call_rows(group_id);
CREATE TABLE tool_rows(
    rollout_id TEXT NOT NULL, seed INTEGER NOT NULL, call_id TEXT NOT NULL, group_id TEXT NOT NULL,
    name TEXT NOT NULL, begun_at REAL NOT NULL, ended_at REAL,
    outcome TEXT,                   -- done | failed; NULL: begun, and its end is unknown
    result TEXT, row_check INTEGER,
    PRIMARY KEY(rollout_id, seed, call_id)) WITHOUT ROWID;
CREATE INDEX tool_rows_by_group ON tool_rows(group_id);
CREATE VIEW groups AS
    SELECT group_id, task, cursor, prompt_id,
        CASE WHEN place = 'taken' AND committed_at IS NOT NULL THEN 'trained' ELSE place END AS state,
        status, tries, oldest_version, num_tokens, num_rollouts, reward, group_rows.step AS step, position,
        group_rows.step - oldest_version - 1 AS staleness, drop_reason, error, drawn_at, landed_at
    FROM group_rows LEFT JOIN step_rows ON step_rows.step = group_rows.step;
CREATE VIEW rollouts AS
    SELECT rollout_id, r.group_id AS group_id, number, task, prompt_id, r.status AS status, finish_reason,
        r.num_tokens AS num_tokens, r.oldest_version AS oldest_version, newest_version, temperature,
        r.reward AS reward, step, drop_reason, text, r.error AS error
    FROM rollout_rows r JOIN group_rows g ON g.group_id = r.group_id;
CREATE VIEW steps AS
    SELECT step, policy_version, digest, metrics, group_ids, begun_at, committed_at,
        committed_at IS NOT NULL AS committed, trained, num_events, chain, pruned_at FROM step_rows;
CREATE VIEW weights AS SELECT kind, engine, version, digest, at FROM weight_rows;
CREATE VIEW events AS
    SELECT drawn_at AS at, group_id, 'drawn' AS kind, NULL AS status, 0 AS tries, NULL AS reason,
        NULL AS num_tokens, NULL AS reward, NULL AS step FROM group_rows
    UNION ALL
    SELECT at, group_id, kind, status, tries, reason, num_tokens, reward, NULL FROM event_rows
    UNION ALL
    SELECT committed_at, group_id, 'trained', status, tries, NULL, num_tokens, reward, step
        FROM groups JOIN step_rows USING(step) WHERE state = 'trained';
CREATE VIEW identity AS SELECT name, value FROM identity_rows;
CREATE VIEW calls AS
    SELECT rollout_id, seed, number, parent, group_id, at, finish_reason, num_context, num_tokens,
        messages, answer, tools FROM call_rows;
CREATE VIEW tools AS
    SELECT rollout_id, seed, call_id, group_id, name, begun_at, ended_at, outcome, result FROM tool_rows;
"""


@dataclass(slots=True, frozen=True)
class Schema:
    """A kind of file: its name in errors, where it lies, its tables and their format."""

    name: str
    place: str
    tables: str
    format: int  # PRAGMA user_version of the file

    @property
    def script(self) -> str:
        """What makes the tables of a new file, all or none."""
        return f"BEGIN IMMEDIATE;{self.tables}PRAGMA user_version = {self.format}; COMMIT;"


JOURNAL = Schema("journal", "the journal.db of a run folder", _TABLES, 1)


def open_database(
    path: Path, *, readonly: bool = False, brief: bool = False, kind: Schema = JOURNAL
) -> sqlite3.Connection:
    """A connection in autocommit mode; create the tables of a new file, check an old one.

    `brief`: a read-only connection that is closed again at once, and writes nothing beside the file.
    """
    if readonly and not path.is_file():
        raise UserError(f"{kind.name}: got no file {path}, allowed: {kind.place}")
    with named_errors(path, "be opened", kind):
        if not path.exists():
            _make_file(path, kind)
        database = _connect_to_read(path, brief=brief) if readonly else _connect_to_write(path)
        if brief:  # a file can be made so that a query never ends
            end = time.monotonic() + _BRIEF_S
            database.set_progress_handler(lambda: time.monotonic() > end, _OPERATIONS)
        version = _format_of(database)
        if version == 0 and not readonly:
            database.executescript(kind.script)
        elif version != kind.format:
            raise RunError(
                f"{kind.name} {path}: got format {version}, allowed: {kind.format}; another version "
                "of Penstock wrote it"
            )
        expected, present = _definitions(kind), dict(database.execute(_DEFINITIONS))
        for name in sorted(expected.keys() | present.keys()):  # before any of them is read
            if expected.get(name) != present.get(name):
                raise sqlite3.DatabaseError(f"the definition of {name} is not what was written")
    return database


@contextmanager
def named_errors(path: Path, act: str, kind: Schema = JOURNAL) -> Iterator[None]:
    """Name the file in errors of SQLite: what it cannot do there, or that the file is damaged."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunError(f"{kind.name} {path}: cannot {act}: {error}") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise JournalDamaged(f"{kind.name} {path}: damaged: {error}") from error


def _format_of(database: sqlite3.Connection) -> int:
    """The format of a file; 0: it has no tables yet."""
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if version == 0 and tables:
        raise sqlite3.DatabaseError("its header names no format, but it has tables")
    return version


def _make_file(path: Path, kind: Schema) -> None:
    """Make the file with its tables; a crash or a power failure leaves it whole or absent."""
    draft = path.with_name(f".{path.name}.draft")
    for old in path.parent.glob(f"{draft.name}*"):
        old.unlink()
    database = _connect_to_write(draft)
    database.executescript(kind.script)
    database.close()  # moves SQLite's log into the file and syncs it
    draft.rename(path)
    sync(path.parent)


def is_empty(path: Path) -> bool:
    """Whether the file has no tables: the writer died before, or they were lost."""
    try:
        with closing(_connect_to_read(path, brief=True)) as database:
            return _format_of(database) == 0
    except sqlite3.Error:
        return False  # damaged, not empty: opening it says so


def _connect_to_write(path: Path) -> sqlite3.Connection:
    database = _link(path, "mode=rwc")
    # NORMAL: a commit survives the death of the process; it is not synced per commit
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    # KiB: the cache fills as the file grows, and a run appends more than it reads
    database.execute("PRAGMA cache_size = -4000")
    return database


def _connect_to_read(path: Path, *, brief: bool) -> sqlite3.Connection:
    """A connection that reads; it also works on a disk that cannot be written.

    To read a write-ahead log (-wal) SQLite needs its index (-shm), and makes one beside it. Where it
    cannot, or may not (`brief`): a file without a log is read as it is, and a log without a whole index is
    read in a copy. A file without a log has no writer. One may start during a brief look: it changes the file
    itself only when its log is long, so the look is over by then.
    """
    log, index = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))
    if not brief and (can_write(path.parent) or (log.exists() and index.exists())):
        return _link(path, "mode=ro")
    # with a cut index SQLite tries for ten seconds
    size = index.stat().st_size if index.exists() else 0
    if brief and _has_rows(log) and size and size % _INDEX_PART == 0:
        database = _link(path, "mode=ro&readonly_shm=1")
        try:
            database.execute("PRAGMA user_version").fetchone()
            return database
        except sqlite3.OperationalError:  # an index that a loss of power left unusable
            database.close()
    if not _has_rows(log):
        return _link(path, "immutable=1")
    with ScratchFolder.new("journal") as scratch:
        for file in (path, log):
            shutil.copyfile(file, scratch / file.name)
        database = _link(scratch / path.name, "mode=ro")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return database  # its files are open and stay readable after the folder is removed


def _has_rows(log: Path) -> bool:
    """Whether a log has more than its header; with a header alone SQLite may try for ten seconds."""
    return log.exists() and log.stat().st_size > _LOG_HEADER


def _link(path: Path, how: str) -> sqlite3.Connection:
    target = f"{path.absolute().as_uri()}?{how}"
    database = sqlite3.connect(
        target, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0
    )
    database.text_factory = readable
    database.execute("PRAGMA trusted_schema = OFF")
    database.create_function(ROW_CHECK, -1, row_check, deterministic=True)
    return database


_DEFINITIONS = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"


@functools.cache
def _definitions(kind: Schema) -> dict[str, str]:
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(kind.script)
        return dict(fresh.execute(_DEFINITIONS))
