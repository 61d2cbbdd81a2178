"""Load published weights into several engines at once, and let those that are late catch up.

A publication waits for an engine up to twice as long as the first engine took. An engine that takes
longer goes on alone: it takes no requests that need the new weights, loads the newest ones when its
load ends, and no publication waits for it. What a load is, and what happens to an engine that dies in
it, belongs to `pool.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.waits import loop_time
from penstock.workers.pool.engine import Engine

_PATIENCE = 2.0  # wait so many times as long as the first load took,
_LEAST_WAIT_S = 0.05  # and at least so long after it: short loads differ by chance
Digests = list[str]  # of one engine: its digest, or nothing if it died


class Loads:
    """Consumes an engine's loads, produces the digests of those that loaded in time."""

    def __init__(
        self,
        catch_up: Callable[[Engine, asyncio.Task[Digests]], Coroutine[Any, Any, None]],
        note: Callable[[str], None],
    ) -> None:
        """catch_up: awaits a late load, then loads the newest weights; raises nothing."""
        self._catch_up, self._note = catch_up, note
        self._late: dict[Engine, asyncio.Task[None]] = {}  # engines that catch up
        self._told: set[Engine] = set()  # late engines that the user was told of

    async def together(
        self,
        engines: list[Engine],
        load: Callable[[Engine], Coroutine[Any, Any, Digests]],
        tell: Callable[[str], None],
        *,
        may_leave: bool,
    ) -> Digests:
        """Load into all engines that are not late; raise the first error after all have answered.

        tell: called with a digest when all have loaded, or when the first has waited long enough.
        may_leave: whether an engine may be late.
        """
        began = loop_time()
        for engine in self._late if may_leave else ():
            if engine not in self._told:
                self._told.add(engine)
                self._note(f"{engine.name}: it is late with new weights; the others go on alone")
        tasks = {
            asyncio.create_task(load(engine), name=f"load {engine.name}"): engine
            for engine in engines
            if engine not in self._late
        }
        try:
            waiting = await self._in_time(set(tasks), began)
            if (first := next(filter(_succeeded, tasks), None)) is not None:
                tell(first.result()[0])
                for task in waiting if may_leave else ():
                    self._leave(tasks.pop(task), task)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            if self._late and not (may_leave and tasks):
                await asyncio.wait(self._late.values())
        except BaseException:  # cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        digests: Digests = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            digests += answer
        return digests

    async def _in_time(
        self, waiting: set[asyncio.Task[Digests]], began: float
    ) -> set[asyncio.Task[Digests]]:
        """Wait for all loads, after the first one only as long again; return those that still run."""
        ends: float | None = None
        while waiting:
            left = None if ends is None else max(0.0, ends - loop_time())
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            if ends is None and any(map(_succeeded, done)):
                took = loop_time() - began
                ends = began + max(_PATIENCE * took, took + _LEAST_WAIT_S)
        return waiting

    def _leave(self, engine: Engine, loading: asyncio.Task[Digests]) -> None:
        """Let an engine catch up; nobody waits for it."""
        task = asyncio.create_task(
            self._catch_up(engine, loading), name=f"{engine.name} catches up"
        )
        self._late[engine] = task
        task.add_done_callback(lambda _: self._late.pop(engine))

    async def close(self) -> None:
        """Give up the loads that are under way."""
        tasks = list(self._late.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _succeeded(task: asyncio.Task[Digests]) -> bool:
    """Return whether a load has ended and its engine lives."""
    return task.done() and not task.cancelled() and not task.exception() and bool(task.result())
