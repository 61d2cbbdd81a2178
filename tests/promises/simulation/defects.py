"""Known defects, brought back on purpose: the simulation has to find each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.rollout.agent.session import Session
from penstock.rollout.producer import Producer
from penstock.rollout.strategy import ProduceStrategy
from penstock.run.loop import Loop
from penstock.store.journal import codec
from penstock.types import Batch, StepReport
from penstock.workers.supervise.supervised import Supervised


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def statistics_between_update_and_commit() -> Any:
    """The engines are asked for statistics between an update and its commit."""

    async def train_and_commit(self: Loop, batch: Batch, *times: Any) -> StepReport:
        report = await self._job.trainer.train(batch)
        assert self._job.engine is not None
        await self._job.engine.stats()
        report = self._with_times(report, *times)
        await self._job.journal.commit_step(report)
        self.step = batch.step
        return report

    return _replaced(Loop, "_train_and_commit", train_and_commit)


def moves_from_anywhere() -> Any:
    """A step takes groups wherever they are, and a resumed run puts its own batch back as well."""
    take = re.sub(r" AND place IN \(.*?\)", "", codec._TAKE)
    restore = Producer.restore

    async def restored(self: Producer, journal: Any) -> None:
        await restore(self, journal)
        if self._resumed_batch is not None:
            for group in self._resumed_batch.groups:
                self._tasks[0].put_back(group)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(codec, "_TAKE", take), _replaced(Producer, "restore", restored):
            yield

    return both()


def staleness_off_by_one() -> Any:
    """Groups expire one update too late."""
    initialise = ProduceStrategy.__init__

    def late(self: ProduceStrategy, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.stale_threshold += 1

    return _replaced(ProduceStrategy, "__init__", late)


def restored_without_redo() -> Any:
    """A restarted trainer serves without the steps since its checkpoint."""

    async def start_next(self: Supervised) -> None:
        async with self._owner.start_context():
            self._worker = await self._spawn()

    return _replaced(Supervised, "_start_next", start_next)


def tools_called_again() -> Any:
    """An agent's tool is called again if the journal knows only its begin."""
    begin = Session._begin_tool

    async def begin_again(self: Session, call_id: str, name: str, unknown: str) -> dict[str, str]:
        return await begin(self, call_id, name, "retry")

    return _replaced(Session, "_begin_tool", begin_again)


DEFECTS = {
    "statistics": statistics_between_update_and_commit,
    "moves": moves_from_anywhere,
    "staleness": staleness_off_by_one,
    "redo": restored_without_redo,
    "tools": tools_called_again,
}
