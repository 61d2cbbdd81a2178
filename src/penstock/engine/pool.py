"""Several engines as one. Layer 1.

A request goes to the engine that would be through first: the fewest outstanding tokens, weighed by how
fast each has been of late, so that a slow one gets its share and no more. Requests of one prompt go together,
and a rollout that goes on returns to the engine that knows it. A dead engine is taken out and its
requests are retried elsewhere; its owner may restart it. One engine can be set aside: it keeps its
weights and takes no requests of the pool. Knows nothing of what an engine is inside.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

import numpy as np

from penstock.engine.protocol import (
    EngineStats,
    Generation,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from penstock.errors import EngineError, RunError, WorkerDied
from penstock.types import WeightHandle

T = TypeVar("T")
UpdateOrder = Literal["together", "rolling"]
_REMEMBERED = 65536  # rollouts whose engine is remembered
_NEWEST_SHARE = 0.2  # of the last answer in an engine's speed


class EnginePool:
    """See `InferenceEngine`. `alive` lists the engines that take requests."""

    def __init__(
        self, engines: Sequence[InferenceEngine], *, update: UpdateOrder = "together"
    ) -> None:
        if not engines:
            raise EngineError("engine pool: got 0 engines, allowed: at least 1")
        self._engines, self._update = list(engines), update
        self._outstanding = [0] * len(engines)
        self._speeds: list[float | None] = [None] * len(engines)  # outstanding tokens a second
        self._dead: dict[int, str] = {}
        self._aside: set[int] = set()
        self._owner: OrderedDict[str, int] = OrderedDict()
        self._latest: tuple[int, WeightHandle] | None = None

    @property
    def alive(self) -> list[int]:
        return [i for i in self._living if i not in self._aside]

    @property
    def _living(self) -> list[int]:
        return [i for i in range(len(self._engines)) if i not in self._dead]

    def set_aside(self) -> int | None:
        """The least busy engine gets no new requests and no new weights; None: no other would be left.

        What runs there goes on. Pausing, sleeping and counting include it.
        """
        if len(self.alive) < 2:
            return None
        index = min(self.alive, key=lambda i: self._outstanding[i])
        self._aside.add(index)
        return index

    def take_in(self, index: int) -> None:
        """Undo `set_aside`; its owner has given it the newest weights."""
        self._aside.discard(index)

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self._engines))

    async def restart(self, index: int) -> None:
        """Start a dead engine again, with the newest weights, and give it work."""
        await self._engines[index].start()
        if self._latest is not None:
            await self._engines[index].update_weights(*self._latest)
        self._dead.pop(index, None)

    def add(self, engine: InferenceEngine) -> int:
        """A further engine, by its index; `restart` gives it the newest weights and work."""
        self._engines.append(engine)
        self._outstanding.append(0)
        self._speeds.append(None)
        index = len(self._engines) - 1
        self._dead[index] = f"engine {index}: it has not joined yet"
        return index

    def retire(self, index: int) -> None:
        """No new requests for this engine; those that run there go on."""
        self._dead[index] = f"engine {index}: it was drained"

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        families: dict[bytes, list[int]] = {}
        for place, request in enumerate(requests):
            families.setdefault(request.prompt_ids.tobytes(), []).append(place)
        made = await asyncio.gather(
            *(self._place([requests[p] for p in places]) for places in families.values())
        )
        results: dict[int, Generation] = {}
        for places, family in zip(families.values(), made, strict=True):
            results.update(zip(places, family, strict=True))
        return [results[place] for place in range(len(requests))]

    async def _place(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate on one engine; on its death, what failed goes to another."""
        done: dict[str, Generation] = {}
        left = requests
        while left:
            index = self._choose(left[0].request_id)
            if index is None:
                reasons = "; ".join(self._dead.values())
                return [done.get(r.request_id) or _failed(r, reasons) for r in requests]
            made = await self._generate_on(index, left)
            done.update({generation.request_id: generation for generation in made})
            failed = {g.request_id for g in made if g.finish_reason == "error"}
            if not failed or await self._is_alive(index):
                break
            left = [request for request in left if request.request_id in failed]
        return [done[request.request_id] for request in requests]

    async def _generate_on(self, index: int, requests: list[GenerationRequest]) -> list[Generation]:
        tokens = sum(request.num_tokens for request in requests)
        self._outstanding[index] += tokens
        for request in requests:
            self._owner[request.request_id] = index
            self._owner.move_to_end(request.request_id)
        while len(self._owner) > _REMEMBERED:
            self._owner.popitem(last=False)
        clock = asyncio.get_running_loop().time
        since, queued = clock(), self._outstanding[index]
        try:
            made = await self._engines[index].generate_many(requests)
        finally:
            self._outstanding[index] -= tokens
        if any(one.finish_reason not in ("error", "abort") for one in made):
            self._note_speed(index, queued, clock() - since)
        return made

    def _note_speed(self, index: int, queued: int, seconds: float) -> None:
        """So many tokens were outstanding when it was asked, its own included, until it answered."""
        if seconds > 0:
            before, now = self._speeds[index], queued / seconds
            share = _NEWEST_SHARE if before is not None else 1.0
            self._speeds[index] = (1 - share) * (before or 0.0) + share * now

    def _choose(self, request_id: str) -> int | None:
        """By how long its outstanding tokens would take; one never measured counts as average."""
        alive, owner = self.alive, self._owner.get(request_id)
        if owner in alive:
            return owner
        known = [speed for speed in self._speeds if speed is not None]
        average = sum(known) / len(known) if known else 1.0
        speeds, outstanding = self._speeds, self._outstanding
        return min(alive, key=lambda i: outstanding[i] / (speeds[i] or average), default=None)

    async def _is_alive(self, index: int) -> bool:
        try:
            await self._engines[index].stats()
        except RunError as error:
            self._dead[index] = f"engine {index}: {error}"
        return index not in self._dead

    async def abort(self, request_id: str) -> None:
        owner = self._owner.get(request_id)
        if owner is not None and owner not in self._dead:
            await self._engines[owner].abort(request_id)

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda engine: engine.resume())

    async def sleep(self) -> None:
        await self._all(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._all(lambda engine: engine.wake())

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """`rolling` switches one engine after another, so that the others serve meanwhile."""
        if self._update == "together":
            digests = await self._all(
                lambda engine: engine.update_weights(version, source), self.alive
            )
        else:
            digests = []
            for index in self.alive:
                digests += await self._all(
                    lambda engine: engine.update_weights(version, source), [index]
                )
        self._latest = (version, source)
        return digests[0]

    async def stats(self) -> EngineStats:
        """Sums; the version is the oldest one that still samples for the pool."""
        all_stats: list[EngineStats] = await self._all(lambda engine: engine.stats(), self.alive)
        oldest = min(all_stats, key=lambda stats: stats.policy_version)
        for index in self._aside.intersection(self._living):
            with contextlib.suppress(EngineError):  # it died: whoever has it will find out
                all_stats += await self._all(lambda engine: engine.stats(), [index])
        return EngineStats(
            policy_version=oldest.policy_version,
            digest=oldest.digest,
            running=sum(stats.running for stats in all_stats),
            waiting=sum(stats.waiting for stats in all_stats),
            tokens_generated=sum(stats.tokens_generated for stats in all_stats),
            busy_s=sum(stats.busy_s for stats in all_stats),
            paused=any(stats.paused for stats in all_stats),
            batch_invariant=all(stats.batch_invariant for stats in all_stats),
        )

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))
        self._dead.update({i: f"engine {i}: it was closed" for i in self._living})

    async def _all(
        self, call: Callable[[InferenceEngine], Awaitable[T]], indices: list[int] | None = None
    ) -> list[T]:
        """The call on every live engine; one that is found dead drops out, any other error rises."""
        chosen = self._living if indices is None else indices

        async def on(index: int) -> list[T]:
            try:
                return [await call(self._engines[index])]
            except EngineError as error:  # asked at once: it may be back before the others end
                died = isinstance(error.__cause__, WorkerDied)
                if await self._is_alive(index) and not died:
                    raise
                return []

        results = await asyncio.gather(*(on(i) for i in chosen), return_exceptions=True)
        good: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            good += result
        if not good:
            raise EngineError("engine pool: no engine is left: " + "; ".join(self._dead.values()))
        return good


def _failed(request: GenerationRequest, reasons: str) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason="error",
        error=f"no engine is left: {reasons}",
    )
