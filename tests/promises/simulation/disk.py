"""The disk of a simulated machine: real files in memory, with its own speed and faults.

`SimWriter` is the journal's writer with its thread replaced by timers of the loop: what was submitted is
committed a moment later, in one transaction, unless the disk is full or the driver was killed before.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from penstock.store.journal.records import Record
from penstock.store.journal.schema import open_database
from penstock.store.journal.writer import Waiter, Writer


class Disk:
    """How slow and how full the disk is."""

    def __init__(self) -> None:
        self.full = ""  # "journal" or "checkpoint": what finds no room
        self.is_read_only = False
        self.slowness = 1.0
        self.connections: list[sqlite3.Connection] = []  # of the driver, to its journal
        self.failed: set[str] = set()  # what has found no room so far
        self.is_unsynced = False  # the next sync of the journal fails
        self.cut: dict[Path, bytes] = {}  # what a truncated journal has, once its driver is dead
        self.taken = False  # the journal's files were taken away in this life of the driver

    def open(self, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        self.connections.append(open_database(*args, **kwargs))
        return self.connections[-1]

    def strike(self, kind: str, journal: Path, share: float) -> None:
        """Let a fault happen to the journal's files; `share`: how much of a truncated log stays."""
        self.is_unsynced = self.is_unsynced or kind == "unsync"
        self.is_read_only = self.is_read_only or kind == "read-only"
        self.taken = self.taken or (kind in ("remove", "replace") and bool(self.connections))
        log = journal.with_name(f"{journal.name}-wal")
        if kind == "truncate" and log.exists():
            whole = log.read_bytes()
            self.cut = {journal: journal.read_bytes(), log: whole[: int(len(whole) * share)]}
        for path in journal.parent.glob(f"{journal.name}*"):
            if kind == "remove":
                path.unlink()
            elif kind == "replace":
                copy = path.with_name("copy")
                shutil.copyfile(path, copy)
                copy.rename(path)

    def put_back(self, journal: Path) -> bool:
        """Do what the driver's last line says; return False if the files are lost with a killed driver."""
        taken, self.taken, self.is_unsynced, self.is_read_only = self.taken, False, False, False
        if self.cut:
            for path in journal.parent.glob(f"{journal.name}*"):
                path.unlink()
            for path, content in self.cut.items():
                path.write_bytes(content)
            self.cut = {}
        rescued = journal.parent.with_name(f"{journal.parent.name}-journal-rescued.db")
        if rescued.exists():
            for path in journal.parent.glob(f"{journal.name}*"):
                path.unlink()
            rescued.rename(journal)
            return True
        return not taken

    def fsync(self, descriptor: int) -> None:
        if self.is_unsynced:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def driver_died(self) -> None:
        """Close the dead driver's connections; what it had not committed is lost."""
        while self.connections:
            self.connections.pop().close()

    def check(self, what: str) -> None:
        """Raise as a disk does that is full, or cannot be written."""
        if self.is_read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self.full == what:
            self.failed.add(what)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SimOs:
    """The module `os` with another fsync."""

    def __init__(self, disk: Disk) -> None:
        self.fsync = disk.fsync

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _Connection:
    """A connection whose commits fail while the journal finds no room or cannot be written."""

    def __init__(self, database: sqlite3.Connection, disk: Disk) -> None:
        self._database, self._disk = database, disk

    def execute(self, sql: str, *parameters: Any) -> Any:
        if sql == "COMMIT" and self._disk.full == "journal":
            self._disk.failed.add("journal")
            raise sqlite3.OperationalError("database or disk is full")
        if sql == "COMMIT" and self._disk.is_read_only:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return self._database.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


class SimWriter(Writer):
    """The journal's writer on the event loop's time."""

    world: Any = None

    def __init__(self, database: sqlite3.Connection, path: Path, *, threaded: bool = True) -> None:
        self._world = self.world  # this one: a dead driver's writer must not reach the next world
        self._disk: Disk = self._world.disk
        super().__init__(_Connection(database, self._disk), path, threaded=False)  # type: ignore[arg-type]
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, item: Record | Waiter) -> None:
        super().submit(item)
        self._write_later()

    def durable(self) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self.submit(done)
        return done

    def _write_later(self) -> None:
        if self._timer is None:
            delay = self._world.delay(0.005) * self._disk.slowness
            self._timer = asyncio.get_running_loop().call_later(delay, self._write)

    def _write(self) -> None:
        self._timer = None
        if not self._closed:
            self._drain(block=False)
