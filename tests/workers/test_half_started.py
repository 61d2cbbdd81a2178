"""What launchers leave behind when a part cannot start, or a rank dies or hangs: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineError, WorkerDied
from penstock.waits import Waits
from penstock.workers import inline, part_factories
from penstock.workers.inline import offline_trainer
from penstock.workers.processes import local
from penstock.workers.supervise.supervised import SupervisionCallbacks
from stages.disturbed_run import config_of


class FakeTrainer:
    """A trainer part that notes that it was asked to stop."""

    stopped = False

    def request_stop(self) -> None:
        self.stopped = True


class BrokenEngine:
    """An engine whose model cannot be loaded."""

    @classmethod
    def from_config(cls, *args: Any, **options: Any) -> BrokenEngine:
        raise EngineError("the model does not fit")


def test_inline_closes_the_trainer_if_the_engine_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = FakeTrainer()
    monkeypatch.setattr(inline, "TrainerService", lambda *args: part)
    monkeypatch.setattr(part_factories, "load", lambda *args: BrokenEngine)

    async def main() -> None:
        with pytest.raises(EngineError, match="does not fit"):
            await inline.start(
                config_of(tmp_path, "half"), 1, tmp_path, SupervisionCallbacks(waits=Waits())
            )
        assert part.stopped
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


class FakeRank:
    """A rank in memory: it never ends by itself, and every call raises as if it were dead."""

    can_be_killed, place = True, "memory"

    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    async def call(self, method: str, *args: Any) -> Any:
        raise WorkerDied(f"{self.name}: it died")

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        self.closed = True


class FakeProcesses:
    """Starts fake ranks instead of processes; those of `broken` fail when the others have started."""

    def __init__(self, broken: str = "") -> None:
        self.ranks: list[FakeRank] = []
        self._broken = broken

    async def start(self, name: str, *args: Any, **options: Any) -> FakeRank:
        if name == self._broken:
            await asyncio.sleep(0)
            raise EngineError(f"{name}: it cannot start")
        self.ranks.append(FakeRank(name))
        return self.ranks[-1]

    async def close(self, rank: FakeRank) -> None:
        await rank.close()


def test_ranks_that_started_are_closed_if_another_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = FakeProcesses(broken="trainer-1")
    monkeypatch.setattr(local, "ProcessWorker", processes)
    config = config_of(tmp_path, "half", "launch.num_consumers=2")
    with pytest.raises(EngineError, match="trainer-1: it cannot start"):
        asyncio.run(local.spawn_trainer(config, 1, tmp_path, ("shared_memory", ""))())  # type: ignore[arg-type]
    assert [(rank.name, rank.closed) for rank in processes.ranks] == [("trainer-0", True)]


def test_an_offline_trainer_closes_ranks_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's error is raised, not that of a rank that has ended."""
    processes = FakeProcesses()
    monkeypatch.setattr(local, "ProcessWorker", processes)

    async def main() -> None:
        async with offline_trainer(
            config_of(tmp_path, "off", "launch.num_consumers=2"),
            1,
            tmp_path,
            SupervisionCallbacks(waits=Waits()),
        ):
            raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        asyncio.run(main())
    assert [rank.closed for rank in processes.ranks] == [True, True]
