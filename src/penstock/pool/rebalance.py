"""Looks at engines that hold the last responses, and takes these from one that is slow.

Consumes the tokens that engines have made between two looks; produces aborts, whose partial responses the
pool gives to another engine. A look happens only while nothing waits and an engine is idle, seldom, and not
for ever. Whether a move is worth it is decided by `dispatch.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.engine.protocol import InferenceEngine
from penstock.errors import RunError
from penstock.pool.dispatch import Dispatcher
from penstock.pool.prompt_batch import Family


class Look(NamedTuple):
    """What was seen of one engine."""

    at: float
    tokens: int
    running: int


class Slowness:
    """Waits for: the time of the next look. Woken by: the loop's timer."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        engines: Sequence[InferenceEngine],
        name_of: Callable[[int], str],
        tell: Callable[[str], None],
    ) -> None:
        self._dispatcher, self._engines = dispatcher, engines
        self._name_of, self._tell = name_of, tell
        self._told: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_is_late = False  # it was set after looks that changed nothing
        self._seen: dict[int, Look] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}

    def changed(self) -> None:
        """An engine has taken something, or given it back."""
        if self._timer is None or self._timer_is_late:
            self._set_timer(late=False)

    def close(self) -> None:
        for waiting in (self._timer, *self._asking.values()):
            if waiting is not None:
                waiting.cancel()

    def _set_timer(self, *, late: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay = self._dispatcher.look_again_s()
        if delay is not None:
            loop = asyncio.get_running_loop()
            self._timer, self._timer_is_late = loop.call_later(delay, self._look), late

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        suspects = self._dispatcher.suspects(loop.time())
        self._seen = {index: seen for index, seen in self._seen.items() if index in suspects}
        for index in suspects:
            if index not in self._asking:
                task = loop.create_task(self._ask(index), name=f"look at engine {index}")
                self._asking[index] = task
                task.add_done_callback(partial(self._has_asked, index))
        self._set_timer(late=True)

    def _has_asked(self, index: int, task: asyncio.Task[None]) -> None:
        del self._asking[index]
        if not task.cancelled():
            task.result()  # a fault of ours is not kept quiet

    async def _ask(self, index: int) -> None:
        """A suspect's pace since the look before; what it is too slow for is taken from it."""
        try:
            pace = await self._pace(index)
            if pace is not None:
                await self._take_from(index, pace)
        except RunError:  # it died: what it had fails there and finds another engine
            self._seen.pop(index, None)

    async def _pace(self, index: int) -> float | None:
        """Tokens a second of one response; None: it is not known yet."""
        stats = await self._engines[index].stats()
        look = Look(asyncio.get_running_loop().time(), stats.tokens_generated, stats.running)
        before = self._seen.get(index)
        self._seen[index] = look
        if before is None or not stats.live or not stats.running:
            return None if stats.live else self._dispatcher.members[index].pace
        seconds, tokens = look.at - before.at, look.tokens - before.tokens
        if seconds <= 0 or tokens < 0:
            return None
        return 2 * tokens / (seconds * (before.running + look.running))

    async def _take_from(self, index: int, pace: float) -> None:
        """Cut short what goes on elsewhere; the pool hears of it as the answer to its request."""
        planned = self._dispatcher.plan_moves(index, pace, asyncio.get_running_loop().time())
        if not planned:
            return
        self._tell_once(index, pace, planned[0][1])
        cut = []
        for work, target in planned:
            assert isinstance(work, Family)
            work.moves_to = target
            cut += [request.request_id for request in work.left]
        engine = self._engines[index]
        await asyncio.gather(*(engine.abort(request_id) for request_id in cut))

    def _tell_once(self, index: int, pace: float, target: int) -> None:
        if index not in self._told:
            self._told.add(index)
            usual = self._dispatcher.members[target].pace or 0.0
            self._tell(
                f"{self._name_of(index)}: it is slow, {pace:.3g} tokens/s for a response where "
                f"{self._name_of(target)} makes {usual:.3g}; its last responses go on there"
            )
