"""A worker that is restarted when it ends: with a back-off, and a bounded number of times.

Serves every kind of worker. Calls under way when a worker ends fail at once with WorkerDied; the
owner of the part (`trainer.py`, `workers/pool/`) decides whether to repeat them. Before a new worker serves,
its owner (`Restarts`) brings it to the state of the old one. Every event is one line to the user.

Every call into a worker opens the wait that the watchdog sees (`wait_for`).
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from penstock.config import LaunchConfig
from penstock.errors import PenstockError, WorkerDied
from penstock.files import say
from penstock.waits import OpenWait, WaitKind, Waits, loop_time


class Worker(Protocol):
    """A part in another process or thread. Calls raise WorkerDied once the worker has ended."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Where the worker runs: a process id, a node."""

    @property
    def can_be_killed(self) -> bool:
        """False for a part of this process."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def ended(self) -> str:
        """Wait until the worker has ended; return the reason."""

    async def stack(self) -> str:
        """What the worker's threads are doing; empty for a part of this process."""

    async def activity(self) -> float | None:
        """The seconds of work that the worker has spent (`rpc.py`); None if unknown."""

    async def kill(self) -> None:
        """End the worker now, even if it is blocked."""

    async def close(self) -> None:
        """Let the worker end, and make sure that it does."""


Spawn = Callable[[], Awaitable[Worker]]
Call = Callable[..., Awaitable[Any]]  # call("method", *args) of one worker
Prepare = Callable[[Call], Awaitable[None]]
_LONGEST_BACKOFF_S = 60.0
RESTART_WINDOW_S = 600.0  # over which launch.max_restarts counts
_SAME_FAULTS = 3  # a worker that dies of one error so often in a row is given up
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
CALLS = {  # the kind of wait that a method of a worker opens; any other is a short question
    **dict.fromkeys(("generate", "generate_many"), WaitKind.GENERATE),
    **dict.fromkeys(("update_weights", "hold_adapter"), WaitKind.SYNC),
    "train": WaitKind.TRAIN,
    **dict.fromkeys(("announce", "publish"), WaitKind.PUBLISH),
    **dict.fromkeys(("endpoint", "receive"), WaitKind.COLLECTIVE),
    "snapshot": WaitKind.CHECKPOINT,
    "write_snapshot": WaitKind.WRITE_CHECKPOINT,
    "load": WaitKind.LOAD,
    **dict.fromkeys(("abort", "pause", "resume"), WaitKind.PAUSE),
    "sleep": WaitKind.SLEEP,
    "wake": WaitKind.WAKE,
    **dict.fromkeys(
        ("stats", "identity", "is_exact", "adapters", "progress", "request_stop"), WaitKind.ASK
    ),
}


def wait_for(worker: Worker, waits: Waits, method: str) -> OpenWait:
    """The wait for a worker's answer, which is open inside its `with` block."""
    lane = "checkpoint" if method == "write_snapshot" else worker.name
    kind = CALLS.get(method, WaitKind.ASK)
    return waits.wait(lane, kind, responder=worker.name)


async def call_worker(worker: Worker, waits: Waits, method: str, *args: Any) -> Any:
    """Call a method of a worker; keep the wait for its answer open until the answer comes."""
    with wait_for(worker, waits, method):
        return await worker.call(method, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionCallbacks:
    """What workers tell the run. A run makes it before its workers and passes it to the launcher."""

    waits: Waits
    note: Callable[[str], None] = lambda text: say(text, error=True)
    log: Callable[[str, str], str] = lambda worker, text: ""  # to a worker's log; returns its path
    confirmed: Callable[[int, str], None] = lambda version, digest: None  # by an engine's answer
    replaced: Callable[[int, str], None] = lambda version, digest: None  # published for a lost one


async def nothing(*_: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """What the owner of a worker does when the worker is restarted."""

    prepare: Prepare | None = None  # restores the state of the old worker; None: its end is final
    start_context: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    when_back: Callable[[], Awaitable[None]] = nothing
    when_given_up: Callable[[], None] = lambda: None


class Supervised:
    """One worker and its successors. The end of a worker is final until `restart_with`."""

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        settings: LaunchConfig,
        events: SupervisionCallbacks,
        *,
        when_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.given_up: WorkerDied | None = None
        self.restarts = 0
        self.events = events
        self._spawn, self._settings = spawn, settings
        self._when_closed = when_closed
        self._owner = Restarts()
        self._ends: deque[float] = deque()  # when workers ended, within the restart window
        self._faults: deque[float] = deque()  # when they died of the newest fault, in a row
        self._newest_fault = self._log = ""
        self._replaced_for = ""  # why the worker that ends now was killed
        self._worker: Worker | None = None
        self._starting: Worker | None = None  # the next worker, while it is being prepared
        self._settled = asyncio.Event()  # a worker serves, or none ever will again
        self._supervising: asyncio.Task[None] | None = None

    @property
    def worker(self) -> Worker | None:
        """The worker that serves now."""
        return self._worker if self._settled.is_set() and self.given_up is None else None

    @property
    def can_restart(self) -> bool:
        """Whether a worker that is killed now would be followed by another one."""
        worker = self._current
        return self._owner.prepare is not None and (worker is None or worker.can_be_killed)

    def restart_with(self, owner: Restarts) -> None:
        """From now on, restart the worker when it ends, with the help of its owner."""
        self._owner = owner

    def retire(self, reason: str) -> None:
        """Refuse every further call: the worker was closed for good."""
        self.given_up = WorkerDied(f"{self.name}: {reason}")

    async def start(self) -> None:
        self._worker = await self._spawn()
        self._settled.set()
        self._supervising = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def call(self, method: str, *args: Any) -> Any:
        """Call the worker that serves now; raise WorkerDied at once if none does."""
        worker = self.worker
        if worker is None:
            raise self.given_up or WorkerDied(f"{self.name}: it is being started again")
        try:
            with wait_for(worker, self.events.waits, method):
                return await worker.call(method, *args)
        except WorkerDied:
            if worker is self._worker and self.given_up is None:
                self._settled.clear()
            raise

    async def ready(self) -> None:
        """Wait until a worker serves; raise WorkerDied if supervision gave up."""
        with self.events.waits.wait("driver", WaitKind.RESTART, self.name):
            await self._settled.wait()
        if self.given_up is not None:
            raise self.given_up

    async def replace(self, reason: str, *, traceback: str | None = None) -> None:
        """Kill the current worker (serving or starting), so that another one is started.

        traceback: given if the part inside the worker died of an error, whose first line is `reason`.
        """
        worker = self._current
        if worker is not None:
            self._replaced_for = f"{self.name}: {reason}"
            if traceback is not None:
                self._log = self.events.log(self.name, traceback)
                fault = _NUMBERS.sub("#", reason)
                if fault != self._newest_fault:
                    self._newest_fault = fault
                    self._faults.clear()
                self._faults.append(loop_time())
            self._settled.clear()
            await worker.kill()

    async def end(self, reason: str) -> None:
        """Kill the current worker for good, if it can be killed: every call of it fails."""
        worker = self._current
        self._owner = replace(self._owner, prepare=None)
        if worker is not None and worker.can_be_killed:
            await self.replace(reason)

    @property
    def _current(self) -> Worker | None:
        return self._starting or self.worker

    async def stack(self) -> str:
        """The stacks of the current worker's threads."""
        worker = self._current
        return "no worker is there" if worker is None else await worker.stack()

    async def progress(self, method: str) -> Any:
        """The result of `method` of the current worker; None without a worker. Opens no wait."""
        worker = self._current
        return None if worker is None else await worker.call(method)

    async def activity(self) -> float | None:
        """Seconds of work that the current worker's process has spent; None if unknown."""
        worker = self._current
        return None if worker is None else await worker.activity()

    async def close(self) -> None:
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        self.given_up = self.given_up or WorkerDied(f"{self.name}: it was closed")
        self._settled.set()  # nobody waits for a worker that will not come
        if self._worker is not None:
            await self._worker.close()
        self._when_closed()

    async def _supervise(self) -> None:
        """Restart the worker whenever it ends. Waits for: its end. Woken by: that end."""
        try:
            while self.given_up is None:
                assert self._worker is not None
                reason = self._reason(await self._worker.ended())
                self._settled.clear()
                await self._worker.close()
                if await self._restart(reason):
                    await self._tell_of_return()
        except Exception as error:  # a bug of ours: callers must get the error
            self.events.note(f"{self.name}: supervision failed\n{traceback.format_exc()}")
            line = f"{self.name}: supervision failed: {type(error).__name__}: {error}"
            self.given_up = WorkerDied(line)
        self._settled.set()
        try:
            self._owner.when_given_up()
        except Exception:  # callers get `given_up`; whoever is told first must not hide the rest
            self.events.note(f"{self.name}: it was given up\n{traceback.format_exc()}")

    async def _tell_of_return(self) -> None:
        try:
            await self._owner.when_back()
        except PenstockError as error:
            await self.replace(f"it was restarted but cannot serve: {error}")

    async def _restart(self, reason: str) -> bool:
        """Start workers until one is prepared; False when the allowed number is used up."""
        began = loop_time()
        while self._may_restart():
            before = len(self._ends) - 1
            base = self._settings.restart_backoff_s
            wait_s = 0.0 if not before else min(base * 2.0 ** (before - 1), _LONGEST_BACKOFF_S)
            when = f" in {wait_s:g} s" if wait_s else ""
            limit = self._settings.max_restarts
            self.events.note(f"{reason}; starting it again{when} ({len(self._ends)} of {limit})")
            await asyncio.sleep(wait_s)  # the back-off
            try:
                await self._start_next()
            except (PenstockError, OSError) as error:
                reason = self._reason(str(error))
                continue
            assert self._worker is not None
            self.restarts += 1
            seconds = loop_time() - began
            place = self._worker.place
            self.events.note(f"{self.name}: serves again ({place}) after {seconds:.1f} s")
            self._settled.set()
            return True
        self.given_up = WorkerDied(self._last_line(reason))
        return False

    def _reason(self, observed: str) -> str:
        """Why a worker ended: why it was killed, or what was observed."""
        reason, self._replaced_for = self._replaced_for or observed, ""
        return reason

    async def _start_next(self) -> None:
        async with self._owner.start_context():
            worker = self._starting = await self._spawn()
            try:
                assert self._owner.prepare is not None
                await self._owner.prepare(partial(call_worker, worker, self.events.waits))
            except BaseException:  # not prepared: the worker must not outlive it
                await worker.close()
                raise
            finally:
                self._starting = None
            self._worker = worker

    def _may_restart(self) -> bool:
        """Count an end of the worker; False if the window holds too many, or the same fault again."""
        now = loop_time()
        for times in (self._ends, self._faults):
            while times and times[0] < now - RESTART_WINDOW_S:
                times.popleft()
        if self._owner.prepare is None or len(self._ends) >= self._settings.max_restarts:
            return False
        if len(self._faults) >= _SAME_FAULTS:
            return False
        self._ends.append(now)
        return True

    def _last_line(self, reason: str) -> str:
        if self._owner.prepare is None or not self._settings.max_restarts:
            return reason
        if len(self._faults) >= _SAME_FAULTS:
            times = f"{reason}; {self.name} died of this {len(self._faults)} times in a row"
            return f"{times} and is given up (traceback: {self._log})"
        return (
            f"{reason}; {self.name} was started again {len(self._ends)} times within "
            f"{RESTART_WINDOW_S:g} s (launch.max_restarts = "
            f"{self._settings.max_restarts}) and is given up"
        )
