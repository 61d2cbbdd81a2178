"""The modelled parts of a simulated run: engine, trainer, rewards, journal, checkpoints and the driver's own time.

Each keeps the protocol of the real part and takes the time that the profile gives it, on the running
loop's clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config import CheckpointConfig
from penstock.engine.protocol import (
    EngineStats,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
    SamplingParams,
)
from penstock.reward.protocol import Reward
from penstock.rollout.evaluation.background import Evaluations
from penstock.rollout.evaluation.evaluate import EvalTask
from penstock.run.twin.models import DecodeModel, Rows, TrainModel
from penstock.run.twin.profile import Profile, SeenGroup
from penstock.types import (
    Batch,
    Group,
    Prompt,
    Rollout,
    Score,
    StepReport,
    VersionSegment,
    WeightHandle,
    extend_segments,
)
from penstock.waits import loop_time
from penstock.workers.supervise.trainer import TrainerPart

_IDS = np.zeros(1 << 20, dtype=np.int32)  # the tokens of every response
_LOGPROBS = np.zeros(1 << 20, dtype=np.float32)
_IDS.flags.writeable = _LOGPROBS.flags.writeable = False  # so that a rollout needs no copy
_FAR = 7919  # a prime: groups this far away are not those of the next cursors
_GRAIN_STEPS = 4  # decode steps after which a pack of engines looks for rows that have ended


class Samples:
    """Recorded times, drawn again in their order; one of several users takes its turn."""

    def __init__(self, values: Sequence[float], start: int = 0, every: int = 1) -> None:
        self._values = list(values) or [0.0]
        self._next = itertools.count(start, every)

    def draw(self) -> float:
        return self._values[next(self._next) % len(self._values)]

    def longest(self, times: int) -> float:
        """Draw so many times; return the longest."""
        if len(self._values) == 1:
            return self._values[0]
        return max(self.draw() for _ in range(times))

    async def wait(self) -> None:
        if seconds := self.draw():
            await asyncio.sleep(seconds)


class Recorded:
    """The lengths and rewards of the responses of one task, from the groups of a profile."""

    def __init__(self, groups: Sequence[SeenGroup], *, size: int, longest: int) -> None:
        """size: responses of a group. longest: most tokens of a response."""
        self.size = size
        self._made = [self._group(groups, n, longest) for n in range(len(groups))]
        self._tokens = [sum(one.lengths[:size]) for one in self._made]

    def _group(self, groups: Sequence[SeenGroup], number: int, longest: int) -> SeenGroup:
        """Return a recorded group; a larger group takes members of further groups."""
        seen, further = groups[number], number
        lengths, rewards = list(seen.lengths), list(seen.rewards)
        while len(lengths) < self.size:
            further += _FAR
            one = groups[further % len(groups)]
            lengths += one.lengths
            rewards += one.rewards
        cut = tuple(min(length, longest) for length in lengths)
        return SeenGroup(cut, tuple(rewards), seen.refused, seen.task)

    def group(self, cursor: int) -> SeenGroup:
        """Return the recorded group of a cursor."""
        return self._made[cursor % len(self._made)]

    def tokens(self, cursor: int) -> int:
        """Return the tokens of all responses of a cursor's group."""
        return self._tokens[cursor % len(self._tokens)]

    def mean_rows(self) -> float:
        """Return the rows of a group that still run, on average until its longest response ends."""
        groups = [one.lengths[: self.size] for one in self._made]
        return sum(sum(one) / max(one) for one in groups) / len(groups)


def place_of(name: str) -> tuple[str, int, int]:
    """Return the task, the cursor and the number of a rollout or of a request for it."""
    group, _, number = name.partition("/")[0].rpartition(".")
    task, _, cursor = group.rpartition(":")
    return task, int(cursor), int(number)


class DriverTime:
    """The one core of the driver's event loop: what it does for each group happens one after the other."""

    def __init__(self, per_group_s: float, per_response_s: float) -> None:
        self._per_group_s, self._per_response_s = per_group_s, per_response_s
        self._free_at = self.busy_s = 0.0

    async def spend(self, responses: int) -> None:
        seconds, now = self._per_group_s + responses * self._per_response_s, loop_time()
        self.busy_s += seconds
        self._free_at = max(now, self._free_at) + seconds
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class VirtualReward(Reward):
    """Scores a group together, so that a million groups cost no task for each response."""

    needs_group = True

    def __init__(self, recorded: Recorded, seconds: Samples, driver: DriverTime) -> None:
        self._recorded, self._seconds, self._driver = recorded, seconds, driver

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return (await self.score_group([rollout], [prompt]))[0]

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        await self._driver.spend(self._recorded.size)
        longest = self._seconds.longest(self._recorded.size)
        if longest:
            await asyncio.sleep(longest)
        _, cursor, first = place_of(rollouts[0].rollout_id)
        rewards = self._recorded.group(cursor).rewards
        return [Score(rewards[first + place]) for place in range(len(rollouts))]


@dataclass(eq=False, slots=True)
class _Call:
    """One `generate_many`, answered whole."""

    answer: asyncio.Future[None]
    left: int  # requests
    made: dict[str, Generation]


@dataclass(eq=False, slots=True)
class _Asked:
    """One request, as one row or, where a group is one request, as a row for each of its responses."""

    request: GenerationRequest
    call: _Call
    number: int  # of its rows in `Rows`


class VirtualEngine:
    """See `InferenceEngine`: one engine, or `engines` equal ones behind one name."""

    def __init__(
        self,
        decode: DecodeModel,
        lengths: Callable[[str], Sequence[int]],
        *,
        engines: int = 1,
        rows_of_request: float = 1.0,
        sync: Samples,
    ) -> None:
        """lengths: of the rows of a request, of which `rows_of_request` run on average. sync: of a load."""
        self.rows, self.engines = Rows(decode, engines), engines
        self._requests = max(1, round(self.rows.slots / rows_of_request))  # that run at once
        self._lengths, self._prefill_s = lengths, decode.prefill_s
        self._sync = sync
        self._switches: list[tuple[float, int]] = [(0.0, 0)]  # (decode steps done, version)
        self._digest = ""
        self._asked: dict[int, _Asked] = {}  # by number
        self._names: dict[str, _Asked] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._ended_at = 0.0
        self._grain_s = _GRAIN_STEPS * decode.seconds(decode.slots) * (engines > 1)
        self._idle = asyncio.Event()

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        call = _Call(asyncio.get_running_loop().create_future(), len(requests), {})
        self.rows.advance(loop_time())
        self.rows.stall(self._prefill_s)
        for request in requests:
            asked = _Asked(request, call, next(self._numbers))
            self._names[request.request_id] = self._asked[asked.number] = asked
            self.rows.add(asked.number, self._left(request))
        self._go_on()
        try:
            await call.answer
        except asyncio.CancelledError:
            for request in requests:
                await self.abort(request.request_id)
            raise
        return [call.made[request.request_id] for request in requests]

    def _left(self, request: GenerationRequest) -> list[int]:
        """Return the tokens that each row of a request still has to make."""
        lengths, begun = self._lengths(request.request_id), len(request.response_ids)
        return [length - begun for length in lengths if length > begun] or [1]

    def _go_on(self) -> None:
        """Let waiting rows begin, and set the timer of the next end; one that is too early does no harm."""
        self.rows.admit()
        end = self.rows.next_end()
        if end is None:
            if not self.rows.running:
                self._idle.set()
            return
        due = max(end, self._ended_at + self._grain_s)
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._end_rows)

    def _end_rows(self) -> None:
        self._timer, now = None, loop_time()
        self.rows.advance(now)
        before = self.rows.running
        for number, tokens in self.rows.take_ended():
            self._answer(self._asked[number], tokens, "stop")
        if self.rows.running < before:
            self._ended_at = now
        self._go_on()

    def _answer(self, asked: _Asked, tokens: int, reason: FinishReason) -> None:
        name, call = asked.request.request_id, asked.call
        del self._names[name], self._asked[asked.number]
        call.made[name] = Generation(
            request_id=name,
            token_ids=_IDS[:tokens],
            logprobs=_LOGPROBS[:tokens],
            segments=self._segments(tokens),
            finish_reason=reason,
        )
        call.left -= 1
        if not call.left and not call.answer.done():
            call.answer.set_result(None)

    def _segments(self, made: int) -> tuple[VersionSegment, ...]:
        """Return the versions under which the last `made` decode steps were done.

        Steps since a switch are rounded, never those between two: their sum would give a response an
        older version than any that its engine had.
        """
        done, newest_first = 0, []
        for switched, version in reversed(self._switches):
            since = min(made, round(self.rows.steps - switched))
            newest_first.append((version, since - done))
            done = since
            if done == made:
                break
        segments: tuple[VersionSegment, ...] = ()
        for place, (version, own) in enumerate(reversed(newest_first)):
            rest = made - done if place == 0 else 0  # older than every switch that is remembered
            segments = extend_segments(segments, version, own + rest)
        return segments

    async def abort(self, request_id: str) -> None:
        asked = self._names.get(request_id)
        if asked is not None:
            self.rows.advance(loop_time())
            self._answer(asked, self.rows.remove(asked.number), "abort")
            self._go_on()

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.rows.is_held = True
        if mode == "abort":
            for name in list(self._names):
                await self.abort(name)
        while mode == "wait" and self.rows.running:
            self._idle.clear()
            await self._idle.wait()

    async def resume(self) -> None:
        self.rows.is_held = False
        self.rows.advance(loop_time())
        self._go_on()

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        await self._sync.wait()
        self.rows.advance(loop_time())
        self._switches.append((self.rows.steps, version))
        del self._switches[:-64]
        self._digest = source.digest
        return source.digest

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        self.rows.advance(loop_time())
        return EngineStats(
            policy_version=self._switches[-1][1],
            digest=self._digest,
            running=self.rows.running,
            waiting=self.rows.waiting,
            tokens_generated=int(self.rows.tokens),
            busy_s=self.rows.busy_s,
            slots=self._requests,
        )

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class VirtualTrainer:
    """See `TrainerPart`: an update takes the time of its tokens."""

    def __init__(self, profile: Profile, ranks: int, tokens_of: Callable[[Group], int]) -> None:
        self._model: TrainModel = profile.train
        self._ranks, self._step, self._tokens_of = ranks, 0, tokens_of
        self._publish, self._snapshot = Samples(profile.publish_s), Samples(profile.checkpoint_s)
        self._has_published = False
        self.busy_s = 0.0

    async def train(self, batch: Batch) -> StepReport:
        tokens = sum(map(self._tokens_of, batch.groups))
        seconds = self._model.seconds(tokens, self._ranks, batch.step)
        await self._work(seconds)
        self._step = batch.step
        return StepReport(step=self._step, policy_version=self._step, digest=f"v{self._step}")

    async def _work(self, seconds: float) -> None:
        self.busy_s += seconds
        await asyncio.sleep(seconds)

    def _handle(self) -> WeightHandle:
        return WeightHandle(version=self._step, digest=f"v{self._step}", kind="virtual")

    async def announce(self) -> WeightHandle | None:
        return self._handle() if self._has_published else None

    async def publish(self) -> WeightHandle:
        self._has_published = True
        handle = self._handle()
        await self._work(self._publish.draw())
        return handle

    async def snapshot(self, folder: str) -> tuple[int, str]:
        await self._work(self._snapshot.draw())
        return self._step, f"v{self._step}"

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class VirtualWorker:
    """See `Worker`: a part on this loop."""

    can_be_killed = False
    place = "virtual"

    def __init__(self, name: str, part: Any) -> None:
        self.name, self._part = name, part
        self._closed = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._part, method)(*args)

    async def ended(self) -> str:
        await self._closed.wait()
        return f"{self.name}: it was closed"

    async def stack(self) -> str:
        return ""

    async def activity(self) -> float | None:
        return None

    async def kill(self) -> None:
        self._closed.set()

    async def close(self) -> None:
        self._closed.set()
        await self._part.close()


class VirtualJournal:
    """The part of a `Journal` that a run writes, as time alone."""

    def __init__(self, profile: Profile) -> None:
        self._land, self._before = Samples(profile.land_s), Samples(profile.before_s)
        self._after = Samples(profile.after_s)

    async def landed(self, group: Any) -> None:
        await self._land.wait()

    filtered = failed = landed

    def drawn(self, *_: Any, **__: Any) -> None: ...

    retried = expired = dropped = record_published = record_confirmed = drawn

    async def begin_step(self, step: int, groups: Sequence[Any]) -> None:
        await self._before.wait()

    async def commit_step(self, report: StepReport) -> None:
        await self._after.wait()


@dataclass(slots=True, kw_only=True)
class VirtualEvaluations(Evaluations):
    """Asks the engines for the responses of an evaluation, and throws them away."""

    sizes: dict[str, int]  # task -> responses
    sampling: SamplingParams

    async def _one(self, engine: Any, task: EvalTask, step: int) -> None:
        await engine.stats()
        requests = [
            GenerationRequest(
                request_id=f"eval:{task.name}:{number}.0",
                prompt_ids=np.array([number], np.int32),
                sampling=self.sampling,
                seed=number,
            )
            for number in range(self.sizes[task.name])
        ]
        if requests:
            await engine.generate_many(requests)


class VirtualCheckpoints:
    """The part of a `CheckpointStore` that holds the loop up: the copy of the training state."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings, self._newest = settings, loop_time()

    def due(self, step: int) -> bool:
        every, minutes = self._settings.every_steps, self._settings.every_minutes
        is_late = minutes > 0 and loop_time() - self._newest >= minutes * 60
        return is_late or (every > 0 and step % every == 0)

    async def begin(self, trainer: TrainerPart) -> None:
        self._newest = loop_time()
        await trainer.snapshot("")
