"""The writer thread: commits the queued records, all that wait in one transaction.

Consumes records, makes them durable. Waits for the queue; woken by `submit()`. The first error stops
the writer: every waiter and every later call gets that error, so no caller hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import sqlite3
import threading
from concurrent.futures import Future
from pathlib import Path

from penstock.errors import PenstockError, RunError
from penstock.store.journal.group_table import GroupTable
from penstock.store.journal.records import Record, write_in_order

_MOST_PER_COMMIT = 2048
_LOCK_TRIES = 20  # of 30 s each, while another program holds the lock of the file


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
        self._path = path
        self._queue: queue.SimpleQueue[Record | Waiter | None] = queue.SimpleQueue()
        self._fault: PenstockError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
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
        self.submit(done)
        if self._thread is None:
            self._drain(block=False)
        return done

    def wait_durable(self) -> None:
        """Do the same as `durable()`, for callers without an event loop."""
        done: Future[None] = Future()
        self.submit(done)
        if self._thread is None:
            self._drain(block=False)
        done.result()

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

    def _run(self) -> None:
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
        self._wake(waiters)
        return open_still

    def _wake(self, waiters: list[Waiter]) -> None:
        """Wake the waiters with one message per event loop, however many wait in it."""
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

    def _commit(self, records: list[Record]) -> None:
        if not records or self._fault is not None:
            return
        try:
            self._begin()
            write_in_order(self._tables, records)
            self._database.execute("COMMIT")
        except PenstockError as error:
            self.fail(error)
        except Exception as error:  # disk full, input/output, a value that cannot be stored
            fault = RunError(f"journal {self._path}: cannot write: {error} ({self._room()})")
            fault.__cause__ = error
            self.fail(fault)

    def _begin(self) -> None:
        """Begin a transaction. Waits for: another program that writes to the file, ten minutes at most."""
        for tries_left in reversed(range(_LOCK_TRIES)):
            try:
                self._database.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:  # after the 30 s of the connection
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not tries_left:
                    raise

    def fail(self, fault: PenstockError) -> None:
        """Write nothing more: every waiter and every later call gets the fault."""
        self._fault = self._fault or fault
        with contextlib.suppress(sqlite3.Error):  # a connection that is gone has rolled back
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _room(self) -> str:
        try:
            return f"{shutil.disk_usage(self._path.parent).free >> 20:,} MiB free there"
        except OSError as error:  # the folder was removed
            return f"its folder: {error.strerror}"
