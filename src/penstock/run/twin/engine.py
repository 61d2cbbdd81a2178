"""The modelled parts of a simulated run: engines, trainer, rewards, journal, and the driver's own time.

An engine makes one token for each of its rows in a decode step; see `DecodeModel` for what a step takes. `Rows`
is that rule alone: the fit replays recorded calls through it, `ModelledEngine` runs on it behind the engine
protocol. Each part keeps the protocol of the real one and takes the time that the profile gives it, by the
clock of the running event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from penstock.engine.protocol import (
    EngineStats,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
)
from penstock.reward.protocol import Reward
from penstock.run.twin.profile import DecodeModel, Profile, SeenGroup
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

_IDS = np.zeros(1 << 20, dtype=np.int32)  # the tokens of every response
_LOGPROBS = np.zeros(1 << 20, dtype=np.float32)
_IDS.flags.writeable = _LOGPROBS.flags.writeable = False  # so that a rollout needs no copy
_FAR = 7919  # a prime: groups this far away are not those of the next cursors
_GRAIN_STEPS = 4  # decode steps after which a pack of engines looks for rows that have ended


class Rows:
    """The rows of one engine, or of `engines` equal ones as one: which run, which wait, which ends next.

    Rows advance together, so a row ends when the count of decode steps has reached its own.
    """

    def __init__(self, model: DecodeModel, engines: int = 1) -> None:
        self.model = model
        self.slots = model.slots * engines
        self.busy_s = self.row_s = 0.0  # seconds with a row, and seconds of all rows
        self.steps = 0.0  # decode steps done
        self.stalls_s = 0.0  # seconds in which no row advanced, beside a row
        self.tokens = 0.0
        self.is_held = False  # no row begins
        self._engines = engines
        self._now = 0.0
        self._stalled_s = 0.0  # seconds to come in which no row advances
        self._queue: dict[int, int] = {}  # waiting row -> its tokens; first come, first served
        self._began: dict[int, float] = {}  # running row -> decode steps done by then
        self._ends: list[tuple[float, int]] = []  # heap: decode steps at its end, row

    def hold(self, is_held: bool) -> None:
        """Begin no row while held."""
        self.is_held = is_held

    @property
    def running(self) -> int:
        return len(self._began)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _pace(self) -> float:
        return self.model.seconds(max(1.0, self.running / self._engines))

    def advance(self, now: float) -> None:
        """Move to a time at which no row ends or began to run before."""
        passed = now - self._now
        self._now = now
        if self._began:
            self.busy_s += passed
            self.row_s += passed * self.running
            stalled = min(passed, self._stalled_s)
            self._stalled_s -= stalled
            self.stalls_s += stalled
            steps = (passed - stalled) / self._pace()
            self.steps += steps
            self.tokens += steps * self.running
        else:
            self._stalled_s = max(0.0, self._stalled_s - passed)

    def stall(self, seconds: float) -> None:
        """Let all rows wait: a prefill, or weights being loaded between two decode steps."""
        self._stalled_s += seconds / self._engines

    def add(self, row: int, tokens: int) -> None:
        """Let a row of so many tokens wait for a free slot; every row has a number of its own."""
        self._queue[row] = tokens

    def admit(self) -> None:
        """Let waiting rows run for as long as slots are free."""
        while self._queue and self.running < self.slots and not self.is_held:
            row = next(iter(self._queue))
            heappush(self._ends, (self.steps + self._queue.pop(row), row))
            self._began[row] = self.steps

    def next_end(self) -> float | None:
        """The time at which the next row ends if no other begins before; None without rows."""
        while self._ends and self._ends[0][1] not in self._began:  # it was removed
            heappop(self._ends)
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self.steps)
        return self._now + self._stalled_s + left * self._pace()

    def take_ended(self) -> list[int]:
        """And forget the rows that have ended."""
        ended = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, row = heappop(self._ends)
            if self._began.pop(row, None) is not None:
                ended.append(row)
        return ended

    def remove(self, row: int) -> int:
        """Forget a row before its end; return the tokens that it has made."""
        if self._queue.pop(row, None) is not None:
            return 0
        return int(self.steps - self._began.pop(row) + 1e-6)


@dataclass(eq=False, slots=True)
class _Call:
    """One `generate_many`, answered whole."""

    answer: asyncio.Future[None]
    left: int  # requests
    generations: dict[str, Generation]


@dataclass(eq=False, slots=True)
class _Request:
    name: str
    call: _Call
    row: int
    tokens: int  # still to make


class ModelledEngine:
    """See `InferenceEngine`: one engine, or `engines` equal ones behind one name."""

    def __init__(
        self,
        decode: DecodeModel,
        length: Callable[[str], int],
        *,
        engines: int = 1,
        sync_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """length: tokens of the response to a request, by its id. sync_s: seconds of the next load."""
        self.rows, self.engines = Rows(decode, engines), engines
        self._length, self._prefill_s, self._sync_s = length, decode.prefill_s, sync_s
        self._switches: list[tuple[float, int]] = [(0.0, 0)]  # (decode steps done, version)
        self._digest = ""
        self._by_row: dict[int, _Request] = {}
        self._by_name: dict[str, _Request] = {}
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
            name = request.request_id
            tokens = max(1, self._length(name) - len(request.response_ids))
            asked = _Request(name, call, next(self._numbers), tokens)
            self._by_name[name] = self._by_row[asked.row] = asked
            self.rows.add(asked.row, tokens)
        self._continue()
        try:
            await call.answer
        except asyncio.CancelledError:
            for request in requests:
                await self.abort(request.request_id)
            raise
        return [call.generations[request.request_id] for request in requests]

    def _continue(self) -> None:
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
        for row in self.rows.take_ended():
            self._ended_at = now
            request = self._by_row[row]
            self._answer(request, request.tokens, "stop")
        self._continue()

    def _answer(self, request: _Request, tokens: int, reason: FinishReason) -> None:
        name, call = request.name, request.call
        del self._by_name[name], self._by_row[request.row]
        call.generations[name] = Generation(
            request_id=name,
            token_ids=_IDS[:tokens],
            logprobs=_LOGPROBS[:tokens],
            segments=self._segments(tokens),
            finish_reason=reason,
        )
        call.left -= 1
        if not call.left and not call.answer.done():
            call.answer.set_result(None)

    def _segments(self, tokens: int) -> tuple[VersionSegment, ...]:
        """The versions under which the last `tokens` decode steps were done.

        Steps since a switch are rounded, never those between two: their sum would give a response an
        older version than any that its engine had.
        """
        done, newest_first = 0, []
        for switched, version in reversed(self._switches):
            since = min(tokens, round(self.rows.steps - switched))
            newest_first.append((version, since - done))
            done = since
            if done == tokens:
                break
        segments: tuple[VersionSegment, ...] = ()
        for place, (version, count) in enumerate(reversed(newest_first)):
            rest = tokens - done if place == 0 else 0  # older than every switch that is remembered
            segments = extend_segments(segments, version, count + rest)
        return segments

    async def abort(self, request_id: str) -> None:
        request = self._by_name.get(request_id)
        if request is not None:
            self.rows.advance(loop_time())
            self._answer(request, self.rows.remove(request.row), "abort")
            self._continue()

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.rows.hold(True)
        if mode == "abort":
            for name in list(self._by_name):
                await self.abort(name)
        while mode == "wait" and self.rows.running:
            self._idle.clear()
            await self._idle.wait()

    async def resume(self) -> None:
        self.rows.hold(False)
        self.rows.advance(loop_time())
        self._continue()

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        if seconds := self._sync_s():
            await asyncio.sleep(seconds)
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
            slots=self.rows.slots,
        )

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


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
        self._groups = [self._group(groups, n, longest) for n in range(len(groups))]

    def _group(self, groups: Sequence[SeenGroup], number: int, longest: int) -> SeenGroup:
        """A recorded group; a larger group takes members of further groups."""
        seen, further = groups[number], number
        lengths, rewards = list(seen.lengths), list(seen.rewards)
        while len(lengths) < self.size:
            further += _FAR
            other = groups[further % len(groups)]
            lengths += other.lengths
            rewards += other.rewards
        cut = tuple(min(length, longest) for length in lengths)
        return SeenGroup(cut, tuple(rewards), seen.refused, seen.task)

    def group(self, cursor: int) -> SeenGroup:
        """The recorded group of a cursor."""
        return self._groups[cursor % len(self._groups)]


def place_of(name: str) -> tuple[str, int, int]:
    """The task, the cursor and the number of a rollout or of a request for it."""
    group, _, number = name.partition("/")[0].rpartition(".")
    task, _, cursor = group.rpartition(":")
    return task, int(cursor), int(number)


class DriverTime:
    """The one core of the driver's event loop: what it does for each group happens one after the other."""

    def __init__(self, profile: Profile) -> None:
        self._per_group_s = profile.driver_s_per_group
        self._per_response_s = profile.driver_s_per_response
        self._free_at = self.busy_s = 0.0

    async def spend(self, responses: int) -> None:
        seconds, now = self._per_group_s + responses * self._per_response_s, loop_time()
        self.busy_s += seconds
        self._free_at = max(now, self._free_at) + seconds
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class ModelledReward(Reward):
    """Scores a group together, so that many groups cost no task for each response."""

    needs_group = True

    def __init__(self, recorded: Recorded, profile: Profile, driver: DriverTime) -> None:
        self._recorded, self._seconds, self._driver = recorded, Samples(profile.reward_s), driver

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return (await self.score_group([rollout], [prompt]))[0]

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        await self._driver.spend(len(rollouts))
        if longest := self._seconds.longest(len(rollouts)):
            await asyncio.sleep(longest)
        _, cursor, first = place_of(rollouts[0].rollout_id)
        rewards = self._recorded.group(cursor).rewards
        return [Score(rewards[first + place]) for place in range(len(rollouts))]


class ModelledTrainer:
    """See `TrainerClient`: an update takes the time of its tokens."""

    def __init__(self, profile: Profile, ranks: int) -> None:
        self._model, self._ranks, self._step = profile.train, ranks, 0
        self._publish, self._snapshot = Samples(profile.publish_s), Samples(profile.checkpoint_s)
        self._has_published = False
        self.busy_s = 0.0

    async def train(self, batch: Batch) -> StepReport:
        tokens = sum(group.num_response_tokens for group in batch.groups)
        await self._work(self._model.seconds(tokens, self._ranks, batch.step))
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

    async def write_snapshot(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class ModelledJournal:
    """The part of a `Journal` that a run writes, as time alone; counts what is trained."""

    def __init__(self, profile: Profile, committed: Callable[[int], None]) -> None:
        """committed: called with each step that is done."""
        self.tokens = self.groups = 0  # that were trained
        self.staleness: Counter[int] = Counter()  # updates behind -> groups
        self._land, self._before = Samples(profile.land_s), Samples(profile.before_s)
        self._after, self._committed = Samples(profile.after_s), committed

    async def landed(self, group: Group) -> None:
        await self._land.wait()

    filtered = failed = landed

    def drawn(self, *_: Any, **__: Any) -> None: ...

    retried = expired = dropped = record_published = record_confirmed = drawn
    sync = prune_payloads = drawn

    def outcomes(self, *_: Any) -> list[tuple]:
        return []  # it knows no prompts

    async def begin_step(self, step: int, groups: Sequence[Group]) -> None:
        for group in groups:
            self.groups += 1
            self.tokens += group.num_response_tokens
            self.staleness[group.staleness(step)] += 1
        await self._before.wait()

    async def commit_step(self, report: StepReport) -> None:
        await self._after.wait()
        self._committed(report.step)
