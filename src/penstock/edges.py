"""Every wait of the driver, by name: who is asked, for what, since when. Layer 0.

An edge is open from the moment something is asked until it is answered. The watchdog looks at the
open ones, the timeline keeps the closed ones; this file only counts time and knows neither. Every
kind of edge has a test that makes it hang (`tests/test_hangs.py`).
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


class EdgeKind(StrEnum):
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
class Edge:
    """One wait. `culprit` must answer it; empty: it waits for other edges of the driver."""

    lane: str  # whose time it is: trainer, engine-0, rewards of train, loop
    what: EdgeKind
    detail: str = ""
    culprit: str = ""
    since: float = 0.0
    until: float | None = None
    task: asyncio.Task[Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.what} ({self.detail})" if self.detail else self.what


class Edges:
    """The open edges, when each culprit last answered, and who wants to hear of closed ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: dict[int, Edge] = {}
        self.answered: dict[tuple[str, EdgeKind], float] = {}  # (culprit, what) -> last time
        self.longest: dict[tuple[str, EdgeKind], float] = {}  # (culprit, what) -> seconds
        self.moved_at = clock()
        self.on_close: Callable[[Edge], None] = lambda edge: None
        self._numbers = itertools.count()

    @contextmanager
    def wait(
        self, lane: str, what: EdgeKind, detail: str = "", *, culprit: str = ""
    ) -> Iterator[Edge]:
        """The edge is open inside. An error is an answer too; a wait that was cancelled had none."""
        number = next(self._numbers)
        edge = Edge(
            lane=lane,
            what=what,
            detail=detail,
            culprit=culprit,
            since=self.clock(),
            task=_current_task(),
        )
        self.open[number] = edge
        answered = True
        try:
            yield edge
        except asyncio.CancelledError:
            answered = False
            raise
        finally:
            del self.open[number]
            edge.until, edge.task = self.clock(), None
            if answered:
                self._note_answer(edge, edge.until)
            self.on_close(edge)

    def leaves(self) -> list[Edge]:
        """Open edges that somebody must answer; of one task's, that which it opened last."""
        deepest = {edge.task or number: edge for number, edge in self.open.items()}
        return [edge for edge in deepest.values() if edge.culprit]

    def _note_answer(self, edge: Edge, now: float) -> None:
        self.moved_at = now
        if edge.culprit:
            key = (edge.culprit, edge.what)
            self.answered[key] = now
            self.longest[key] = max(now - edge.since, self.longest.get(key, 0.0))


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
