"""The pool: engine contract, balance, deaths, aborts and the order of updates."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from engine_contract import CHECKS, until_running

from penstock.config import LaunchConfig
from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.errors import DigestMismatch, EngineError, PartFailed, RunError, WeightsGone
from penstock.types import WeightHandle
from penstock.waits import Waits
from penstock.workers.inline import ThreadWorker
from penstock.workers.pool.pool import EnginePool, UpdateOrder
from penstock.workers.pool.weights import NewestWeights
from penstock.workers.supervise.supervised import Restarts, Supervised, SupervisionCallbacks, Worker
from stages import tiny_policy as tiny
from stages.engine_case import EngineCase, run
from stages.fake_engine import FakeEngine
from stages.supervised import EngineCrew, request
from stages.tiny_engine import make_engine


class StartingPool(EnginePool):
    """A pool that starts its workers; in a run the launcher does that before."""

    async def start(self) -> None:
        for engine in self._engines:
            await engine.supervised.start()


def make_pool(update: UpdateOrder = "together", *, max_restarts: int = 3) -> EnginePool:
    """Return a pool of two engines in workers of this process, as the inline launcher has one."""

    def spawn(name: str) -> Callable[[], Awaitable[Worker]]:
        return lambda: ThreadWorker.start(name, make_engine)

    callbacks = SupervisionCallbacks(waits=Waits(), note=lambda line: None)
    workers = [
        Supervised(name, spawn(name), LaunchConfig(max_restarts=max_restarts), callbacks)
        for name in ("engine-0", "engine-1")
    ]
    return StartingPool(workers, callbacks, update=update)


# what a pool hands on as it is; `make test-long` runs these over it too
HANDED_ON = {
    *("greedy", "logprobs_and_length", "seed_decides", "stop_strings", "stops"),
    *("temperatures_side_by_side", "top_k_and_top_p"),
}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] if check in HANDED_ON else [])
        for check in CHECKS
    ],
)
def test_contract(check: str) -> None:
    CHECKS[check](EngineCase("pool", make_pool))


class Recorder:
    """An engine that only records its calls, in their order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.gate = name, log, asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        self.called.set()
        self.log.append(f"{self.name}:{','.join(r.request_id for r in requests)}")
        await self.gate.wait()
        import numpy as np

        return [
            Generation(
                request_id=r.request_id, token_ids=np.zeros(0, np.int32),
                logprobs=np.zeros(0, np.float32), segments=(), finish_reason="stop",
            )
            for r in requests
        ]  # fmt: skip

    async def update_weights(self, version: int, source: object) -> str:
        self.log.append(f"{self.name} starts {version}")
        await asyncio.sleep(0)
        self.log.append(f"{self.name} has {version}")
        return "d"


def test_the_least_loaded_engine_takes_a_request() -> None:
    async def main() -> None:
        log: list[str] = []
        a, b = Recorder("a", log), Recorder("b", log)
        pool = await EngineCrew([a, b]).start()
        a.gate.clear()
        b.gate.clear()
        tasks = [
            asyncio.create_task(pool.generate(tiny.request("big", [5], max_tokens=300))),
            asyncio.create_task(pool.generate(tiny.request("s1", [6], max_tokens=10))),
            asyncio.create_task(pool.generate(tiny.request("s2", [7], max_tokens=10))),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        a.gate.set()
        b.gate.set()
        await asyncio.gather(*tasks)
        assert log == ["a:big", "b:s1", "b:s2"]

    run(main)


def test_turns_of_a_session_go_to_the_engine_that_made_the_turns_before() -> None:
    async def main() -> None:
        log: list[str] = []
        a, b = Recorder("a", log), Recorder("b", log)
        pool = await EngineCrew([a, b]).start()
        turns = [
            dataclasses.replace(tiny.request(name, [5], max_tokens=300), session="s")
            for name in ("first", "long", "next")
        ]
        await pool.generate(turns[0])
        a.gate.clear()
        tasks = [asyncio.create_task(pool.generate(turn)) for turn in turns[1:]]
        for _ in range(8):
            await asyncio.sleep(0)
        a.gate.set()
        await asyncio.gather(*tasks)
        assert log == ["a:first", "a:long", "a:next"]

    run(main)


def test_requests_of_one_prompt_go_to_one_engine() -> None:
    async def main() -> None:
        log: list[str] = []
        a, b = Recorder("a", log), Recorder("b", log)
        a.gate.clear()
        pool = await EngineCrew([a, b]).start()
        groups = [[tiny.request(f"{p}{k}", [p + 5]) for k in range(3)] for p in range(2)]
        tasks = [asyncio.create_task(pool.generate_many(requests)) for requests in groups]
        await b.called.wait()
        a.gate.set()
        for requests, made in zip(groups, await asyncio.gather(*tasks), strict=True):
            assert [m.request_id for m in made] == [r.request_id for r in requests]
        assert sorted(log) == ["a:00,01,02", "b:10,11,12"]

    run(main)


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("together", ["a starts 1", "b starts 1", "a has 1", "b has 1"]),
        ("rolling", ["a starts 1", "a has 1", "b starts 1", "b has 1"]),
    ],
)
def test_updates_roll_or_go_together(order: str, wanted: list[str]) -> None:
    log: list[str] = []

    async def main() -> None:
        pool = await EngineCrew([Recorder("a", log), Recorder("b", log)], update=order).start()
        await pool.update_weights(1, tiny.handle(1))

    run(main)
    assert log == wanted


def test_a_dead_engine_is_left_and_its_requests_are_made_elsewhere() -> None:
    async def main() -> None:
        engines = [make_engine(), make_engine()]
        for engine in engines:
            await engine.start()
        crew = EngineCrew(engines)
        pool = await crew.start()
        await pool.update_weights(1, tiny.handle(1))
        tasks = [
            asyncio.create_task(
                pool.generate(tiny.request(str(i), [5 + i], max_tokens=200, min_tokens=200))
            )
            for i in range(4)
        ]
        await until_running(pool)

        def broken(*_: object) -> list:
            raise RuntimeError("gone")

        engines[0]._live_runner.step = broken  # type: ignore[method-assign]
        made = await asyncio.gather(*tasks)
        assert {m.finish_reason for m in made} == {"length"}
        assert pool.serving == [1]
        crew.revive(0)
        while pool.serving != [0, 1]:
            await pool._change("engine-0")
        assert (await engines[0].stats()).policy_version == 1
        await pool.close()
        for engine in engines:
            await engine.close()

    run(main)


def test_with_no_engine_left_requests_fail_with_the_reasons() -> None:
    async def main() -> None:
        pool = make_pool(max_restarts=0)
        await pool.start()
        for engine in pool._engines:
            assert isinstance(engine.supervised.worker, ThreadWorker)
            await engine.supervised.worker._server._part.close()
        with pytest.raises(EngineError, match=r"no engine is left: .*closed.*; .*closed"):
            await pool.generate(tiny.request("a"))
        await pool.close()

    run(main)


def test_refused_weights_rise() -> None:
    async def main() -> None:
        pool = make_pool("rolling")
        await pool.start()
        with pytest.raises(DigestMismatch):
            await pool.update_weights(1, tiny.handle(1, "0" * 32))
        assert pool.serving == [0, 1]
        await pool.close()

    run(main)


@pytest.mark.parametrize("num_dead", [1, 2])
def test_an_engine_that_was_given_up_before_the_pool_was_built_is_dead(num_dead: int) -> None:
    """Its worker died while the workers of others started, so nobody could restart it."""

    async def main() -> None:
        crew = EngineCrew([FakeEngine(), FakeEngine()])
        supervised = [crew._make(index) for index in range(2)]
        for one in supervised:
            await one.start()
        for index in range(num_dead):
            given_up = asyncio.Event()
            supervised[index].restart_with(Restarts(when_given_up=given_up.set))
            crew.workers[index].die()
            await given_up.wait()
        pool = EnginePool(supervised, crew.events)
        assert pool.count == len(pool.serving) == 2 - num_dead
        if not pool.count:
            with pytest.raises(EngineError, match="no engine is left: engine-0: killed; engine-1"):
                await pool.stats()
        await pool.close()

    run(main)


def test_an_abort_reaches_requests_that_were_just_bound() -> None:
    async def main() -> None:
        engine = FakeEngine(seconds_per_token=1000.0)
        pool = await EngineCrew([engine]).start()
        await pool.pause("wait")
        task = asyncio.create_task(pool.generate_many([request("a"), request("b")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await pool.resume()
        await pool.abort("a")
        await pool.abort("b")
        assert [made.finish_reason for made in await task] == ["abort", "abort"]
        assert engine.calls == 0
        await pool.close()

    run(main)


@pytest.mark.parametrize("newer", [False, True])
def test_engines_that_miss_the_same_weights_renew_them_once(newer: bool) -> None:
    """Five engines come back at once; weights that are published meanwhile stay the newest."""

    async def main() -> None:
        renewals = []

        async def renew(handle: WeightHandle) -> WeightHandle:
            renewals.append(handle)
            await asyncio.sleep(0)
            if newer:
                weights.publish(tiny.handle(2))
            return tiny.handle(1)

        async def load() -> int:
            await asyncio.sleep(0)
            if weights.handle is gone:
                raise WeightsGone("their writer died")
            assert weights.handle is not None
            return weights.handle.version

        weights, gone = NewestWeights(None, renew, lambda version, digest: None), tiny.handle(1)
        weights.publish(gone)
        loaded = await asyncio.gather(*(weights.renewing(load) for _ in range(5)))
        assert loaded == [2 if newer else 1] * 5
        assert renewals == [gone]

    run(main)


def test_the_pool_gives_an_engine_as_many_requests_as_it_runs_at_once() -> None:
    """Two engines with room for 2 and 4 requests: each gets its own share."""

    async def main() -> None:
        engines = [HeldEngine(slots=2), HeldEngine(slots=4)]
        pool = await EngineCrew(engines).start()
        await pool.start()
        tasks = [asyncio.create_task(pool.generate(request("a" * n))) for n in range(1, 18)]
        for engine in engines:
            await engine.began.wait()
        stats = await pool.stats()
        assert (stats.running, stats.waiting) == (15, 2)  # (2 + 4) slots * 1.25 / half full
        await pool.pause("abort")
        await asyncio.gather(*tasks)
        await pool.close()

    run(main)


class HeldEngine(FakeEngine):
    """Holds its requests until they are aborted; a pause waits for that, as mode `wait` does."""

    def __init__(self, *, slots: int = 0) -> None:
        super().__init__(seconds_per_token=1000.0)
        self.slots = slots
        self.began, self.pausing, self.name = asyncio.Event(), asyncio.Event(), ""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.name = request.request_id
        self.began.set()
        return await super().generate(request)

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), slots=self.slots)

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.pausing.set()
        if mode == "abort":
            await super().pause()
        for running in list(self._running.values()):
            await running.ended.wait()


def test_an_abort_reaches_an_engine_that_is_being_drained() -> None:
    async def main() -> None:
        engines = [HeldEngine(), HeldEngine()]
        pool = await EngineCrew(engines).start()
        tasks = [asyncio.create_task(pool.generate(request(name))) for name in ("a", "bb")]
        for engine in engines:
            await engine.began.wait()
        scaling = asyncio.create_task(pool.scale(1))
        await engines[1].pausing.wait()
        for engine in engines:
            await pool.abort(engine.name)
        assert [(await task).finish_reason for task in tasks] == ["abort", "abort"]
        assert pool.count == len(pool.serving) == 1
        await scaling
        await pool.close()

    run(main)


def test_the_trainer_gets_the_gpu_after_an_engine_that_is_being_drained_has_ended() -> None:
    """A drained engine is asked neither to sleep nor to wake, and still has its memory."""

    async def main() -> None:
        engines = [HeldEngine(), HeldEngine()]
        pool = await EngineCrew(engines).start()
        tasks = [asyncio.create_task(pool.generate(request(name))) for name in ("a", "bb")]
        for engine in engines:
            await engine.began.wait()
        scaling = asyncio.create_task(pool.scale(1))
        await engines[1].pausing.wait()
        ended = []
        scaling.add_done_callback(lambda task: ended.append("drained"))
        releasing = asyncio.create_task(pool.release_gpu())
        releasing.add_done_callback(lambda task: ended.append("released"))
        await pool.abort(engines[0].name)  # the one that stays is ready to sleep
        for _ in range(50):
            await asyncio.sleep(0)
        assert ended == []
        await pool.abort(engines[1].name)
        await asyncio.gather(scaling, releasing, *tasks)
        assert sorted(ended) == ["drained", "released"]
        await pool.close()

    run(main)


def test_requests_of_a_cancelled_caller_are_aborted_at_their_engine() -> None:
    async def main() -> None:
        engine = HeldEngine()
        pool = await EngineCrew([engine]).start()
        task = asyncio.create_task(pool.generate(request("a")))
        await engine.began.wait()
        stopped = engine._running["a"].ended
        task.cancel()
        await stopped.wait()
        await pool.close()

    run(main)


@pytest.mark.parametrize("kind", [EngineError, PartFailed])
def test_an_engine_that_dies_of_an_error_while_it_loads_weights_is_started_again(
    kind: type[RunError],
) -> None:
    async def main() -> None:
        crew = EngineCrew([FakeEngine()])
        pool = await crew.start()
        engine = crew.engines[0]

        async def broken(*_: object) -> None:
            raise kind("engine-0: it died: CUDA error")

        engine.update_weights = engine.stats = broken
        updating = asyncio.create_task(
            pool.update_weights(1, WeightHandle(version=1, digest="digest-1", kind="none"))
        )
        asking = asyncio.create_task(pool.generate(request("a")))
        while pool.serving:
            await pool._change("engine-0")
        del engine.update_weights, engine.stats
        crew.revive(0)
        assert await updating == "digest-1"
        assert (await asking).segments[0].version == 1
        await pool.close()

    run(main)
