"""Every wait of the driver, by name: who is asked, for what, since when.

A wait is open from the moment something is asked until it is answered. The watchdog looks at the
open ones, the timeline keeps the closed ones; this file only counts time and knows neither. Every
kind of wait has a test that makes it hang (`tests/watch/test_hangs.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WaitKind(StrEnum):
    """What can be waited for."""

    GENERATE = "generate"  # responses, from an engine
    REWARD = "reward"  # a score
    SEND = "send"  # a finished group on its way into journal and buffer
    WAIT = "wait"  # groups for a step, or room for the next ones
    JOURNAL = "journal"  # a step that is being written down
    TRAIN = "train"  # one update
    PUBLISH = "publish"  # weights on their way out of the trainer
    OBJECT_STORE = "object store"  # those weights on their way into Ray's object store
    COLLECTIVE = "collective"  # the group that weights are broadcast to
    SYNC = "sync"  # weights on their way into an engine
    EVAL = "eval"  # one evaluation
    CHECKPOINT = "checkpoint"  # a copy of the training state
    WRITE_CHECKPOINT = "write checkpoint"  # that copy on its way to disk
    LOAD = "load"  # a checkpoint on its way back
    PAUSE = "pause"  # an engine that is told to stop, or to go on
    SLEEP = "sleep"  # an engine that gives its memory to the trainer, or the other way round
    WAKE = "wake"  # who takes it back
    ASK = "ask"  # a short question
    RESTART = "restart"  # a worker that is being started again


@dataclass(slots=True, kw_only=True)
class OpenWait:
    """One wait. `responder` must answer it; empty: it waits for other waits of the driver."""

    lane: str  # whose time it is: trainer, engine-0, rewards of train, loop
    what: WaitKind
    detail: str = ""
    responder: str = ""
    since: float = 0.0
    until: float | None = None
    task: asyncio.Task[Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.what} ({self.detail})" if self.detail else self.what


class Waits:
    """The open waits, when each responder last answered, and who wants to hear of closed ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: dict[int, OpenWait] = {}
        self.answered: dict[tuple[str, WaitKind], float] = {}  # (responder, what) -> last time
        self.longest: dict[tuple[str, WaitKind], float] = {}  # (responder, what) -> seconds
        self.moved_at = clock()
        self.on_close: Callable[[OpenWait], None] = lambda wait: None
        self._numbers = itertools.count()

    @contextmanager
    def wait(
        self, lane: str, what: WaitKind, detail: str = "", *, responder: str = ""
    ) -> Iterator[OpenWait]:
        """The wait is open inside. An error is an answer too; a wait that was cancelled had none."""
        number = next(self._numbers)
        wait = OpenWait(
            lane=lane,
            what=what,
            detail=detail,
            responder=responder,
            since=self.clock(),
            task=_current_task(),
        )
        self.open[number] = wait
        answered = True
        try:
            yield wait
        except asyncio.CancelledError:
            answered = False
            raise
        finally:
            del self.open[number]
            wait.until, wait.task = self.clock(), None
            if answered:
                self._note_answer(wait, wait.until)
            self.on_close(wait)

    def leaves(self) -> list[OpenWait]:
        """Open waits that somebody must answer; of one task's, that which it opened last."""
        deepest = {wait.task or number: wait for number, wait in self.open.items()}
        return [wait for wait in deepest.values() if wait.responder]

    def _note_answer(self, wait: OpenWait, now: float) -> None:
        self.moved_at = now
        if wait.responder:
            key = (wait.responder, wait.what)
            self.answered[key] = now
            self.longest[key] = max(now - wait.since, self.longest.get(key, 0.0))


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
