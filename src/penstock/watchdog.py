"""The watchdog: names the wait that is stuck, shows what its culprit does, and acts. Layer 1.

Looks at the open edges of the driver (`edges.py`). An edge is suspect when its culprit answered
nothing for `stall_s` (or five times the longest answer of its kind so far, if that is more) and, where it can be asked,
makes no progress either. Waits for: the time when an edge can first be suspect. Never kills by itself:
`restart` is given by the job.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import Any

from penstock.config import WatchdogConfig
from penstock.edges import Edge, Edges
from penstock.errors import PenstockError, RunError
from penstock.types import Prompt, Rollout, Score

PATIENCE = 5.0  # times the longest answer so far
_PROBE_TIMEOUT_S = 10.0
RESTART = "restart"  # an edge of this kind has its own time-out


class Watchdog:
    """Consumes time, produces reports. `run` raises where the policy is to stop."""

    def __init__(
        self,
        edges: Edges,
        settings: WatchdogConfig,
        *,
        note: Callable[[str], None],
        stack_of: Callable[[str], Awaitable[str]] | None = None,
        restart: Callable[[str, str], Awaitable[bool]] | None = None,
        progress_of: Callable[[str], Awaitable[object]] | None = None,
        waits: Callable[[], list[str]] = list,
    ) -> None:
        self._edges, self._settings, self._note = edges, settings, note
        self._stack_of, self._restart, self._progress_of = stack_of, restart, progress_of
        self._waits = waits  # what the producing side waits for, in words
        self._progress: dict[str, object] = {}
        self._excused: dict[str, float] = {}  # culprit -> when it was last seen to move, or told of

    async def run(self) -> None:
        """Until cancelled. Woken by a timer that is set to the first time something can be stuck."""
        while True:
            await asyncio.sleep(self._wait_s())
            edge = self._suspect()
            if edge is not None and not await self._moves(edge.culprit):
                await self._act(edge)
            elif edge is None and self._is_deadlock():
                await self._act(None)

    def _wait_s(self) -> float:
        now, stall_s = self._edges.clock(), self._settings.stall_s
        deadlines = [self._deadline(edge) for edge in self._leaves()] or [now + stall_s]
        return min(max(0.0, min(deadlines) - now), stall_s)

    def _leaves(self) -> list[Edge]:
        return [edge for edge in self._edges.open.values() if edge.culprit]

    def _deadline(self, edge: Edge) -> float:
        culprit = edge.culprit
        longest = self._edges.longest.get((culprit, edge.what), 0.0)
        moved = max(
            edge.since,
            self._edges.answered.get((culprit, edge.what), 0.0),
            self._excused.get(culprit, 0.0),
        )
        return moved + max(self._settings.stall_s, PATIENCE * longest)

    def _suspect(self) -> Edge | None:
        """The oldest edge that is past its time."""
        now = self._edges.clock()
        late = [edge for edge in self._leaves() if self._deadline(edge) <= now]
        return min(late, key=lambda edge: edge.since, default=None)

    def _is_deadlock(self) -> bool:
        """Parts of the driver wait for each other and nobody outside is asked anything."""
        edges = list(self._edges.open.values())
        moved = max(self._edges.moved_at, self._excused.get("", 0.0))
        return (
            bool(edges)
            and not self._leaves()
            and not any(edge.what == RESTART for edge in edges)
            and self._edges.clock() - moved >= self._settings.stall_s
        )

    async def _moves(self, culprit: str) -> bool:
        """Ask how far it is; something else than the last time is progress."""
        if self._progress_of is None:
            return False
        try:
            async with asyncio.timeout(min(_PROBE_TIMEOUT_S, self._settings.stall_s)):
                found = await self._progress_of(culprit)
        except (TimeoutError, PenstockError):
            return False
        if found is None or found == self._progress.get(culprit):
            return False
        self._progress[culprit] = found
        self._excused[culprit] = self._edges.clock()
        return True

    async def _act(self, edge: Edge | None) -> None:
        line = self._line(edge)
        culprit = edge.culprit if edge is not None else ""
        self._note(f"{line}\n{await self._stack(edge)}".rstrip())
        self._excused[culprit] = self._edges.clock()
        if self._settings.action == "report":
            return
        may_restart = self._settings.action == "restart" and bool(culprit)
        if may_restart and self._restart is not None and await self._restart(culprit, line):
            return
        raise RunError(line)

    def _line(self, edge: Edge | None) -> str:
        now = self._edges.clock()
        if edge is None:
            since = now - self._edges.moved_at
            open_edges = [f"{e.lane} waits for {e}" for e in self._edges.open.values()]
            waits = "; ".join([*open_edges, *self._waits()])
            return f"stuck: nothing has moved for {since:.0f} s: {waits}"
        waiter = edge.task.get_name() if edge.task is not None else edge.lane
        return (
            f"stuck: {edge.culprit} has not answered {edge} for {now - edge.since:.0f} s; "
            f"{waiter} waits for it"
        )

    async def _stack(self, edge: Edge | None) -> str:
        if edge is None:
            return ""
        text = ""
        if self._stack_of is not None:
            try:
                text = await self._stack_of(edge.culprit)
            except PenstockError as error:
                text = f"(no stack: {error})"
        return text or (coroutine_stack(edge.task) if edge.task is not None else "")


def coroutine_stack(task: asyncio.Task[Any]) -> str:
    """Where a waiting task is, from its first coroutine to the one that awaits."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType) and awaited.cr_frame is not None:
        lines += traceback.format_stack(awaited.cr_frame, limit=1)
        awaited = awaited.cr_await
    return f"task {task.get_name()}:\n{''.join(lines)}".rstrip()


class WatchedReward:
    """A reward whose every score is an edge."""

    def __init__(self, reward: Any, task_name: str, edges: Edges) -> None:
        self._reward, self._edges = reward, edges
        self._lane = f"rewards of {task_name}"

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        with self._edges.wait(self._lane, "reward", rollout.rollout_id, culprit=self._lane):
            return await self._reward.score(rollout, prompt)

    async def close(self) -> None:
        await self._reward.close()
