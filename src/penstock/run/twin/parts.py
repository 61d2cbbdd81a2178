"""The other modelled parts of a simulated run: trainer, rewards, journal, and the driver's own time.

Each keeps the protocol of the real part and takes the time that the profile gives it, on the running
loop's clock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from penstock.reward.protocol import Reward
from penstock.run.twin.profile import Profile, SeenGroup
from penstock.types import Batch, Group, Prompt, Rollout, Score, StepReport, WeightHandle
from penstock.waits import loop_time

_FAR = 7919  # a prime: groups this far away are not those of the next cursors


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
