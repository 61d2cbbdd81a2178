"""Every wait of the driver, by name: which worker must answer, what was asked, since when.

A wait is open from the request until its answer. The watchdog (`workers/watchdog.py`) reads the open waits, the
timeline log the closed ones; this file only counts time, on the one clock of the driver. `tell_stage` says what a part
does while it starts; the program around the part listens. `Signal` wakes those who wait for a change of state.
Every kind of wait has a test that makes it hang (`tests/workers/test_hangs.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast

from penstock.errors import PenstockError, WorkerDied

T = TypeVar("T")


def loop_time() -> float:
    """The seconds of the running event loop's clock; of the system's without a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


_listener: Callable[[str], None] | None = None


def tell_stage(text: str) -> None:
    """Say what begins now; it lasts until the next stage of this process."""
    if _listener is not None:
        _listener(text)


def listen(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with every stage of this process, in the thread that tells it."""
    global _listener
    _listener = listener


class WaitKind(StrEnum):
    """What the driver can wait for."""

    GENERATE = "generate"  # responses, from an engine
    REWARD = "reward"  # a score
    SEND = "send"  # a finished group being written to the journal
    WAIT = "wait"  # groups for a step, or permission to launch more
    JOURNAL = "journal"  # a step being written to the journal
    TRAIN = "train"  # one update
    PUBLISH = "publish"  # weights leaving the trainer
    COLLECTIVE = "collective"  # the group that weights are broadcast to
    SYNC = "sync"  # an engine loading weights
    EVAL = "eval"  # one evaluation
    CHECKPOINT = "checkpoint"  # a copy of the training state
    WRITE_CHECKPOINT = "write checkpoint"  # that copy being written to disk
    LOAD = "load"  # a trainer loading a checkpoint
    PAUSE = "pause"  # an engine being paused or resumed
    SLEEP = "sleep"  # an engine or trainer releasing its device memory
    WAKE = "wake"  # an engine or trainer reserving its device memory again
    ASK = "ask"  # a short question
    RESTART = "restart"  # a worker being restarted

    __hash__ = str.__hash__  # an enum's own is ten times slower


@dataclass(slots=True, eq=False)
class OpenWait:
    """One wait, open inside its `with` block. `responder` must answer; empty if other waits must end first.

    An error counts as an answer. The responder's death does not, or a hang that a restart ended
    would raise the limit of the next one; a cancellation is no news at all.
    """

    waits: Waits = field(repr=False)
    lane: str  # the row of the timeline: trainer, engine-0, rewards of train, loop
    what: WaitKind
    detail: str = ""
    responder: str = ""
    since: float = 0.0
    until: float | None = None
    task: asyncio.Task[Any] | None = field(default=None, repr=False)
    number: int = 0

    def __str__(self) -> str:
        return f"{self.what} ({self.detail})" if self.detail else self.what

    def __enter__(self) -> OpenWait:
        waits = self.waits
        self.since = waits.clock()
        try:
            self.task = asyncio.current_task()
        except RuntimeError:  # no loop runs here
            self.task = None
        self.number = next(waits.numbers)
        waits.open[self.number] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        waits = self.waits
        del waits.open[self.number]
        now = self.until = waits.clock()
        self.task = None
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            waits.moved_at = now
            if self.responder and (kind is None or not issubclass(kind, WorkerDied)):
                key = (self.responder, self.what)
                waits.answered[key] = now
                waits.longest[key] = max(now - self.since, waits.longest.get(key, 0.0))
        for listener in waits.listeners:
            listener(self)


class Waits:
    """The open waits, when each responder last answered, and a callback for closed waits."""

    def __init__(self, clock: Callable[[], float] = loop_time) -> None:
        self.clock = clock
        self.open: dict[int, OpenWait] = {}
        self.answered: dict[tuple[str, WaitKind], float] = {}  # (responder, what) -> last time
        self.longest: dict[tuple[str, WaitKind], float] = {}  # (responder, what) -> seconds
        self.moved_at = clock()
        self.listeners: list[Callable[[OpenWait], None]] = []  # called with every wait that closes
        self.numbers = itertools.count()

    def on_close(self, listener: Callable[[OpenWait], None]) -> None:
        """Call `listener` with every wait that closes from now on."""
        self.listeners.append(listener)

    def wait(self, lane: str, what: WaitKind, detail: str = "", *, responder: str = "") -> OpenWait:
        """A wait that is open inside its `with` block."""
        return OpenWait(self, lane, what, detail, responder)

    def begin(
        self, lane: str, what: WaitKind, detail: str, responder: str, since: float | None = None
    ) -> OpenWait:
        """Open a wait that belongs to no task, and return it; the caller closes it with `__exit__`.

        `since`: what the clock said just now, if several waits begin together.
        """
        now = self.clock() if since is None else since
        wait = OpenWait(self, lane, what, detail, responder, now)
        wait.number = next(self.numbers)
        self.open[wait.number] = wait
        return wait

    def leaves(self) -> list[OpenWait]:
        """The open waits that have a responder; for each task, the one it opened last."""
        deepest = {wait.task or number: wait for number, wait in self.open.items()}
        return [wait for wait in deepest.values() if wait.responder]


class WaitInOrder:
    """One wait for many answers that a responder gives in order: open until the last one is there.

    It belongs to no task, as those who asked may leave before the answer.
    """

    def __init__(self, waits: Waits, lane: str, what: WaitKind, responder: str) -> None:
        self._waits, self._lane, self._what, self._responder = waits, lane, what, responder
        self._is_open = self._asked_since = False

    def asked(self, detail: str, answered: Callable[[], asyncio.Future[None]]) -> None:
        """Count a question; `answered` returns a future that is done when all so far are answered."""
        if self._is_open:
            self._asked_since = True
            return
        done, what = answered(), self._what
        wait = self._waits.begin(self._lane, what, detail, self._responder)
        self._is_open, self._asked_since = True, False
        done.add_done_callback(lambda done: self._close(wait, detail, answered, done))

    def _close(
        self,
        wait: OpenWait,
        detail: str,
        answered: Callable[[], asyncio.Future[None]],
        done: asyncio.Future[None],
    ) -> None:
        fault = asyncio.CancelledError() if done.cancelled() else done.exception()
        wait.__exit__(None if fault is None else type(fault))
        self._is_open = False
        if self._asked_since and fault is None:
            with contextlib.suppress(PenstockError):  # the responder was closed: nobody waits
                self.asked(detail, answered)


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks whose results nobody wants any more, and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def all_results(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, or the first error once all of them have ended."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast(list[T], outcomes)


class Signal:
    """A wake-up that cannot be lost.

    Read `count`, look at the state, then `wait_after(count)`: a change in between returns at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._followers: list[Signal] = []

    def forward_to(self, follower: Signal) -> None:
        """Notify `follower` too whenever this signal is notified."""
        self._followers.append(follower)

    def notify(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for follower in self._followers:
            follower.notify()

    async def wait_after(self, seen: int, timeout_s: float | None = None) -> None:
        """Wait until `count` differs from `seen`, at most `timeout_s`."""
        if self.count == seen:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
