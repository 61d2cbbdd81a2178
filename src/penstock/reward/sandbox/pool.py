"""Warm sandboxes for worker threads: one per submission, never used for two; and referees.

A sandbox ends after its submission, and the next one is set up: both take more processor time than a short
submission, so they wait for a pause between submissions unless that leaves few sandboxes ready. A dead nursery is
replaced. Referees run no solution and are used again.
Blocking; the number of callers bounds the number of sandboxes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.errors import SandboxError
from penstock.reward.sandbox.host import Nursery, Referee, Sandbox
from penstock.reward.sandbox.layers import Isolation, find_isolation
from penstock.reward.sandbox.settings import SandboxSettings, job_limits

REFEREE_LIFE_S = 1e6
REFEREE_BYTES = 1 << 30
NICE = 19
WARM = 4  # sandboxes that are ready, for each worker
SPARE = 8  # and so many more, for a burst of one client's submissions
FEW = 2  # with fewer of them, for each worker, the next ones are set up without a wait
MOST_ENDING = 8  # used sandboxes, for each worker; past it a submission ends its own
PAUSE_S = 0.005  # after a submission nothing is set up for so long: its verdict is on the way
SHORT_S = 0.03  # nor while one runs, unless it runs for longer
ANSWERS_PER_REFEREE = 1000  # then a fresh one: its memory may be in pieces


class SandboxPool:
    """Lends sandboxes. Starts at first use; `close()` ends all of them."""

    def __init__(
        self,
        settings: SandboxSettings,
        isolation: Isolation | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        """Use `isolation`, or the strongest that works here if it is None."""
        self.settings = settings
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # one came back, few are left, or all end
        self._nursery: Nursery | None = None
        self._warm: deque[Sandbox] = deque()
        # those that nobody uses; the nice ones judge large answers, behind all small ones
        self._referees: dict[bool, list[Referee]] = {False: [], True: []}
        self._isolation = isolation
        self._closed = False
        self._ending = 0  # used sandboxes that the gardener has still to end
        self._lent: dict[Sandbox, float] = {}  # when each is no longer taken for a short one
        self._pause_until_s = 0.0
        self._gardener = ThreadPoolExecutor(1, thread_name_prefix="sandbox-refill")

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
        with self._lock:
            self._lent[sandbox] = time.monotonic() + SHORT_S
        try:
            yield sandbox
        finally:
            sandbox.stop()
            with self._lock:
                del self._lent[sandbox]
                self._pause_until_s = time.monotonic() + self._pause_s
                self._changed.notify()
                later = not self._closed and self._ending < MOST_ENDING * self.settings.workers
                if later:  # the verdict does not wait for the end of the solution's processes
                    self._ending += 1
                    self._gardener.submit(self._replace, sandbox)
            if not later:
                sandbox.end()

    @contextmanager
    def referee(self, *, nice: bool = False) -> Iterator[Referee]:
        """Lend a referee; it ends if the block is left by an exception."""
        with self._lock:
            ready = self._referees[nice]
            referee = ready.pop() if ready else None
        if referee is None:
            sandbox = self._take()
            try:
                limits = job_limits(self.settings, REFEREE_LIFE_S, NICE if nice else 0)
                referee = Referee(sandbox, limits | {"memory_bytes": REFEREE_BYTES})
            except BaseException:
                sandbox.end()
                raise
        try:
            yield referee
        except BaseException:
            with self._lock:  # what ended this one may have ended the others
                others = self._all_referees()
            for one in (referee, *others):
                one.end()
            raise
        with self._lock:
            if not self._closed and referee.answers < ANSWERS_PER_REFEREE:
                self._referees[nice].append(referee)
                return
        referee.end()

    def _all_referees(self) -> list[Referee]:
        """Return the referees that nobody uses, and forget them; with the lock held."""
        found = [*self._referees[False], *self._referees[True]]
        self._referees = {False: [], True: []}
        return found

    def _take(self) -> Sandbox:
        for _ in range(2):  # a warm one may have died with its nursery
            nursery = self._start()
            sandbox = self._warm_one()
            try:
                sandbox = sandbox or nursery.spawn()
                assert sandbox.facts
                return sandbox
            except SandboxError:
                if nursery.alive:
                    raise
                self._forget(nursery)
        raise SandboxError("sandbox: the nursery ended twice in a row")

    def _warm_one(self) -> Sandbox | None:
        """Return a sandbox that is set up, or else the one that was begun first."""
        with self._lock:
            if not self._warm:
                return None
            sandbox = next((one for one in self._warm if one.is_ready), self._warm[0])
            self._warm.remove(sandbox)
            if self._is_behind():
                self._changed.notify()
            return sandbox

    def _start(self) -> Nursery:
        mode = self.isolation.mode
        with self._lock:
            if self._closed:
                raise SandboxError("sandbox: the pool was closed")
            if self._nursery is None or not self._nursery.alive:
                if self._nursery is not None:
                    self._nursery.close()
                self._warm.clear()
                self._all_referees()
                self._nursery = Nursery(mode, self.settings)
            return self._nursery

    def _forget(self, nursery: Nursery) -> None:
        with self._lock:
            if self._nursery is nursery:
                self._nursery = None
                self._warm.clear()
        nursery.close()

    def _replace(self, used: Sandbox) -> None:
        """Set up the next sandbox, then end a used one. Woken by each use of one."""
        try:
            self._refill(FEW * self.settings.workers)
            if self._found_pause():
                self._refill(WARM * self.settings.workers + SPARE)
        finally:
            used.end()
            with self._lock:
                self._ending -= 1

    def _found_pause(self) -> bool:
        """Wait until no short submission runs or has just ended; False if there is much to do before."""
        with self._lock:
            while not self._is_behind() and not self._closed:
                left_s = max([self._pause_until_s, *self._lent.values()]) - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def _is_behind(self) -> bool:
        workers = self.settings.workers
        return len(self._warm) < FEW * workers or self._ending > WARM * workers

    def _refill(self, most: int) -> None:
        """Keep more sandboxes ready than one client may ask for: on a busy machine set-up takes long."""
        for _ in range(2):
            with self._lock:
                nursery = self._nursery
                enough = len(self._warm) >= most
                if self._closed or nursery is None or enough:
                    return
            try:
                fresh = nursery.spawn()
            except SandboxError:
                return  # the next caller gets the same error and reports it
            with self._lock:
                if self._nursery is nursery:
                    self._warm.append(fresh)
                    continue
            fresh.end()

    def close(self) -> None:
        """End every sandbox, also those in use, and lend no more."""
        with self._lock:
            self._closed = True
            self._changed.notify()
            nursery, self._nursery = self._nursery, None
            warm = list(self._warm)
            self._warm.clear()
            referees = self._all_referees()
        for sandbox in warm:
            sandbox.end()
        for referee in referees:
            referee.end()
        self._gardener.shutdown(wait=True)
        if nursery is not None:
            nursery.close()
