"""A stage for the watchdog: a virtual clock, waits on it, parts that take every call and answer none."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from penstock.config import LaunchConfig, SamplingConfig, WatchdogConfig
from penstock.errors import RunError
from penstock.reward.protocol import Reward
from penstock.reward.verifiable import Part, VerifiableReward
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.run.twin.virtual_time import VirtualClock
from penstock.types import Rollout
from penstock.waits import Waits
from penstock.workers.supervise.supervised import (
    CALLS,
    Supervised,
    SupervisionCallbacks,
    call_worker,
)
from penstock.workers.watchdog import Watchdog
from penstock.workers.workers import Workers
from stages.rollouts import make_prompt

STALL_S = 60.0


async def never(*args: Any, **kwargs: Any) -> Any:
    await asyncio.get_running_loop().create_future()


class Silent:
    """A part that takes every call and answers none."""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return never


class SilentReward(Reward):
    """A reward that never gives a score."""

    score = close = staticmethod(never)


class PartWorker:
    """A worker whose part is an object of the test."""

    def __init__(self, name: str, part: Any) -> None:
        self.name, self._part = name, part

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._part, method)(*args)


class Called:
    """A part whose methods are called as those of a worker are: each call opens its wait."""

    def __init__(self, name: str, part: Any, waits: Waits) -> None:
        self._worker, self._waits = PartWorker(name, part), waits

    def __getattr__(self, method: str) -> Any:
        return partial(call_worker, self._worker, self._waits, method)


class SilentWorker:
    """A worker that answers only the methods in `answers`."""

    def __init__(self, name: str, **answers: Any) -> None:
        self.name, self.place, self._answers = name, "nowhere", answers
        self.can_be_killed = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method in CALLS
        return self._answers[method] if method in self._answers else await never()

    async def activity(self) -> float | None:
        return 0.0

    async def stack(self) -> str:
        return f"{self.name} is deep in C"

    async def ended(self) -> str:
        await never()
        raise AssertionError("it has not ended")

    async def kill(self) -> None: ...

    async def close(self) -> None: ...


class WatchdogStage:
    """The watchdog and its notes. Without other callbacks, no responder makes progress."""

    def __init__(self, action: str = "stop", **callbacks: Any) -> None:
        self.clock = VirtualClock()
        self.waits = Waits(lambda: self.clock.now)
        self.notes: list[str] = []
        self.events = SupervisionCallbacks(waits=self.waits, note=self.notes.append)
        settings = WatchdogConfig.model_validate({"stall_s": STALL_S, "action": action})
        answers = {
            "stack_of": _no_stack,
            "progress_of": _stands_still,
            "activity_of": _idle,
            "restart": _not_restarted,
            "end": _ended,
            **callbacks,
        }
        self.watchdog = Watchdog(
            self.waits,
            settings,
            cast(Workers, SimpleNamespace(**answers)),
            note=self.notes.append,
        )

    def run(self, work: Any, seconds: float = 1000.0) -> str:
        """Run the work beside the watchdog; return the error that stopped it, or None."""

        async def both() -> str:
            task = asyncio.create_task(work, name="the waiter")
            try:
                async with asyncio.timeout(seconds):
                    await self.watchdog.run()
            except RunError as error:
                return str(error)
            except TimeoutError:
                return ""
            finally:
                if task.done():
                    task.result()  # the work must hang, not fail
                task.cancel()
                await asyncio.wait([task])
            return ""

        try:
            return self.clock.run(both())
        finally:
            self.clock.close()

    async def silent(self, name: str, **answers: Any) -> Supervised:
        """Return a supervised worker that answers only these methods."""

        async def spawn() -> SilentWorker:
            return SilentWorker(name, **answers)

        supervised = Supervised(name, spawn, LaunchConfig(), self.events)
        await supervised.start()
        return supervised


async def _stands_still(name: str) -> object:
    return 7


async def _no_stack(name: str) -> str:
    return ""


async def _not_restarted(name: str, reason: str) -> bool:
    return False


async def _ended(reason: str) -> None: ...


async def _idle(name: str) -> float | None:
    return 3.0


def agent(stage: WatchdogStage, engine: Any, reward: Any) -> SingleTurn:
    return SingleTurn(
        engine=Called("engine-0", engine, stage.waits),  # type: ignore[arg-type]
        reward=VerifiableReward(
            [Part("reward", 1.0, reward)], waits=stage.waits, lane="rewards of sums"
        ),
        sampling=SamplingConfig(),
        decode=lambda ids: "text",
    )


def one_rollout() -> Rollout:
    prompt = make_prompt()
    return Rollout(rollout_id="sums:0.0", prompt_ids=prompt.token_ids, seed=1, prompt=prompt)
