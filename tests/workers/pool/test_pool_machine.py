"""A pool whose engines die, are drained, paused, or slow.

Every request gets exactly one answer: the whole response, or the tokens so far if its caller
aborted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.run.twin.virtual_time import VirtualClock
from penstock.types import WeightHandle, expand_segments
from stages.paced_engine import PacedEngine, length_of, logprobs_of, request_of, tokens_of
from stages.supervised import EngineCrew

SLOTS = 4


@dataclass
class Asked:
    """One caller and its requests."""

    requests: list[GenerationRequest]
    task: asyncio.Task[list[Generation]]
    least_version: int  # version that all engines had loaded when the caller asked
    may_abort: bool = False
    aborted: set[str] = field(default_factory=set)


class PoolMachine(RuleBasedStateMachine):
    """Deaths, drains, pauses, aborts, new weights and slow engines; every request has one answer."""

    @initialize(paces=st.lists(st.sampled_from([0.01, 0.02, 0.2]), min_size=2, max_size=3))
    def begin(self, paces: list[float]) -> None:
        self.clock = VirtualClock()
        engines = [self._engine(pace) for pace in paces]
        self.crew = EngineCrew(engines, slots=SLOTS)
        self.engines, self.pool = self.crew.engines, self.clock.run(self.crew.start())
        self.asked: list[Asked] = []
        self.names, self.version, self.paused = 0, 0, False
        self.loaded = 0
        self.updating: asyncio.Task[str] | None = None
        self.deaths = 0

    def _engine(self, pace: float) -> PacedEngine:
        engine = PacedEngine(pace, slots=SLOTS, prefill_s=0.001, load_s=10 * pace)
        engine.on_begin = self._begins
        return engine

    def _begins(self, name: str) -> None:
        runs = [e for e in self.engines if name in e._running]
        assert len(runs) == 1, f"{name} runs twice at once"

    def _in_loop(self, act: Callable[[], None]) -> None:
        async def run() -> None:
            act()

        self.clock.run(run())
        self.clock.settle()

    def _up(self) -> list[int]:
        return [index for index in self.pool.serving if not self.engines[index].dead]

    def _slow_lines(self) -> list[str]:
        return [note for note in self.crew.notes if "it is slow" in note]

    @rule(families=st.lists(st.integers(1, 6), min_size=1, max_size=3), length=st.integers(1, 60))
    def ask(self, families: list[int], length: int) -> None:
        requests = []
        for size in families:
            self.names += 1
            for index in range(size):
                name = f"{self.names}.{index}"
                seed = 10 * self.names + index
                requests.append(
                    request_of(name, self.names, seed=seed, length=length + 9 * index, longest=200)
                )
        task = self.clock.loop.create_task(self.pool.generate_many(requests))
        self.asked.append(Asked(requests, task, self.loaded))
        self.clock.settle()

    @rule(seconds=st.floats(0.001, 3.0))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.run(asyncio.sleep(seconds))

    @precondition(lambda self: len(self._up()) > 1)
    @rule(data=st.data(), with_worker=st.booleans())
    def kill(self, data: st.DataObject, with_worker: bool) -> None:
        """An engine dies inside its worker, or the worker dies; another engine still serves."""
        index = data.draw(st.sampled_from(self._up()))

        def die() -> None:
            self.engines[index].die()
            if with_worker:
                self.crew.workers[index].die()

        self._in_loop(die)
        self.deaths += 1

    @precondition(lambda self: self._up() and self._down())
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self._down()))
        self.clock.run(self.pool.stats())  # notices engines that died inside their workers
        self._in_loop(lambda: self.crew.revive(index))

    def _down(self) -> list[int]:
        engines = self.pool._engines
        return [e.index for e in engines if self.engines[e.index].dead and not e.ended]

    def _last(self) -> int:
        return max(e.index for e in self.pool._engines if not e.ended)

    @precondition(lambda self: any(i != self._last() for i in self._up()) and len(self.engines) < 6)
    @rule(pace=st.sampled_from([0.01, 0.2]))
    def drain_one_and_add_one(self, pace: float) -> None:
        self.clock.run(self.pool.scale(self.pool.count - 1))
        self.deaths += 1  # requests that wait for a slot there are asked elsewhere
        self.clock.run(self.crew.add(self._engine(pace)))

    @rule(data=st.data(), pace=st.sampled_from([0.01, 0.02, 0.3]))
    def change_pace(self, data: st.DataObject, pace: float) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self._in_loop(lambda: engine.set_pace(pace))

    @precondition(lambda self: any(not one.task.done() for one in self.asked))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.asked if not one.task.done()]))
        name = data.draw(st.sampled_from([r.request_id for r in one.requests]))
        one.aborted.add(name)
        self.clock.run(self.pool.abort(name))

    @precondition(lambda self: any(not one.task.done() for one in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.asked if not one.task.done()]))
        one.task.cancel()
        self.clock.settle()

    @precondition(lambda self: not self.paused)
    @rule(keep=st.booleans())
    def pause(self, keep: bool) -> None:
        if not keep:
            for one in self.asked:
                one.may_abort = True
        self.paused = True
        self.clock.run(self.pool.pause("wait" if keep else "abort"))

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.paused = False
        self.clock.run(self.pool.resume())

    @rule()
    def new_weights(self) -> None:
        """Publish weights; the engines load them while everything else happens."""
        self._finish_update()
        self.version += 1
        handle = WeightHandle(version=self.version, digest=f"digest-{self.version}", kind="none")
        self.updating = self.clock.loop.create_task(self._update(handle))
        self.clock.settle()

    async def _update(self, handle: WeightHandle) -> str:
        digest = await self.pool.update_weights(handle.version, handle)
        self.loaded = handle.version
        return digest

    def _finish_update(self) -> None:
        if self.updating is not None:
            assert self.clock.run(_result(self.updating)) == f"digest-{self.version}"
            self.updating = None

    def teardown(self) -> None:
        if hasattr(self, "clock"):
            try:
                self._end()
            finally:
                self.clock.close()

    def _end(self) -> None:
        if self.paused:
            self.resume()
        self._finish_update()
        self.clock.run(self._all_answered())
        for one in self.asked:
            if not one.task.cancelled():
                self._check(one)
        assert self.pool._scheduler.running == self.pool._scheduler.waiting == 0
        assert not self.pool._requests._batches
        assert len(self._slow_lines()) <= len(self.engines)
        self.clock.run(self.pool.close())

    async def _all_answered(self) -> None:
        """Wait for all answers, at most this long in virtual seconds."""
        async with asyncio.timeout(100_000):
            await asyncio.gather(*(one.task for one in self.asked), return_exceptions=True)

    def _check(self, one: Asked) -> None:
        for request, made in zip(one.requests, one.task.result(), strict=True):
            assert made.request_id == request.request_id
            count = len(made.token_ids)
            if made.finish_reason == "abort":
                assert one.may_abort or request.request_id in one.aborted
            else:
                assert made.finish_reason == "stop", made.error
                assert count == length_of(request)
            assert np.array_equal(made.token_ids, tokens_of(request.seed, 0, count))
            assert np.array_equal(made.logprobs, logprobs_of(request.seed, 0, count))
            versions = expand_segments(made.segments)
            assert len(versions) == count
            assert versions == sorted(versions)
            assert all(version >= one.least_version for version in versions)
            begun = sum(engine.begun.get(request.request_id, 0) for engine in self.engines)
            assert begun <= 1 + self.deaths


async def _result(task: asyncio.Task[str]) -> str:
    return await task


class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestPoolForLong(PoolMachine.TestCase):
    settings = settings(max_examples=800, stateful_step_count=30, deadline=None)
