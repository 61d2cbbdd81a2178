"""Restarts are bounded, prepared and noted; requests of a dead engine go to another one."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineError, PartFailed, RunError, UserError, WorkerDied
from penstock.types import Batch
from penstock.workers.control import Control, scale_run
from penstock.workers.processes.process_worker import ProcessWorker
from penstock.workers.rpc import append_to_log
from penstock.workers.supervise.supervised import Restarts, Supervised
from penstock.workers.supervise.trainer import RankGroup
from stages.fake_engine import FakeEngine
from stages.supervised import HANDLE, Crew, FakeWorker, Play, nothing, request, settings
from stages.watching import SilentWorker


def test_a_hung_process_is_replaced_and_its_call_fails_at_once(tmp_path: Path) -> None:
    play = Play()

    async def run() -> str:
        one = play.echo(tmp_path)
        one.restart_with(Restarts(prepare=nothing))
        await one.start()
        hanging = asyncio.create_task(one.call("wait_for_stop"))
        await one.call("until_waiting")
        assert "wait_for_stop" in await one.stack()
        await one.replace("it does not answer")
        with pytest.raises(WorkerDied):
            await hanging
        await one.ready()
        try:
            return await one.call("greet", "again")
        finally:
            await one.close()

    assert asyncio.run(run()) == "hello again"
    assert play.notes[0] == "echo: it does not answer; starting it again (1 of 3)"
    assert play.notes[1].startswith("echo: serves again (pid ")


def test_requests_of_a_dead_engine_go_to_another_at_once() -> None:
    async def run() -> None:
        crew = Crew(2)
        engines = await crew.start()
        crew.made["engine-0"][0].die()
        made = await engines.generate_many([request("a"), request("bb")])
        assert [one.finish_reason for one in made] == ["stop", "stop"]
        await engines.close()

    asyncio.run(run())


def test_with_no_engine_left_requests_wait_and_the_new_one_has_the_newest_weights() -> None:
    async def run() -> None:
        crew = Crew(1)
        engines = await crew.start()
        await engines.update_weights(1, HANDLE)
        crew.made["engine-0"][0].die()
        made = await engines.generate(request("a"))
        assert (made.finish_reason, made.segments[0].version) == ("stop", 1)
        assert len(crew.made["engine-0"]) == 2
        assert (await engines.stats()).policy_version == 1
        await engines.close()

    asyncio.run(run())


def test_weights_that_meet_a_dead_engine_wait_for_its_return() -> None:
    async def run() -> None:
        crew = Crew(1)
        engines = await crew.start()
        crew.made["engine-0"][0].die()
        assert await engines.update_weights(1, HANDLE) == "digest-1"
        assert crew.made["engine-0"][1].engine.version == 1
        await engines.close()

    asyncio.run(run())


def test_a_request_that_kills_every_engine_is_a_failure_not_the_end() -> None:
    async def run() -> None:
        crew = Crew(1, poison="bad", max_restarts=5)
        engines = await crew.start()
        assert (await engines.generate(request("bad"))).finish_reason == "error"
        assert (await engines.generate(request("good"))).finish_reason == "stop"
        await engines.close()

    asyncio.run(run())


def test_restarts_are_bounded_and_the_end_says_so() -> None:
    async def run() -> None:
        crew = Crew(1, poison="bad", max_restarts=1)
        engines = await crew.start()
        with pytest.raises(EngineError, match=r"no engine is left: .*launch.max_restarts = 1"):
            await engines.generate(request("bad"))
        with pytest.raises(EngineError, match="no engine is left"):
            await engines.stats()
        await engines.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [EngineError, PartFailed])
def test_an_engine_that_died_inside_its_worker_is_started_again(kind: type[RunError]) -> None:
    async def run() -> None:
        crew = Crew(2)
        engines = await crew.start()

        async def broken(*args: Any) -> Any:
            raise EngineError("engine-0: it died: out of memory")

        async def broken_stats() -> Any:
            raise kind("engine-0: it died: out of memory")

        crew.made["engine-0"][0].engine.stats = broken_stats  # type: ignore[method-assign]
        crew.made["engine-0"][0].engine.generate_many = broken  # type: ignore[method-assign]
        made = await engines.generate_many([request("a"), request("bb"), request("ccc")])
        assert {one.finish_reason for one in made} == {"stop"}
        assert "engine-0: it died: out of memory; starting it again (1 of 3)" in crew.notes
        await engines.close()

    asyncio.run(run())


def test_a_log_that_cannot_be_written_does_not_keep_a_dead_engine_from_its_restart(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").write_text("a file where the folder of the logs should be")

    async def run() -> None:
        crew = Crew(1)
        crew.events = replace(crew.events, log=partial(append_to_log, tmp_path / "logs"))
        engines = await crew.start()

        async def broken(*args: Any) -> Any:
            raise EngineError("engine-0: it died: out of memory")

        for method in ("stats", "generate_many"):
            setattr(crew.made["engine-0"][0].engine, method, broken)
        assert (await engines.generate(request("a"))).finish_reason == "stop"
        assert len(crew.made["engine-0"]) == 2
        await engines.close()

    asyncio.run(run())


def test_a_worker_that_may_not_be_restarted_is_given_up_with_its_reason(tmp_path: Path) -> None:
    play = Play()

    async def run() -> None:
        one = play.echo(tmp_path)
        await one.start()
        assert isinstance(one.worker, ProcessWorker)
        os.kill(one.worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="echo: the worker"):
            await one.call("wait_for_stop")
        with pytest.raises(WorkerDied, match="ended unexpectedly"):
            await one.ready()
        await one.close()

    asyncio.run(run())
    assert play.notes == []


def test_a_preparation_that_fails_is_tried_again_and_counted(tmp_path: Path) -> None:
    play = Play()
    tries: list[int] = []

    async def prepare(call: Any) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise RunError("weights could not be fetched")

    async def run() -> None:
        one = play.echo(tmp_path)
        one.restart_with(Restarts(prepare=prepare))
        await one.start()
        await one.replace("a test")
        await one.ready()
        assert await one.call("greet", "you") == "hello you"
        await one.close()

    asyncio.run(run())
    assert tries == [0, 1]
    assert "weights could not be fetched; starting it again (2 of 3)" in play.notes[1]


def test_a_fault_in_a_preparation_is_told_to_whoever_waits(tmp_path: Path) -> None:
    play = Play()

    async def prepare(call: Any) -> None:
        raise KeyError("a fault of ours")

    async def run() -> None:
        one = play.echo(tmp_path)
        one.restart_with(Restarts(prepare=prepare))
        await one.start()
        await one.replace("a test")
        with pytest.raises(WorkerDied, match="supervision failed: KeyError: 'a fault of ours'"):
            await one.ready()
        await one.close()

    asyncio.run(run())
    assert "Traceback" in play.notes[-1]


@pytest.mark.slow
def test_a_worker_that_hangs_in_its_preparation_can_be_looked_at_and_ended(tmp_path: Path) -> None:
    play, preparing = Play(), asyncio.Event()
    tries: list[int] = []

    async def prepare(call: Any) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            preparing.set()
            await call("load", "a checkpoint that never comes")

    async def run() -> None:
        one = play.echo(tmp_path)
        one.restart_with(Restarts(prepare=prepare))
        await one.start()
        await one.replace("a test")
        await preparing.wait()
        await one.progress("until_waiting")
        (wait,) = play.events.waits.open.values()
        assert (wait.responder, wait.what) == ("echo", "load")
        assert await one.progress("progress") == 7
        assert (await one.activity() or 0) > 0
        assert "in load" in await one.stack()
        await one.replace("it does not answer")
        await one.ready()
        assert await one.call("greet", "you") == "hello you"
        await one.close()

    asyncio.run(run())
    assert tries == [0, 1]


def test_every_rank_of_a_trainer_tells_its_progress() -> None:
    ranks = [SilentWorker(f"trainer-{rank}", progress=(rank, 0)) for rank in range(2)]

    async def run() -> None:
        trainer = RankGroup(ranks)
        training = asyncio.create_task(trainer.call("train", Batch(step=1, groups=())))
        assert await trainer.call("progress") == ((0, 0), (1, 0))
        assert await trainer.activity() == 0.0
        assert "trainer-1 is deep in C" in await trainer.stack()
        training.cancel()

    asyncio.run(run())


def test_scaling_up_gives_a_new_engine_the_newest_weights_and_work() -> None:
    async def run() -> None:
        crew = Crew(1)
        engines = await crew.start()
        await engines.update_weights(1, HANDLE)
        started = await engines.scale(3)
        assert [one.name for one in started] == ["engine-1", "engine-2"]
        assert crew.made["engine-2"][0].engine.version == 1
        await asyncio.gather(*(engines.generate(request("a" * n)) for n in range(1, 7)))
        assert all(crew.made[f"engine-{n}"][0].engine.calls for n in range(3))
        crew.made["engine-2"][0].die()  # it is supervised like the first ones
        assert (await engines.generate(request("later"))).finish_reason == "stop"
        await engines.close()

    asyncio.run(run())


def test_scaling_down_drains_the_last_ones_and_loses_nothing() -> None:
    async def run() -> None:
        crew = Crew(3)
        engines = await crew.start()
        work = [asyncio.create_task(engines.generate(request("a" * n))) for n in range(1, 10)]
        await asyncio.sleep(0)
        assert await engines.scale(1) == []
        made = await asyncio.gather(*work)
        assert {one.finish_reason for one in made} <= {"stop", "abort"}
        assert engines.count == 1
        await engines.generate(request("b"))
        with pytest.raises(UserError, match="producers: got 0, allowed: 1 or more"):
            await engines.scale(0)
        assert await engines.scale(2)
        assert engines.count == 2
        await engines.close()

    asyncio.run(run())


def test_the_control_channel_answers_and_refuses(tmp_path: Path) -> None:
    async def scale(count: int) -> str:
        if count > 4:
            raise RunError("no place for so many")
        return f"producers: 1 -> {count}"

    async def run() -> None:
        control = Control(tmp_path / "control", {"scale": scale})
        await control.start()
        assert await asyncio.to_thread(scale_run, tmp_path, "producers=3") == "producers: 1 -> 3"
        with pytest.raises(RunError, match="no place"):
            await asyncio.to_thread(scale_run, tmp_path, "producers=5")
        with pytest.raises(UserError, match="allowed: producers=N"):
            scale_run(tmp_path, "consumers=2")
        await control.close()
        with pytest.raises(UserError, match="got no driver that answers"):
            scale_run(tmp_path, "producers=2")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("faults", "is_given_up"),
    [
        (["index 7 out of bounds", "index 9 out of bounds", "index 8 out of bounds"], True),
        (["index 7 out of bounds", "out of memory", "index 8 out of bounds"] * 2, False),
    ],
)
def test_a_worker_is_given_up_after_the_same_fault_three_times_in_a_row(
    faults: list[str], is_given_up: bool
) -> None:
    play = Play()
    logged: list[str] = []

    def log(worker: str, text: str) -> str:
        logged.append(f"{worker}: {text}")
        return "engine.log"

    play.events = replace(play.events, log=log)

    async def spawn() -> FakeWorker:
        return FakeWorker("engine", FakeEngine())

    async def run() -> None:
        one = Supervised("engine", spawn, settings(max_restarts=10), play.events)
        one.restart_with(Restarts(prepare=nothing))
        await one.start()
        for number, fault in enumerate(faults):
            await one.replace(fault, traceback=f"traceback {number}")
            last = is_given_up and fault is faults[-1]
            with pytest.raises(WorkerDied, match="3 times in a row") if last else nullcontext():
                await one.ready()
        assert (one.given_up is not None) is is_given_up
        assert str(one.given_up or "").count("engine: index 8 out of bounds") == is_given_up
        assert str(one.given_up or "").count("(traceback: engine.log)") == is_given_up
        await one.close()

    asyncio.run(run())
    assert logged == [f"engine: traceback {number}" for number in range(len(faults))]
