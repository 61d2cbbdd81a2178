"""The modelled parts of a simulated run: engines, trainer, rewards, journal, and the driver's own time.

An engine makes one token for each of its rows in a decode step; see `DecodeModel` for what a step takes. Each part
keeps the protocol of the real one and takes the time that the profile gives it, by the clock of the running
event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from penstock.config import Config
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
)
from penstock.waits import loop_time

_IDS = np.zeros(1 << 20, dtype=np.int32)  # the tokens of every response
_LOGPROBS = np.zeros(1 << 20, dtype=np.float32)
_IDS.flags.writeable = _LOGPROBS.flags.writeable = False  # so that a rollout needs no copy
_FAR = 7919  # a prime: groups this far away are not those of the next cursors


class Rows:
    """The rows of one engine: which run, which wait, which ends next.

    Rows advance together, so a row ends when the count of decode steps has reached its own.
    """

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.busy_s = self.row_s = 0.0  # seconds with a row, and seconds of all rows
        self.steps = 0.0  # decode steps done
        self.tokens = 0.0
        self._is_held = False  # no row begins
        self._stalled_s = 0.0  # seconds to come in which no row advances
        self.waiting: dict[str, int] = {}  # row -> its tokens; first come, first served
        self.began: dict[str, float] = {}  # running row -> decode steps done by then
        self._now = 0.0
        self._ends: list[tuple[float, str]] = []  # heap: decode steps at its end, row

    def _pace(self) -> float:
        return self.model.seconds(max(1, len(self.began)))

    def advance(self, now: float) -> None:
        """Move to a time at which no row ends or began to run before."""
        passed, rows = now - self._now, len(self.began)
        self._now = now
        stalled = min(passed, self._stalled_s)
        self._stalled_s -= stalled
        if rows:
            steps = (passed - stalled) / self._pace()
            self.busy_s += passed
            self.row_s += passed * rows
            self.steps += steps
            self.tokens += steps * rows

    def hold(self, is_held: bool) -> None:
        """Begin no row while held."""
        self._is_held = is_held

    def stall(self, seconds: float) -> None:
        """Let all rows wait: a prefill, or weights being loaded between two decode steps."""
        self._stalled_s += seconds

    def admit(self) -> list[str]:
        """Let waiting rows run for as long as slots are free; return those that begin."""
        begun = []
        while self.waiting and len(self.began) < self.model.slots and not self._is_held:
            row = next(iter(self.waiting))
            heappush(self._ends, (self.steps + self.waiting.pop(row), row))
            self.began[row] = self.steps
            begun.append(row)
        return begun

    def next_end(self) -> float | None:
        """The time at which the next row ends if no other begins before; None without rows."""
        while self._ends and self._ends[0][1] not in self.began:  # it was removed
            heappop(self._ends)
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self.steps)
        return self._now + self._stalled_s + left * self._pace()

    def take_ended(self) -> list[str]:
        """And forget the rows that have ended."""
        ended = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, row = heappop(self._ends)
            if self.began.pop(row, None) is not None:
                ended.append(row)
        return ended

    def remove(self, row: str) -> int:
        """Forget a row before its end; return the tokens that it has made."""
        if self.waiting.pop(row, None) is not None:
            return 0
        return int(self.steps - self.began.pop(row) + 1e-6)


class ModelledEngine:
    """See `InferenceEngine`. A response has the version of its first token: that one counts for its age."""

    def __init__(
        self, decode: DecodeModel, length: Callable[[str], int], *, sync_s: float = 0.0
    ) -> None:
        """length: tokens of the response to a request, by its id. sync_s: seconds of a load."""
        self.rows = Rows(decode)
        self._length, self._sync_s = length, sync_s
        self._version, self._digest = 0, ""
        self._began_with: dict[str, int] = {}  # request that decodes -> version of its first token
        self._tokens: dict[str, int] = {}  # request without an answer -> tokens that it lacks
        self._answers: dict[str, asyncio.Future[Generation]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        loop, names = asyncio.get_running_loop(), [request.request_id for request in requests]
        self.rows.advance(loop_time())
        self.rows.stall(self.rows.model.prefill_s)
        for name, request in zip(names, requests, strict=True):
            tokens = max(1, self._length(name) - len(request.response_ids))
            self._tokens[name], self._answers[name] = tokens, loop.create_future()
            self.rows.waiting[name] = tokens
        answers = [self._answers[name] for name in names]
        self._continue()
        try:
            return await asyncio.gather(*answers)
        except asyncio.CancelledError:
            for name in names:
                await self.abort(name)
            raise

    def _continue(self) -> None:
        """Let waiting rows begin, and set the timer of the next end; one that is too early does no harm."""
        self._began_with.update(dict.fromkeys(self.rows.admit(), self._version))
        end = self.rows.next_end()
        if end is not None and (self._timer is None or end < self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(end, self._end_rows)

    def _end_rows(self) -> None:
        self._timer = None
        self.rows.advance(loop_time())
        for name in self.rows.take_ended():
            self._answer(name, self._tokens[name], "stop")
        self._continue()

    def _answer(self, name: str, tokens: int, reason: FinishReason) -> None:
        del self._tokens[name]
        answer, version = self._answers.pop(name), self._began_with.pop(name, 0)
        if not answer.done():  # else its caller was cancelled
            answer.set_result(
                Generation(
                    request_id=name,
                    token_ids=_IDS[:tokens],
                    logprobs=_LOGPROBS[:tokens],
                    segments=(VersionSegment(version, tokens),) if tokens else (),
                    finish_reason=reason,
                )
            )

    async def abort(self, request_id: str) -> None:
        if request_id in self._answers:
            self.rows.advance(loop_time())
            self._answer(request_id, self.rows.remove(request_id), "abort")
            self._continue()

    async def pause(self, mode: PauseMode = "abort") -> None:
        self.rows.hold(True)
        if mode == "abort":
            for name in list(self._answers):
                await self.abort(name)
        if mode == "wait" and self.rows.began:
            await asyncio.wait([self._answers[name] for name in self.rows.began])

    async def resume(self) -> None:
        self.rows.hold(False)
        self.rows.advance(loop_time())
        self._continue()

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        if self._sync_s:
            await asyncio.sleep(self._sync_s)
        self.rows.advance(loop_time())
        self._version, self._digest = version, source.digest
        return source.digest

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats:
        self.rows.advance(loop_time())
        return EngineStats(
            policy_version=self._version,
            digest=self._digest,
            running=len(self.rows.began),
            waiting=len(self.rows.waiting),
            tokens_generated=int(self.rows.tokens),
            busy_s=self.rows.busy_s,
            slots=self.rows.model.slots,
        )

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Recorded:
    """The lengths and rewards of the responses of one task, from the groups of a profile.

    A group with too few responses takes members of further groups.
    """

    def __init__(self, config: Config, profile: Profile, task: str) -> None:
        groups = [group for group in profile.groups if group.task == task] or profile.groups
        sampling, self._groups = config.task_sampling(task), list[SeenGroup]()
        for number, seen in enumerate(groups):
            lengths, rewards = list(seen.lengths), list(seen.rewards)
            while len(lengths) < sampling.num_generations:
                number += _FAR
                lengths += groups[number % len(groups)].lengths
                rewards += groups[number % len(groups)].rewards
            cut = tuple(min(length, sampling.max_tokens) for length in lengths)
            self._groups.append(SeenGroup(cut, tuple(rewards), seen.refused, seen.task))

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
        self._profile = profile
        self._free_at = self.busy_s = 0.0

    async def spend(self, responses: int) -> None:
        profile, now = self._profile, loop_time()
        seconds = profile.driver_s_per_group + responses * profile.driver_s_per_response
        self.busy_s += seconds
        self._free_at = max(now, self._free_at) + seconds
        await asyncio.sleep(self._free_at - now)


class ModelledReward(Reward):
    """Scores a group together, so that many groups cost no task for each response."""

    needs_group = True

    def __init__(self, recorded: Recorded, reward_s: float, driver: DriverTime) -> None:
        self._recorded, self._reward_s, self._driver = recorded, reward_s, driver

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return (await self.score_group([rollout], [prompt]))[0]

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        await self._driver.spend(len(rollouts))
        await asyncio.sleep(self._reward_s)
        _, cursor, first = place_of(rollouts[0].rollout_id)
        rewards = self._recorded.group(cursor).rewards
        return [Score(rewards[first + place]) for place in range(len(rollouts))]


class ModelledTrainer:
    """See `TrainerClient`: an update takes the time of its tokens."""

    def __init__(self, profile: Profile, ranks: int) -> None:
        self._profile, self._ranks = profile, ranks
        self._newest = WeightHandle(version=0, digest="v0", kind="virtual")
        self._has_published = False
        self.busy_s = 0.0

    async def _work(self, seconds: float) -> None:
        self.busy_s += seconds
        await asyncio.sleep(seconds)

    async def train(self, batch: Batch) -> StepReport:
        step, tokens = batch.step, sum(group.num_response_tokens for group in batch.groups)
        await self._work(self._profile.train.seconds(tokens, self._ranks))
        self._newest = WeightHandle(version=step, digest=f"v{step}", kind="virtual")
        return StepReport(step=step, policy_version=step, digest=self._newest.digest)

    async def announce(self) -> WeightHandle | None:
        return self._newest if self._has_published else None

    async def publish(self) -> WeightHandle:
        handle, self._has_published = self._newest, True
        await self._work(self._profile.publish_s)
        return handle

    async def snapshot(self, folder: str) -> tuple[int, str]:
        await self._work(self._profile.checkpoint_s)
        return self._newest.version, self._newest.digest

    async def write_snapshot(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class ModelledJournal:
    """The part of a `Journal` that a run writes, as time alone; counts what is trained."""

    def __init__(self, profile: Profile, committed: Callable[[int], None]) -> None:
        """committed: called with each step that is done."""
        self.tokens = self.groups = 0  # that were trained
        self.staleness: Counter[int] = Counter()  # updates behind -> groups
        self._profile, self._committed = profile, committed

    async def landed(self, group: Group) -> None:
        await asyncio.sleep(self._profile.land_s)

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
        await asyncio.sleep(self._profile.before_s)

    async def commit_step(self, report: StepReport) -> None:
        await asyncio.sleep(self._profile.after_s)
        self._committed(report.step)
