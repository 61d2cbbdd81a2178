"""The journal's tables and public views, and how its file is opened.

The tables (`*_rows`) may change with the schema version. The views `groups`, `rollouts`, `steps`,
`weights`, `events`, `identity`, `calls` and `tools` are public and stay: any SQLite tool can read them while a run writes.
A file of an older version can be read (what it lacks is NULL), and is migrated when a run writes to it:
version 2 added a checksum to every row, version 3 what the trainer trained, chained, and the identity,
version 4 the calls of agents.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from penstock.errors import JournalDamaged, RunError, UserError
from penstock.files import ScratchFolder, can_write, sync
from penstock.store.journal.checks import (
    FIRST_WITH_CHECKS,
    ROW_CHECK,
    checked_tables,
    row_check,
)

SCHEMA_VERSION = 4
_LOG_HEADER = 32  # bytes of SQLite's log before its first row
_INDEX_PART = 32768  # bytes; SQLite makes the index of its log in such parts

_VERSION_1 = """
CREATE TABLE prompt_rows(
    task TEXT NOT NULL, prompt_id TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY(task, prompt_id));
CREATE TABLE group_rows(
    group_id TEXT PRIMARY KEY, task TEXT NOT NULL, cursor INTEGER NOT NULL, prompt_id TEXT NOT NULL,
    drawn_at REAL NOT NULL,
    place TEXT NOT NULL,            -- in_flight | buffered | taken | dropped
    status TEXT NOT NULL DEFAULT 'init', tries INTEGER NOT NULL DEFAULT 0,
    oldest_version INTEGER, num_tokens INTEGER, reward REAL, landed_at REAL,
    step INTEGER, position INTEGER, drop_reason TEXT, error TEXT
) WITHOUT ROWID;
CREATE INDEX group_rows_by_step ON group_rows(step, position) WHERE step IS NOT NULL;
CREATE TABLE rollout_rows(
    group_id TEXT NOT NULL, number INTEGER NOT NULL, rollout_id TEXT NOT NULL, status TEXT NOT NULL,
    finish_reason TEXT, num_tokens INTEGER, oldest_version INTEGER, newest_version INTEGER,
    temperature REAL, reward REAL, text TEXT, error TEXT, data BLOB NOT NULL,
    PRIMARY KEY(group_id, number)) WITHOUT ROWID;
CREATE TABLE step_rows(
    step INTEGER PRIMARY KEY, begun_at REAL, group_ids TEXT,
    committed_at REAL, policy_version INTEGER, digest TEXT, metrics TEXT);
CREATE TABLE event_rows(
    number INTEGER PRIMARY KEY, at REAL NOT NULL, group_id TEXT NOT NULL, kind TEXT NOT NULL,
    status TEXT, tries INTEGER, reason TEXT, num_tokens INTEGER, reward REAL, oldest_version INTEGER);
CREATE TABLE weight_rows(
    number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, engine TEXT,
    version INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE VIEW groups AS
    SELECT group_id, task, cursor, prompt_id,
        CASE WHEN place = 'taken' AND committed_at IS NOT NULL THEN 'trained' ELSE place END AS state,
        status, tries, oldest_version, num_tokens, reward, group_rows.step AS step, position,
        group_rows.step - oldest_version - 1 AS staleness, drop_reason, error, drawn_at, landed_at
    FROM group_rows LEFT JOIN step_rows ON step_rows.step = group_rows.step;
CREATE VIEW rollouts AS
    SELECT rollout_id, r.group_id AS group_id, number, task, prompt_id, r.status AS status, finish_reason,
        r.num_tokens AS num_tokens, r.oldest_version AS oldest_version, newest_version, temperature,
        r.reward AS reward, step, drop_reason, text, r.error AS error
    FROM rollout_rows r JOIN group_rows g ON g.group_id = r.group_id;
CREATE VIEW steps AS
    SELECT step, policy_version, digest, metrics, group_ids, begun_at, committed_at,
        committed_at IS NOT NULL AS committed FROM step_rows;
CREATE VIEW weights AS SELECT kind, engine, version, digest, at FROM weight_rows;
CREATE VIEW events AS
    SELECT drawn_at AS at, group_id, 'drawn' AS kind, NULL AS status, 0 AS tries, NULL AS reason,
        NULL AS num_tokens, NULL AS reward, NULL AS step FROM group_rows
    UNION ALL
    SELECT at, group_id, kind, status, tries, reason, num_tokens, reward, NULL FROM event_rows
    UNION ALL
    SELECT committed_at, group_id, 'trained', status, tries, NULL, num_tokens, reward, step
        FROM groups JOIN step_rows USING(step) WHERE state = 'trained';
"""

_VERSION_3 = """
ALTER TABLE group_rows ADD COLUMN num_rollouts INTEGER;
ALTER TABLE step_rows ADD COLUMN trained TEXT;
ALTER TABLE step_rows ADD COLUMN num_events INTEGER;
ALTER TABLE step_rows ADD COLUMN chain TEXT;
ALTER TABLE step_rows ADD COLUMN pruned_at REAL;
CREATE TABLE identity_rows(
    name TEXT PRIMARY KEY, value TEXT NOT NULL, row_check INTEGER) WITHOUT ROWID;
CREATE VIEW identity AS SELECT name, value FROM identity_rows;
DROP VIEW groups;
CREATE VIEW groups AS
    SELECT group_id, task, cursor, prompt_id,
        CASE WHEN place = 'taken' AND committed_at IS NOT NULL THEN 'trained' ELSE place END AS state,
        status, tries, oldest_version, num_tokens, num_rollouts, reward, group_rows.step AS step, position,
        group_rows.step - oldest_version - 1 AS staleness, drop_reason, error, drawn_at, landed_at
    FROM group_rows LEFT JOIN step_rows ON step_rows.step = group_rows.step;
DROP VIEW steps;
CREATE VIEW steps AS
    SELECT step, policy_version, digest, metrics, group_ids, begun_at, committed_at,
        committed_at IS NOT NULL AS committed, trained, num_events, chain, pruned_at FROM step_rows;
"""

_CALL_COLUMNS = (
    "rollout_id, seed, number, parent, group_id, at, finish_reason, num_context, num_tokens,"
    " messages, answer, tools"
)
_TOOL_COLUMNS = "rollout_id, seed, call_id, group_id, name, begun_at, ended_at, outcome, result"
_VERSION_4 = f"""
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
CREATE VIEW calls AS SELECT {_CALL_COLUMNS} FROM call_rows;
CREATE VIEW tools AS SELECT {_TOOL_COLUMNS} FROM tool_rows;
"""


def _no_rows(view: str, columns: str) -> str:
    nulls = ", ".join(f"NULL AS {column.strip()}" for column in columns.split(","))
    return f"CREATE TEMP VIEW {view} AS SELECT {nulls} WHERE 0;"


# What a file lacks of a version, shown to a connection that may not change the file.
_NEWER_VIEWS = {
    3: """
CREATE TEMP VIEW groups AS SELECT *, NULL AS num_rollouts FROM main.groups;
CREATE TEMP VIEW steps AS
    SELECT *, NULL AS trained, NULL AS num_events, NULL AS chain, NULL AS pruned_at FROM main.steps;
CREATE TEMP VIEW identity AS SELECT NULL AS name, NULL AS value WHERE 0;
""",
    4: _no_rows("calls", _CALL_COLUMNS)
    + _no_rows("tools", _TOOL_COLUMNS)
    + _no_rows("call_rows", f"{_CALL_COLUMNS}, data"),
}


def open_database(path: Path, *, readonly: bool = False, brief: bool = False) -> sqlite3.Connection:
    """Return a connection in autocommit mode; create the tables of a new file, check an old one.

    `brief`: a read-only connection that is closed again at once, and writes nothing beside the file.
    """
    if readonly and not path.is_file():
        raise UserError(f"journal: got no file {path}, allowed: the journal.db of a run folder")
    try:
        if not path.exists():
            _make_file(path)
        database = _look(path) if brief else _connect(path, readonly)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if not (1 if readonly else 0) <= version <= SCHEMA_VERSION:
            raise RunError(
                f"journal {path}: got schema version {version}, allowed: 1 to {SCHEMA_VERSION}"
            )
        if version < SCHEMA_VERSION:
            database.executescript(_lacking(version) if readonly else _migration(version))
    except sqlite3.OperationalError as error:
        raise RunError(f"journal {path}: cannot be opened: {error}") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise JournalDamaged(f"journal {path}: damaged: {error}") from error
    return database


def _lacking(version: int) -> str:
    """Return the SQL that shows what a file of this version lacks."""
    return "".join(views for number, views in _NEWER_VIEWS.items() if number > version)


def _make_file(path: Path) -> None:
    """Make the file with its tables; a crash or a power failure leaves it whole or absent."""
    draft = path.with_name(f".{path.name}.draft")
    for old in path.parent.glob(f"{draft.name}*"):
        old.unlink()
    database = _connect(draft, readonly=False)
    database.executescript(_migration(0))
    database.close()  # moves SQLite's log into the file and syncs it
    draft.rename(path)
    sync(path.parent)


def is_empty(path: Path) -> bool:
    """Return whether the file has no tables: the writer died before, or they were lost."""
    try:
        database = _look(path)
        try:
            return bool(database.execute("PRAGMA user_version").fetchone()[0] == 0)
        finally:
            database.close()
    except sqlite3.Error:
        return False  # damaged, not empty: opening it says so


def _connect(path: Path, readonly: bool) -> sqlite3.Connection:
    if readonly:
        return _connect_to_read(path)
    database = _link(path, "mode=rwc")
    # NORMAL: a commit survives the death of the process; it is not synced per commit
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA temp_store = MEMORY")
    # KiB: the cache fills as the file grows, and a run appends more than it reads
    database.execute("PRAGMA cache_size = -4000")
    return database


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection that reads; it also works on a disk that cannot be written.

    To read a write-ahead log (-wal) SQLite needs its index (-shm), and makes one beside it. Where it
    cannot: a file without a log is read as it is, and a log without its index is read in a copy.
    """
    log, index = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))
    if can_write(path.parent) or (log.exists() and index.exists()):
        return _link(path, "mode=ro")
    if not _has_rows(log):
        return _link(path, "immutable=1")
    return _link_to_copy(path, log)


def _look(path: Path) -> sqlite3.Connection:
    """Return a connection that makes no file: a log's index is read as it is, or built in memory.

    A file without a log has no writer. One may start during a look: it changes the file itself only
    when its log is long, so a brief look is over by then.
    """
    log, index = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm"))
    if _has_rows(log) and _is_whole(index):
        database = _link(path, "mode=ro&readonly_shm=1")
        try:
            database.execute("PRAGMA user_version").fetchone()
            return database
        except sqlite3.OperationalError:  # an index that a loss of power left unusable
            database.close()
    if not _has_rows(log):
        return _link(path, "immutable=1")
    return _link_to_copy(path, log)


def _has_rows(log: Path) -> bool:
    """Return whether a log has more than its header; with a header alone SQLite may try for ten seconds."""
    return log.exists() and log.stat().st_size > _LOG_HEADER


def _is_whole(index: Path) -> bool:
    """Return whether a log's index is there and not cut; with a cut one SQLite tries for ten seconds."""
    size = index.stat().st_size if index.exists() else 0
    return size > 0 and size % _INDEX_PART == 0


def _link_to_copy(path: Path, log: Path) -> sqlite3.Connection:
    """Return a connection to a copy of the file and its log, which lack the log's index."""
    with ScratchFolder.new("journal") as scratch:
        for file in (path, log):
            shutil.copyfile(file, scratch / file.name)
        database = _link(scratch / path.name, "mode=ro")
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return database  # its files are open and stay readable after the folder is removed


def _link(path: Path, how: str) -> sqlite3.Connection:
    target = f"{path.absolute().as_uri()}?{how}"
    database = sqlite3.connect(
        target, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0
    )
    database.text_factory = _readable
    database.create_function(ROW_CHECK, -1, row_check, deterministic=True)
    return database


def _readable(text: bytes) -> str:
    """Decode text so that damaged bytes can be compared and named instead of ending the read."""
    return text.decode("utf-8", "replace")


def schema_version(database: sqlite3.Connection) -> int:
    """Return the version of the file's schema."""
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def changed_definitions(database: sqlite3.Connection) -> list[str]:
    """Return the tables and views whose definition differs from the one they were created with."""
    select = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    wanted = sqlite3.connect(":memory:")
    try:
        wanted.create_function(ROW_CHECK, -1, row_check)
        wanted.executescript(_migration(0, schema_version(database)))
        made, found = dict(wanted.execute(select)), dict(database.execute(select))
    finally:
        wanted.close()
    return sorted(name for name in made.keys() | found.keys() if made.get(name) != found.get(name))


def _migration(before: int, after: int = SCHEMA_VERSION) -> str:
    """Return the SQL that brings a file from one version to another; a new file has version 0."""
    steps = {1: _VERSION_1, FIRST_WITH_CHECKS: _check_columns(), 3: _VERSION_3, 4: _VERSION_4}
    parts = [steps[version] for version in range(before + 1, after + 1)]
    return f"BEGIN IMMEDIATE; {' '.join(parts)} {_renew_checks(after)} PRAGMA user_version = {after}; COMMIT;"


def _check_columns() -> str:
    tables = checked_tables(FIRST_WITH_CHECKS)
    return " ".join(f"ALTER TABLE {table} ADD COLUMN row_check INTEGER;" for table in tables)


def _renew_checks(version: int) -> str:
    """Return the SQL that computes the checksum of every row; `resume` has compared the old ones."""
    return " ".join(
        f"UPDATE {table} SET row_check = {ROW_CHECK}({', '.join(columns)});"
        for table, columns in checked_tables(version).items()
    )
