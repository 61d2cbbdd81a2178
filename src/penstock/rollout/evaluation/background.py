"""Evaluations in the background of training, each of one version of the weights.

With several engines, one is set aside for an evaluation: it keeps its version and takes no other
requests, while the others load new weights and feed the trainer. With a single engine, the next
weights wait for the evaluation, and training waits when the staleness bound is reached. One evaluation
runs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.protocol import InferenceEngine, SetAside
from penstock.errors import EngineError
from penstock.rollout.evaluation.evaluate import (
    EvalTask,
    OtherWeights,
    append_summary,
    evaluate,
    not_evaluated,
)
from penstock.waits import WaitKind, Waits

_ATTEMPTS = 3  # tries of an evaluation whose engine dies


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """Consumes steps to evaluate, produces sample files and result lines."""

    tasks: Sequence[EvalTask]
    folder: Path
    engine: InferenceEngine | None  # None only without tasks
    waits: Waits
    log: Callable[[int, dict[str, float]], None]
    note: Callable[[str], None]
    set_aside: SetAside | None = None  # reserves an engine that keeps its weights
    # cleared until the newest evaluation has its own engine, or is done; then weights may be replaced
    pinned: asyncio.Event = field(default_factory=asyncio.Event)
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.pinned.set()

    def begin(
        self,
        group: asyncio.TaskGroup,
        step: int,
        *,
        after: asyncio.Task[None] | None,
        beside: bool,
    ) -> asyncio.Task[None]:
        """Evaluate the weights of `step` once `after` has loaded them. `beside`: training continues."""
        waits_for = [task for task in (self._running, after) if task is not None]
        self.pinned = asyncio.Event()
        work = self._evaluate(step, waits_for, self.set_aside if beside else None, self.pinned)
        self._running = group.create_task(work, name="evaluate")
        return self._running

    async def finished(self) -> None:
        """Wait until no evaluation is under way."""
        if self._running is not None:
            await self._running

    async def _evaluate(
        self,
        step: int,
        waits_for: list[asyncio.Task[None]],
        set_aside: SetAside | None,
        pinned: asyncio.Event,
    ) -> None:
        for task in waits_for:
            await task
        for left in reversed(range(_ATTEMPTS)):
            pinned.clear()
            try:
                if waiting := not_evaluated(self.tasks, self.folder, step):
                    async with self._reserved_engine(set_aside, pinned) as engine:
                        for one in waiting:
                            await self._one(engine, one, step)
                break
            except (EngineError, OtherWeights):  # it died, and may have newer weights now
                if not left:
                    raise
        pinned.set()

    @asynccontextmanager
    async def _reserved_engine(
        self, set_aside: SetAside | None, pinned: asyncio.Event
    ) -> AsyncIterator[Any]:
        if set_aside is None:
            yield self.engine
            return
        async with set_aside() as own:
            if own is not None:
                pinned.set()
            yield own or self.engine

    async def _one(self, engine: Any, task: EvalTask, step: int) -> None:
        with self.waits.wait("eval", WaitKind.EVAL, f"{task.name} after step {step}"):
            version = (await engine.stats()).policy_version
            result = await evaluate(engine, task, step=step, version=version, folder=self.folder)
        append_summary(self.folder, result)
        if result.failures:
            counted = f"{result.failures} of {result.samples} samples failed and count as wrong"
            self.note(
                f"warning: evaluation {task.name} after step {step}: {counted}: {result.error}"
            )
        self.log(step, result.metrics())
