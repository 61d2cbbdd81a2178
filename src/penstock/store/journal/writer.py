"""The writer thread: commits the queued records, all that wait in one transaction.

Consumes records, makes them durable. Waits for the queue; woken by `submit()`. The first error stops
the writer: every waiter and every later call gets that error, so no caller hangs.

A cleaner, a restore or `mv` can take away the files under a live run. SQLite goes on with those that it has
open, and every record since then would be gone with the process. So the open files are synced, and
compared with what has their names now (`OpenFiles`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import shutil
import sqlite3
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

from penstock.errors import PenstockError, RunError
from penstock.files import pasted
from penstock.store.journal.codec import GroupTable
from penstock.store.journal.records import Record, write_in_order

_MOST_PER_COMMIT = 2048
_LOCK_TIMEOUT_S = 600  # while another program holds the lock of the file


Waiter = asyncio.Future[None] | Future[None]  # of an event loop, or of a thread
_WAITERS = (asyncio.Future, Future)


def _resolve(futures: list[asyncio.Future[None]], fault: PenstockError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(fault)


class Writer:
    """Owns the writing connection. `threaded=False` writes in the caller's thread, for virtual time."""

    def __init__(self, database: sqlite3.Connection, path: Path, *, threaded: bool = True) -> None:
        self._database, self._tables = database, GroupTable(database)
        database.execute(f"PRAGMA busy_timeout = {1000 * _LOCK_TIMEOUT_S}")
        self._path = path
        self._queue: queue.SimpleQueue[Record | Waiter | None] = queue.SimpleQueue()
        self._fault: PenstockError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._write_on, name="journal", daemon=True)
            self._thread.start()

    def submit(self, item: Record | Waiter) -> None:
        """Queue a record, which becomes durable later, or one who waits for those before."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise RunError(f"journal {self._path}: it is closed")
        self._queue.put(item)

    def durable(self) -> asyncio.Future[None]:
        """A future that is done when every record submitted so far is committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wake_when_written(done)
        return done

    def wait_durable(self) -> None:
        """Do the same as `durable()`, for callers without an event loop."""
        done: Future[None] = Future()
        self._wake_when_written(done)
        done.result()

    def _wake_when_written(self, done: Waiter) -> None:
        self.submit(done)
        if self._thread is None:
            self._drain(block=False)

    def close(self) -> None:
        """Write the queued records and end the thread; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        else:
            self._drain(block=False)
        self._database.close()
        if self._fault is not None:
            raise self._fault

    def _write_on(self) -> None:
        while self._drain(block=True):
            pass

    def _drain(self, *, block: bool) -> bool:
        """Commit the queued records; return False once the closing mark was seen."""
        records: list[Record] = []
        waiters: list[Waiter] = []
        open_still = True
        get, wait = self._queue.get, block  # only the first item is waited for
        while len(records) < _MOST_PER_COMMIT or not block:
            try:
                item = get(wait)
            except queue.Empty:
                break
            wait = False
            if item is None:
                open_still = False
                break
            if isinstance(item, _WAITERS):
                waiters.append(item)
            else:
                records.append(item)
        try:
            self._commit(records)
        except Exception as error:  # the thread lives on, so that every waiter gets the error
            self.fail(RunError(f"journal {self._path}: {type(error).__name__}: {error}"))
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for waiter in waiters:
            if isinstance(waiter, asyncio.Future):
                by_loop.setdefault(waiter.get_loop(), []).append(waiter)
            elif self._fault is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._fault)
        for loop, futures in by_loop.items():
            if self._thread is None:
                _resolve(futures, self._fault)
                continue
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, futures, self._fault)
        return open_still

    def _commit(self, records: list[Record]) -> None:
        if not records or self._fault is not None:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            write_in_order(self._tables, records)
            self._database.execute("COMMIT")
        except PenstockError as error:
            self.fail(error)
        except Exception as error:  # disk full, input/output, a value that cannot be stored
            try:
                room = f"{shutil.disk_usage(self._path.parent).free >> 20:,} MiB free there"
            except OSError as gone:  # the folder was removed
                room = f"its folder: {gone.strerror}"
            fault = RunError(f"journal {self._path}: cannot write: {error} ({room})")
            fault.__cause__ = error
            self.fail(fault)

    def fail(self, fault: PenstockError) -> None:
        """Write nothing more: every waiter and every later call gets the fault."""
        self._fault = self._fault or fault
        with contextlib.suppress(sqlite3.Error):  # a connection that is gone has rolled back
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")


class OpenFiles:
    """The journal's file and its log.

    Closing any descriptor of a file drops all locks that the process has on it, those of SQLite too; so
    what this opens stays open until the connections are closed.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path, path.with_name(f"{path.name}-wal"))
        self._descriptors: dict[Path, int] = {}
        self._is_closed = False
        weakref.finalize(self, _close_all, self._descriptors)  # of a journal that nobody closed
        self._open()

    def _open(self) -> None:
        for path in self._paths:
            if not self._is_closed and path not in self._descriptors and path.exists():
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def sync(self) -> None:
        """Make what was written survive the death of the machine."""
        self._open()
        for path, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:  # the kernel may have dropped what it could not write
                raise RunError(
                    f"journal {path}: the disk did not take it ({error.strerror}), so what it holds is "
                    "not certain; check the disk before the run goes on"
                ) from error

    def taken_away(self) -> str:
        """What happened to the files (removed | replaced | moved); empty while they are where they were."""
        self._open()
        for path, descriptor in self._descriptors.items():
            ours = os.fstat(descriptor)
            try:
                there = os.stat(path)
            except OSError:
                return "moved" if ours.st_nlink else "removed"
            if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                return "moved" if ours.st_nlink else "replaced"
        return ""

    def way_on(self, what: str, saved: Path) -> str:
        """What happened, in a line that names the way on; `saved`: the file for the records."""
        path, run = self._paths[0], self._paths[0].parent
        if what == "moved":
            place = self._place()
            now = pasted(place) if place else "the place where it is now"
            return (
                f"journal {path}: its run folder was moved from {run} to {now} while the run wrote it; "
                f"nothing is lost; continue with: penstock resume {now}"
            )
        return (
            f"journal {path}: it was {what} while the run wrote it; all records are saved in {saved}; put "
            f"them back with: mkdir -p {pasted(run)} && rm -f {pasted(path)}* && "
            f"mv {pasted(saved)} {pasted(path)}; then continue with: penstock resume {pasted(run)}"
        )

    def _place(self) -> Path | None:
        """The folder that holds the journal's file now; None if the system does not say."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptors[self._paths[0]]}"))
        except OSError:
            return None
        return place.parent if place.exists() else None

    def close(self) -> None:
        self._is_closed = True
        _close_all(self._descriptors)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
