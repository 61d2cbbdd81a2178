"""Several engines as one.

Requests go to engines as these have room for them (`dispatch.py` decides, this file does it); those of one
prompt go together, and a rollout that goes on returns to the engine that knows it. A dead engine is
taken out and its requests are retried elsewhere; its owner may restart it. Responses that a slow engine
holds go on at an idle one. One engine can be set aside: it keeps its weights and takes no requests of the
pool. Knows nothing of what an engine is inside.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from penstock.engine.protocol import (
    EngineStats,
    Generation,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from penstock.errors import EngineError, RunError, WorkerDied
from penstock.pool.dispatch import Dispatcher
from penstock.pool.prompt_batch import Family
from penstock.pool.rebalance import Slowness
from penstock.types import WeightHandle

T = TypeVar("T")
UpdateOrder = Literal["together", "rolling"]
_REMEMBERED = 65536  # rollouts whose engine is remembered


class NoEngineLeft(EngineError):
    """All that were asked died of it, or were dead; some may be back by now."""


class EnginePool:
    """See `InferenceEngine`. `alive` lists the engines that take requests.

    Requests wait for: room at an engine. Woken by: answers, engines that join, come back or resume.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        update: UpdateOrder = "together",
        slots: int = 64,
        name_of: Callable[[int], str] = "engine {}".format,
        tell: Callable[[str], None] = lambda line: None,
        first_loaded: Callable[[int, str], None] = lambda version, digest: None,
        stranded: set[str] | None = None,
    ) -> None:
        """`slots`: requests that one engine runs at once. `tell` hears of slow engines, by name.

        `first_loaded` hears of the first engine that has new weights, while the others still load:
        from then on requests that come go only to engines that have them. Requests that fail since
        no engine is left are put into `stranded`.
        """
        if not engines:
            raise EngineError("engine pool: got 0 engines, allowed: at least 1")
        self._engines, self._update, self._slots = list(engines), update, slots
        self._dispatcher = Dispatcher(len(engines), slots)
        self._slowness = Slowness(self._dispatcher, self._engines, name_of, tell)
        self._families: dict[str, Family] = {}  # of requests that are not answered yet
        self._dead: dict[int, str] = {}
        self._aside: set[int] = set()
        self._owner: OrderedDict[str, int] = OrderedDict()
        self._latest: tuple[int, WeightHandle] | None = None
        self._first_loaded, self._stranded = first_loaded, stranded
        self._least_version = 0  # of the weights that new requests may be made with
        self._moved = 0

    @property
    def alive(self) -> list[int]:
        return self._dispatcher.serving

    @property
    def _living(self) -> list[int]:
        return [i for i in range(len(self._engines)) if i not in self._dead]

    def _died(self, index: int, reason: str, *, retired: bool = False) -> None:
        self._dead[index] = reason
        self._dispatcher.let_serve(index, False, retired=retired)
        if not self._dispatcher.is_served:  # whoever waits for room is told that none will come
            for family in self._waiters():
                self._give_up(family)
        self._bind_waiting()  # those that are left are worth more now

    def _give_up(self, family: Family) -> None:
        self._dispatcher.withdraw(family)
        family.wake(False)

    def _end_waiting(self) -> None:
        for family in self._waiters():
            family.end("abort")
            self._give_up(family)

    def _serves(self, index: int, version: int | None = None) -> None:
        member = self._dispatcher.members[index]
        member.version = member.version if version is None else version
        self._dispatcher.let_serve(index, index not in self._dead and index not in self._aside)
        self._bind_waiting()

    def set_aside(self) -> int | None:
        """The least busy engine gets no new requests and no new weights; None: no other would be left.

        What runs there goes on. Pausing, sleeping and counting include it.
        """
        if len(self.alive) < 2:
            return None
        members = self._dispatcher.members
        newest = max(members[i].version for i in self.alive)
        able = [i for i in self.alive if members[i].version == newest]
        index = min(able, key=lambda i: members[i].tokens)
        self._aside.add(index)
        self._dispatcher.let_serve(index, False)
        self._bind_waiting()
        return index

    def take_in(self, index: int) -> None:
        """Undo `set_aside`; its owner has given it the newest weights."""
        self._aside.discard(index)
        self._serves(index, None if self._latest is None else self._latest[0])

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self._engines))

    async def restart(self, index: int) -> None:
        """Start a dead engine again, with the newest weights, and give it work."""
        await self._engines[index].start()
        version = None
        if self._latest is not None:
            version = self._latest[0]
            await self._engines[index].update_weights(*self._latest)
        self._dead.pop(index, None)
        self._serves(index, version)

    def add(self, engine: InferenceEngine) -> int:
        """A further engine, by its index; `restart` gives it the newest weights and work."""
        self._engines.append(engine)
        index = self._dispatcher.add()
        self._dead[index] = f"engine {index}: it has not joined yet"
        return index

    def retire(self, index: int) -> None:
        """No new requests for this engine; those that run there go on."""
        self._died(index, f"engine {index}: it was drained", retired=True)

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        prompts: dict[bytes, list[int]] = {}
        for place, request in enumerate(requests):
            prompts.setdefault(request.prompt_ids.tobytes(), []).append(place)
        parts = [
            places[start : start + self._slots]
            for places in prompts.values()
            for start in range(0, len(places), self._slots)
        ]
        if len(parts) == 1:
            return await self._place(requests)
        made = await asyncio.gather(*(self._place([requests[p] for p in part]) for part in parts))
        results: dict[int, Generation] = {}
        for places, family in zip(parts, made, strict=True):
            results.update(zip(places, family, strict=True))
        return [results[place] for place in range(len(requests))]

    async def _place(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate on one engine; what its death or a move leaves is made on another."""
        family = Family.of(
            requests,
            wanted=self._owner.get(requests[0].request_id),
            least_version=self._least_version,
        )
        self._families.update((request.request_id, family) for request in requests)
        try:
            began = False
            while family.left and await self._has_room(family, first=began):
                began = True
                await self._generate_there(family)
        finally:
            for request in requests:
                if self._families.get(request.request_id) is family:
                    del self._families[request.request_id]
        if family.left:
            if self._stranded is not None:
                self._stranded.update(request.request_id for request in family.left)
            reasons = "; ".join(self._dead.values())
            family.end("error", error=f"no engine is left: {reasons}")
        return [family.done[request.request_id] for request in requests]

    async def _has_room(self, family: Family, *, first: bool) -> bool:
        """It is bound to an engine; False: none is left, or it was aborted. Waits for: room."""
        if not self._dispatcher.is_served:
            return False
        loop = asyncio.get_running_loop()
        if self._dispatcher.offer(family, loop.time(), first=first) is not None:
            return True
        family.room = loop.create_future()
        self._bind_waiting()
        try:
            return await family.room
        except asyncio.CancelledError:
            if family.engine is not None:  # bound and cancelled in one go
                self._dispatcher.release(family, loop.time())
                self._bind_waiting()
            raise
        finally:
            self._dispatcher.withdraw(family)
            family.room = None

    async def _generate_there(self, family: Family) -> None:
        index, asked = family.engine, family.left
        assert index is not None
        for request in asked:
            self._owner[request.request_id] = index
            self._owner.move_to_end(request.request_id)
        while len(self._owner) > _REMEMBERED:
            self._owner.popitem(last=False)
        made: list[Generation] = []
        self._slowness.changed()
        try:
            made = await self._engines[index].generate_many(asked)
        finally:
            whole = all(one.finish_reason not in ("error", "abort") for one in made)
            lengths = [len(one.token_ids) for one in made] if whole else ()
            self._dispatcher.release(family, asyncio.get_running_loop().time(), lengths)
            self._bind_waiting()
            self._slowness.changed()
        family.take(made)
        if family.left:
            self._moved += len(family.left)
            family.moves += 1
            family.been_at += (index,)
        family.wanted, family.moves_to = family.moves_to, None
        if any(one.finish_reason == "error" for one in made) and not await self._is_alive(index):
            family.retry(asked)
        if family.aborted:
            family.end("abort", family.aborted)

    def _bind_waiting(self) -> None:
        if self._dispatcher.waiting:
            for family in self._dispatcher.bindings(asyncio.get_running_loop().time()):
                assert isinstance(family, Family)
                family.wake(True)

    def _waiters(self) -> list[Family]:
        return [work for work in self._dispatcher.waiters() if isinstance(work, Family)]

    async def _is_alive(self, index: int) -> bool:
        try:
            await self._engines[index].stats()
        except RunError as error:
            self._died(index, f"engine {index}: {error}")
        return index not in self._dead

    async def abort(self, request_id: str) -> None:
        family = self._families.get(request_id)
        if family is not None:
            family.aborted.add(request_id)
            if family.waits:
                family.end("abort", [request_id])
                if not family.left:
                    self._give_up(family)
                return
        owner = self._owner.get(request_id)
        if owner is not None and owner not in self._dead:
            await self._engines[owner].abort(request_id)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Requests that wait for an engine stay where they are, or come back empty (`abort`)."""
        self._dispatcher.held = True
        if mode == "abort":
            self._end_waiting()
            for family in self._families.values():
                family.aborted.update(
                    r.request_id for r in family.left if family.moves_to is not None
                )
        await self._all(lambda index: self._engines[index].pause(mode))

    async def resume(self) -> None:
        self._dispatcher.held = False
        await self._all(lambda index: self._engines[index].resume())
        self._bind_waiting()

    async def sleep(self) -> None:
        await self._all(lambda index: self._engines[index].sleep())

    async def wake(self) -> None:
        await self._all(lambda index: self._engines[index].wake())

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Returns when all engines have them. `rolling` switches one after another."""

        async def load(index: int) -> str:
            digest = await self._engines[index].update_weights(version, source)
            self._serves(index, version)
            if self._update == "together" and version > self._least_version:
                self._least_version = version
                self._first_loaded(version, digest)
            return digest

        alive = self.alive
        digests: list[str] = []
        for indices in [alive] if self._update == "together" else [[index] for index in alive]:
            digests += await self._all(load, indices)
        self._latest, self._least_version = (version, source), version
        return digests[0]

    async def stats(self) -> EngineStats:
        """Sums; the version is the oldest one that still samples for the pool."""
        all_stats: list[EngineStats] = await self._all(self._stats_of, self.alive)
        oldest = min(all_stats, key=lambda stats: stats.policy_version)
        for index in self._aside.intersection(self._living):
            with contextlib.suppress(EngineError):  # it died: whoever has it will find out
                all_stats += await self._all(self._stats_of, [index])
        return EngineStats(
            policy_version=oldest.policy_version,
            digest=oldest.digest,
            running=sum(stats.running for stats in all_stats),
            waiting=sum(stats.waiting for stats in all_stats) + self._dispatcher.waiting,
            tokens_generated=sum(stats.tokens_generated for stats in all_stats),
            busy_s=sum(stats.busy_s for stats in all_stats),
            paused=any(stats.paused for stats in all_stats),
            batch_invariant=all(stats.batch_invariant for stats in all_stats),
            moved=self._moved,
        )

    async def _stats_of(self, index: int) -> EngineStats:
        return await self._engines[index].stats()

    async def close(self) -> None:
        self._slowness.close()
        self._end_waiting()
        await asyncio.gather(*(engine.close() for engine in self._engines))
        for index in self._living:
            self._died(index, f"engine {index}: it was closed")

    async def _all(
        self, call: Callable[[int], Awaitable[T]], indices: list[int] | None = None
    ) -> list[T]:
        """The call on every live engine; one that is found dead drops out, any other error rises."""
        chosen = self._living if indices is None else indices

        async def on(index: int) -> list[T]:
            try:
                return [await call(index)]
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
            raise NoEngineLeft("engine pool: no engine is left: " + "; ".join(self._dead.values()))
        return good
