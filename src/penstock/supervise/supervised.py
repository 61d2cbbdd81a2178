"""A worker that is started again when it ends: with a back-off, a bounded number of times.

The same for every kind of worker. Calls under way at its end fail at once with WorkerDied; what is
done about them is the business of the part (`engines.py`, `trainer.py`). Before a new worker serves,
`prepare` brings it to where the old one was. Every event is one line to the user.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.config import LaunchConfig
from penstock.errors import PenstockError, WorkerDied
from penstock.supervise.worker import Worker
from penstock.watch.waits import WaitKind, Waits

Spawn = Callable[[], Awaitable[Worker]]
Prepare = Callable[[Any], Awaitable[None]]
_LONGEST_BACKOFF_S = 60.0
CALLS = {  # every method of a part that is called through a wait, and what the wait is
    **dict.fromkeys(("generate", "generate_many"), WaitKind.GENERATE),
    "update_weights": WaitKind.SYNC,
    "train": WaitKind.TRAIN,
    **dict.fromkeys(("announce", "publish"), WaitKind.PUBLISH),
    **dict.fromkeys(("folder", "meeting", "send", "receive"), WaitKind.COLLECTIVE),
    "snapshot": WaitKind.CHECKPOINT,
    "write_snapshot": WaitKind.WRITE_CHECKPOINT,
    "load": WaitKind.LOAD,
    **dict.fromkeys(("abort", "pause", "resume"), WaitKind.PAUSE),
    "sleep": WaitKind.SLEEP,
    "wake": WaitKind.WAKE,
    **dict.fromkeys(("stats", "identity", "is_exact", "progress", "request_stop"), WaitKind.ASK),
}


@dataclass(slots=True, kw_only=True)
class SupervisionCallbacks:
    """What supervision needs of the run around it; the job and the loop fill it in."""

    waits: Waits
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    first_loaded: Callable[[int, str], None] = lambda version, digest: None  # by one of the engines


class Watched:
    """Any part behind async methods, each call an open wait while it lasts."""

    def __init__(self, name: str, waits: Waits, call: Callable[..., Awaitable[Any]]) -> None:
        self._name, self._waits, self._call = name, waits, call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in CALLS:
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            what = CALLS[method]
            lane = self._name if method != "write_snapshot" else "checkpoint"
            with self._waits.wait(lane, what, responder=self._name):
                return await self._call(method, *args, **kwargs)

        return call


class Supervised:
    """One worker and those that come after it. `prepare` None: its end is final."""

    def __init__(
        self, name: str, spawn: Spawn, settings: LaunchConfig, callbacks: SupervisionCallbacks
    ) -> None:
        self.name = name
        self.prepare: Prepare | None = None
        self.room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # to start in
        self.when_back: Callable[[], Awaitable[None]] = nothing
        self.when_given_up: Callable[[], None] = lambda: None
        self.when_closed: Callable[[], None] = lambda: None
        self.given_up: WorkerDied | None = None
        self.restarts = 0
        self._spawn, self._settings, self._callbacks = spawn, settings, callbacks
        self._ends: deque[float] = deque()
        self._worker: Worker | None = None
        self._coming: Worker | None = None  # the next one, while it is being prepared
        self._settled = asyncio.Event()  # it serves, or it never will again
        self._tending: asyncio.Task[None] | None = None

    @property
    def worker(self) -> Worker | None:
        """The one that serves now."""
        return self._worker if self._settled.is_set() and self.given_up is None else None

    async def start(self) -> None:
        self._worker = await self._spawn()
        self._settled.set()
        self._tending = asyncio.create_task(self._tend(), name=f"tend {self.name}")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the worker that serves now; WorkerDied at once where there is none."""
        worker = self.worker
        if worker is None:
            raise self.given_up or WorkerDied(f"{self.name}: it is being started again")
        try:
            return await worker.call(method, *args, **kwargs)
        except WorkerDied:
            if worker is self._worker and self.given_up is None:
                self._settled.clear()
            raise

    async def ready(self) -> None:
        """Waits until the worker serves; raises where it was given up. Woken by its supervision."""
        with self._callbacks.waits.wait("driver", WaitKind.RESTART, self.name):
            await self._settled.wait()
        if self.given_up is not None:
            raise self.given_up

    async def replace(self, reason: str) -> None:
        """End the worker, to have it started again; one that is being prepared, too."""
        worker = self._present
        if worker is not None:
            self._callbacks.note(f"{self.name}: {reason}; it is ended")
            self._settled.clear()
            await worker.kill()

    @property
    def _present(self) -> Worker | None:
        """The one that works now, for the run or on its way to it."""
        return self._coming or self.worker

    async def stack(self) -> str:
        worker = self._present
        return "no worker is there" if worker is None else await worker.stack()

    async def progress(self, method: str) -> Any:
        """What this method tells of the one that works now; None: there is none."""
        worker = self._present
        return None if worker is None else await worker.call(method)

    async def effort(self) -> float | None:
        """Seconds of work that its process has spent; None: it cannot be told."""
        worker = self._present
        return None if worker is None else await worker.effort()

    async def close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        if self._worker is not None:
            await self._worker.close()
        self.when_closed()

    async def _tend(self) -> None:
        """Waits for the worker's end, woken by it; starts the next one."""
        while self.given_up is None:
            assert self._worker is not None
            reason = await self._worker.ended()
            self._settled.clear()
            await self._worker.close()
            if await self._start_again(reason):
                await self._tell_of_return()
            else:
                self._settled.set()
                self.when_given_up()

    async def _tell_of_return(self) -> None:
        try:
            await self.when_back()
        except PenstockError as error:
            await self.replace(f"it came back but cannot serve: {error}")

    async def _start_again(self, reason: str) -> bool:
        began = time.monotonic()
        while self._may_restart():
            wait_s = self._backoff_s()
            when = f" in {wait_s:g} s" if wait_s else ""
            limit = self._settings.max_restarts
            self._callbacks.note(
                f"{reason}; starting it again{when} ({len(self._ends)} of {limit})"
            )
            await asyncio.sleep(wait_s)  # the back-off
            try:
                await self._replace_worker()
            except (PenstockError, OSError) as error:
                reason = str(error)
                continue
            assert self._worker is not None
            self.restarts += 1
            seconds = time.monotonic() - began
            place = self._worker.place
            self._callbacks.note(f"{self.name}: serves again ({place}) after {seconds:.1f} s")
            self._settled.set()
            return True
        self.given_up = WorkerDied(self._last_line(reason))
        return False

    async def _replace_worker(self) -> None:
        async with self.room():
            worker = self._coming = await self._spawn()
            try:
                assert self.prepare is not None
                waits = self._callbacks.waits
                await self.prepare(Watched(self.name, waits, worker.call))
            except BaseException:
                await worker.close()
                raise
            finally:
                self._coming = None
            self._worker = worker

    def _may_restart(self) -> bool:
        """Count an end; too many within the window are the last."""
        now = time.monotonic()
        while self._ends and self._ends[0] < now - self._settings.restart_window_s:
            self._ends.popleft()
        if self.prepare is None or len(self._ends) >= self._settings.max_restarts:
            return False
        self._ends.append(now)
        return True

    def _backoff_s(self) -> float:
        """None before the first start in the window, then doubling."""
        before = len(self._ends) - 1
        base = self._settings.restart_backoff_s
        return 0.0 if not before else min(base * 2.0 ** (before - 1), _LONGEST_BACKOFF_S)

    def _last_line(self, reason: str) -> str:
        if self.prepare is None or not self._settings.max_restarts:
            return reason
        return (
            f"{reason}; {self.name} was started again {len(self._ends)} times within "
            f"{self._settings.restart_window_s:g} s (launch.max_restarts = "
            f"{self._settings.max_restarts}) and is given up"
        )


async def nothing() -> None: ...
