"""Warm sandboxes for worker threads: one per submission, never used for two.

A sandbox ends with its submission; the next one is set up meanwhile. A dead nursery is replaced.
Blocking; the number of callers bounds the number of sandboxes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.errors import SandboxError
from penstock.sandbox.host import Nursery, Sandbox
from penstock.sandbox.layers import Isolation, find_isolation
from penstock.sandbox.settings import SandboxSettings


class SandboxPool:
    """Lends sandboxes. Starts at first use; `close()` ends all of them."""

    def __init__(self, settings: SandboxSettings, isolation: Isolation | None = None) -> None:
        """Use `isolation`, or the strongest that works here if it is None."""
        self.settings = settings
        self._lock = threading.Lock()
        self._nursery: Nursery | None = None
        self._warm: deque[Sandbox] = deque()
        self._isolation = isolation
        self._closed = False
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
        try:
            yield sandbox
        finally:
            sandbox.end()
            with self._lock:
                if not self._closed:
                    self._gardener.submit(self._refill)

    def _take(self) -> Sandbox:
        for _ in range(2):  # a warm one may have died with its nursery
            nursery = self._start()
            with self._lock:
                sandbox = self._warm.popleft() if self._warm else None
            try:
                sandbox = sandbox or nursery.spawn()
                assert sandbox.facts
                return sandbox
            except SandboxError:
                if nursery.alive:
                    raise
                self._forget(nursery)
        raise SandboxError("sandbox: the nursery ended twice in a row")

    def _start(self) -> Nursery:
        mode = self.isolation.mode
        with self._lock:
            if self._closed:
                raise SandboxError("sandbox: the pool was closed")
            if self._nursery is None or not self._nursery.alive:
                if self._nursery is not None:
                    self._nursery.close()
                self._warm.clear()
                self._nursery = Nursery(mode, self.settings)
            return self._nursery

    def _forget(self, nursery: Nursery) -> None:
        with self._lock:
            if self._nursery is nursery:
                self._nursery = None
                self._warm.clear()
        nursery.close()

    def _refill(self) -> None:
        """Keep as many sandboxes ready as may be asked for at once. Woken by each use of one."""
        with self._lock:
            nursery = self._nursery
            if nursery is None or len(self._warm) > self.settings.workers:
                return
        try:
            fresh = nursery.spawn()
        except SandboxError:
            return  # the next caller gets the same error and reports it
        with self._lock:
            if self._nursery is nursery:
                self._warm.append(fresh)
                return
        fresh.end()

    def close(self) -> None:
        """End every sandbox, also those in use, and lend no more."""
        with self._lock:
            self._closed = True
            nursery, self._nursery = self._nursery, None
            warm = list(self._warm)
            self._warm.clear()
        for sandbox in warm:
            sandbox.end()
        self._gardener.shutdown(wait=True, cancel_futures=True)
        if nursery is not None:
            nursery.close()
