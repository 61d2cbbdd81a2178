"""The watchdog: names the wait that is stuck, shows what its responder does, and acts.

Reads the open waits of the driver (`waits.py`). A wait is late when its responder answered nothing
for `stall_s` (or five times the longest answer of its kind so far, if that is more). Half-way and at
the end of that time the watchdog asks the responder for its progress: a responder that progressed is
alive. It acts at once on a responder that neither progressed nor used the processor. A responder
that cannot report progress, or is busy with work that counts none (compiling, one huge
micro-batch), is only reported; the watchdog acts on it after six times as long. Waits for: the time
of its next look.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import CoroutineType, FrameType
from typing import Any

from penstock.config import WatchdogConfig
from penstock.config.plugins import frames_of_user
from penstock.errors import PenstockError, RunError
from penstock.waits import OpenWait, WaitKind, Waits
from penstock.workers.workers import SupervisedWorkers

PATIENCE = 5.0  # a wait is late after this many times the longest answer so far
LONG_PATIENCE = 6.0  # act after this many times the limit, if no hang is proven
BUSY_SHARE = 0.05  # share of one core that counts as busy; the threads of an idle worker use less
_PROBE_TIMEOUT_S = 10.0
BLOCKED_S = 10.0  # in which the driver's event loop must take a turn
_WOKEN_S = 1.0  # more for a process that was stopped, whose clock went on
_NO_ANSWER = object()


@dataclass(slots=True, frozen=True)
class _Look:
    """Progress and activity of a responder at one time; None if unknown."""

    at: float
    progress: object
    activity: float | None

    def moved_on(self, before: _Look) -> bool:
        told = self.progress is not None and self.progress is not _NO_ANSWER
        return told and self.progress != before.progress

    def is_busy(self, before: _Look) -> bool:
        if self.activity is None or before.activity is None:
            return False
        return self.activity - before.activity >= BUSY_SHARE * (self.at - before.at)


class Watchdog:
    """Reports stuck waits; `run` raises if the policy says to stop."""

    def __init__(
        self,
        waits: Waits,
        settings: WatchdogConfig,
        workers: SupervisedWorkers,
        *,
        note: Callable[[str], None],
    ) -> None:
        self._waits, self._settings, self.note = waits, settings, note
        self._workers = workers
        self._looks: dict[tuple[str, WaitKind], _Look] = {}  # the last look at each kind of wait
        self._moved: dict[str, float] = {}  # responder -> when it last made progress
        self._told: dict[str, float] = {}  # responder -> when it was last reported

    async def run(self) -> None:
        """Look at waits until cancelled. Woken by: a timer set to the next look."""
        while True:
            await asyncio.sleep(self._wait_s())
            now = self._waits.clock()
            due = [wait for wait in self._waits.leaves() if self._next_look(wait) <= now]
            wait = min(due, key=lambda wait: wait.since, default=None)
            if wait is not None:
                await self._look_at(wait)
            elif self._is_deadlock():
                await self._act(None, busy=False, proven=False)

    async def _look_at(self, wait: OpenWait) -> None:
        """Take the first look, to compare with; at the second, act unless the responder progressed."""
        before, responder = self._glance_at(wait), wait.responder
        progress = await self._ask(self._workers.progress_of, responder)
        activity = await self._ask(self._workers.activity_of, responder)
        seconds = activity if isinstance(activity, float) else None
        look = _Look(self._waits.clock(), progress, seconds)
        if wait.until is not None:
            return  # the responder has answered meanwhile
        if before is None:
            self._looks[responder, wait.what] = look
        elif look.moved_on(before):
            self._moved[responder] = look.at
        else:
            busy = look.is_busy(before)
            await self._act(wait, busy=busy, proven=look.progress is not None and not busy)

    def _wait_s(self) -> float:
        now, stall_s = self._waits.clock(), self._settings.stall_s
        looks = [self._next_look(wait) for wait in self._waits.leaves()]
        if not looks:
            looks = [max(self._waits.moved_at, self._told.get("", 0.0)) + stall_s]
        latest_s = stall_s / 4  # look again early: a wait that opens now does not wake the watchdog
        left_s = min(looks) - now
        return min(left_s, latest_s) if left_s > 0 else (0.0 if self._waits.open else latest_s)

    def _limit(self, wait: OpenWait) -> float:
        longest = self._waits.longest.get((wait.responder, wait.what), 0.0)
        return max(self._settings.stall_s, PATIENCE * longest)

    def _silent_since(self, wait: OpenWait) -> float:
        answered = self._waits.answered.get((wait.responder, wait.what), 0.0)
        return max(wait.since, answered, self._moved.get(wait.responder, 0.0))

    def _counted_from(self, wait: OpenWait) -> float:
        return max(self._silent_since(wait), self._told.get(wait.responder, 0.0))

    def _glance_at(self, wait: OpenWait) -> _Look | None:
        """The look taken half-way through the present silence, if any."""
        look = self._looks.get((wait.responder, wait.what))
        return look if look is not None and look.at >= self._counted_from(wait) else None

    def _next_look(self, wait: OpenWait) -> float:
        begin, whole, glance = self._counted_from(wait), self._limit(wait), self._glance_at(wait)
        return begin + whole / 2 if glance is None else max(begin + whole, glance.at + whole / 2)

    async def _ask(self, question: Callable[[str], Awaitable[object]], responder: str) -> object:
        try:
            async with asyncio.timeout(min(_PROBE_TIMEOUT_S, self._settings.stall_s / 4)):
                return await question(responder)
        except (PenstockError, OSError):  # a failed probe must not end the run
            return _NO_ANSWER

    def _is_deadlock(self) -> bool:
        """Whether parts of the driver wait for each other while no worker is asked anything."""
        waits = list(self._waits.open.values())
        moved = max(self._waits.moved_at, self._told.get("", 0.0))
        return (
            bool(waits)
            and not self._waits.leaves()
            and self._waits.clock() >= moved + self._settings.stall_s  # as `_wait_s` counts it
        )

    async def _act(self, wait: OpenWait | None, *, busy: bool, proven: bool) -> None:
        """Report; then, by policy, act on a hang that is proven or has lasted long."""
        now, responder = self._waits.clock(), wait.responder if wait is not None else ""
        limit = self._settings.stall_s if wait is None else self._limit(wait)
        silent_s = now - (self._waits.moved_at if wait is None else self._silent_since(wait))
        is_over = proven or silent_s >= LONG_PATIENCE * limit
        acts = self._settings.action != "report" and is_over and not self._waits_for_a_restart(wait)
        line = self._line(wait) + (" (its process is busy with something)" if busy else "")
        self.note(f"{line}\n{await self._stack(wait)}".rstrip())
        self._told[responder] = self._waits.clock()
        if not acts:
            return
        may_restart = self._settings.action == "restart" and bool(responder)
        if may_restart and await self._workers.restart(responder, line):
            return
        await self._workers.end(line)  # nobody watches what unwinds: it must not wait for one
        raise RunError(line)

    def _waits_for_a_restart(self, wait: OpenWait | None) -> bool:
        """Whether the driver waits for a restart, which has its own time-out and limit."""
        others = self._waits.open.values()
        return wait is None and any(other.what is WaitKind.RESTART for other in others)

    def _line(self, wait: OpenWait | None) -> str:
        now = self._waits.clock()
        if wait is None:
            waits = (f"{other.lane} waits for {other}" for other in self._waits.open.values())
            since = now - self._waits.moved_at
            return f"stuck: nothing has moved for {since:.0f} s: {'; '.join(waits)}"
        waiter = wait.task.get_name() if wait.task is not None else wait.lane
        return (
            f"stuck: {wait.responder} has not answered {wait} for {now - wait.since:.0f} s; "
            f"{waiter} waits for it"
        )

    async def _stack(self, wait: OpenWait | None) -> str:
        if wait is None:
            return ""
        try:
            text = await self._workers.stack_of(wait.responder)
        except (PenstockError, OSError) as error:  # nor must a stack that cannot be read
            text = f"(no stack: {type(error).__name__}: {error})"
        return text or (coroutine_stack(wait.task) if wait.task is not None else "")


@asynccontextmanager
async def watched(watchdog: Watchdog) -> AsyncIterator[None]:
    """Watch every wait inside the block; raise the watchdog's error there if it says to stop."""
    fault: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watchdog.run(), name="watchdog")
            with _naming_blocks(watchdog.note):
                yield
            watching.cancel()
    except BaseExceptionGroup as ended:
        fault = ended.exceptions[0]
    if fault is not None:
        raise fault


def coroutine_stack(task: asyncio.Task[Any]) -> str:
    """Where a waiting task is, from its first coroutine to the one that awaits."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        lines += traceback.format_stack(awaited.cr_frame, limit=1)
        awaited = awaited.cr_await
    return f"task {task.get_name()}:\n{''.join(lines)}".rstrip()


@contextmanager
def _naming_blocks(note: Callable[[str], None]) -> Iterator[None]:
    """Name code that blocks this event loop inside the block: nothing goes on then, nor can the watchdog look."""
    loop, thread, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()

    def look() -> None:
        while not over.wait(BLOCKED_S / 4):
            turn = threading.Event()
            loop.call_soon_threadsafe(turn.set)
            if turn.wait(BLOCKED_S) or turn.wait(_WOKEN_S):
                continue
            place = _blocking_place(sys._current_frames()[thread])
            note(f"the run stands still: {place} has blocked its event loop for {BLOCKED_S:g} s")
            while not (turn.wait(BLOCKED_S) or over.is_set()):
                pass

    threading.Thread(target=look, name="block watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _blocking_place(frame: FrameType) -> str:
    """The innermost line of the user's in what the loop runs; without one, what Penstock has called."""
    frames = list(traceback.extract_stack(frame))
    loops = [i for i, each in enumerate(frames) if each.filename == asyncio.events.__file__]
    frames = frames[max(loops, default=-1) + 1 :] or frames
    theirs = frames_of_user(frames)
    ours = [i for i, each in enumerate(frames) if "/penstock/" in each.filename]
    called = frames[min(max(ours, default=-1) + 1, len(frames) - 1)]
    shown = theirs[-1] if theirs else called
    return f"{shown.filename}:{shown.lineno} in {shown.name}"
