"""Warm sandboxes for worker threads: one per submission, never used for two; and referees.

A sandbox ends after its submission, and the next one is set up, both in a thread of the pool: no verdict waits for
them. A dead factory is replaced. Referees run no solution and are used again.
Blocking; the number of callers bounds the number of sandboxes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.errors import SandboxError
from penstock.reward.sandbox.host import (
    Isolation,
    Referee,
    Sandbox,
    SandboxFactory,
    find_isolation,
)
from penstock.reward.sandbox.settings import SandboxSettings, job_limits

REFEREE_LIFE_S = 1e6
REFEREE_BYTES = 1 << 30
WARM = 4  # sandboxes that are ready, for each worker
SPARE = 8  # and so many more, for a burst of one client's submissions
MOST_ENDING = 8  # used sandboxes, for each worker; past it a submission ends its own
ANSWERS_PER_REFEREE = 1000  # then a fresh one: its memory may be in pieces


class SandboxPool:
    """Lends sandboxes. Starts at first use; `close()` ends all of them."""

    def __init__(self, settings: SandboxSettings, isolation: Isolation | None = None) -> None:
        """Use `isolation`, or the strongest that works here if it is None."""
        self.settings = settings
        self._lock = threading.Lock()
        self._factory: SandboxFactory | None = None
        self._warm: deque[Sandbox] = deque()
        self._referees: list[Referee] = []  # those that nobody uses
        self._isolation = isolation
        self._closed = False
        self._ending = 0  # used sandboxes that the refill thread has still to end
        self._refill_thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-refill")

    @property
    def isolation(self) -> Isolation:
        """How code is isolated; raises SandboxError if that is below the minimum."""
        if self._isolation is None:
            self._isolation = find_isolation(self.settings)
        return self._isolation

    @contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """Lend a fresh sandbox; it ends, with all its processes, when the block is left."""
        sandbox = self._take()
        try:
            yield sandbox
        finally:
            sandbox.stop()
            with self._lock:
                later = not self._closed and self._ending < MOST_ENDING * self.settings.workers
                if later:  # the verdict does not wait for the end of the solution's processes
                    self._ending += 1
                    self._refill_thread.submit(self._replace, sandbox)
            if not later:
                sandbox.end()

    @contextmanager
    def referee(self) -> Iterator[Referee]:
        """Lend a referee; it ends if the block is left by an exception."""
        with self._lock:
            referee = self._referees.pop() if self._referees else None
        if referee is None:
            sandbox = self._take()
            try:
                limits = job_limits(self.settings, REFEREE_LIFE_S)
                referee = Referee(sandbox, limits | {"memory_bytes": REFEREE_BYTES})
            except BaseException:
                sandbox.end()
                raise
        try:
            yield referee
        except BaseException:
            with self._lock:  # what ended this one may have ended the others
                others = self._all_referees()
            for lost in (referee, *others):
                lost.end()
            raise
        with self._lock:
            if not self._closed and referee.answers < ANSWERS_PER_REFEREE:
                self._referees.append(referee)
                return
        referee.end()

    def _all_referees(self) -> list[Referee]:
        """Take all idle referees out of the pool. The caller holds the lock."""
        idle, self._referees = self._referees, []
        return idle

    def _take(self) -> Sandbox:
        for _ in range(2):  # a warm one may have died with its factory
            factory = self._start()
            with self._lock:  # the one that was begun first is ready first
                sandbox = self._warm.popleft() if self._warm else None
            try:
                sandbox = sandbox or factory.spawn()
                assert sandbox.facts
                return sandbox
            except SandboxError:
                if factory.alive:
                    raise  # else `_start` replaces it
        raise SandboxError("sandbox: the factory ended twice in a row")

    def _start(self) -> SandboxFactory:
        mode = self.isolation.mode
        with self._lock:
            if self._closed:
                raise SandboxError("sandbox: the pool was closed")
            if self._factory is None or not self._factory.alive:
                if self._factory is not None:
                    self._factory.close()
                self._warm.clear()
                self._all_referees()
                self._factory = SandboxFactory(mode, self.settings)
            return self._factory

    def _replace(self, sandbox: Sandbox) -> None:
        """Set up the next sandbox, then end this used one. Called after each use of a sandbox."""
        try:
            self._refill()
        finally:
            sandbox.end()
            with self._lock:
                self._ending -= 1

    def _refill(self) -> None:
        """Keep more sandboxes ready than one client may ask for: on a busy machine set-up takes long."""
        most = WARM * self.settings.workers + SPARE
        for _ in range(2):
            with self._lock:
                factory = self._factory
                enough = len(self._warm) >= most
                if self._closed or factory is None or enough:
                    return
            try:
                fresh = factory.spawn()
            except SandboxError:
                return  # the next caller gets the same error and reports it
            with self._lock:
                if self._factory is factory:
                    self._warm.append(fresh)
                    continue
            fresh.end()

    def close(self) -> None:
        """End every sandbox, also those in use, and lend no more."""
        with self._lock:
            self._closed = True
            factory, self._factory = self._factory, None
            warm = list(self._warm)
            self._warm.clear()
            referees = self._all_referees()
        for sandbox in warm:
            sandbox.end()
        for referee in referees:
            referee.end()
        self._refill_thread.shutdown(wait=True)
        if factory is not None:
            factory.close()
