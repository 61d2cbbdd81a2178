"""A simulated worker process: messages that take time, one thread for blocking methods, and its faults.

`Processes` takes the place of `ProcessWorker` in the local launcher. Messages of one direction keep their
order, as on a socket. A process may die, stall, slow down or lose a message at any time; a stalled process
does nothing and answers nothing, and goes on where it was.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import RunError, WorkerDied
from penstock.workers.rpc import IMMEDIATE, portable_error
from simulation.parts import SimEngine, SimTrainer

if TYPE_CHECKING:
    from simulation.world import World


@dataclass
class Meeting:
    """A collective of the ranks of one trainer."""

    given: dict[int, Any] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    """Starts simulated processes where the launcher starts real ones."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(
        self, name: str, factory: str, config: Any, *args: Any, timeout_s: float, **_: Any
    ) -> SimProcess:
        process = SimProcess(name, self._world)
        make: Any
        if factory.endswith("trainer_part"):
            rank, ranks = args[3], config.launch.num_consumers
            make = partial(SimTrainer, self._world, process, rank, ranks)
            process.peers = (args[4], ranks)
        else:
            make = partial(SimEngine, self._world, process, config.engine.max_slots)
        try:
            async with asyncio.timeout(timeout_s):
                await process.build(make)
        except TimeoutError:
            await process.close()
            raise RunError(f"{name}: not ready after {timeout_s:g} s") from None
        except BaseException:
            await process.close()
            raise
        return process

    @staticmethod
    async def close(process: SimProcess) -> None:
        await process.close()


class SimProcess:
    """See `Worker`."""

    can_be_killed = True

    def __init__(self, name: str, world: World) -> None:
        self.name, self._world = name, world
        self.number = world.processes.add(self)
        self.place = f"pid {self.number}"
        self.peers: tuple[Any, int] = (None, 1)  # where the ranks of one trainer meet
        self.pieces = 0  # of work that were done
        self.is_dead = False
        self.loses = 0  # messages to lose next
        self.pace = 1.0
        self._spent_s = 0.0
        self._runs = asyncio.Event()  # not set: it is stalled
        self._runs.set()
        self._gone = asyncio.Event()  # the driver has noticed its death
        self._part: Any = None
        self._thread = asyncio.Lock()  # blocking methods run one after another
        self._serving: set[asyncio.Task[None]] = set()
        self._asked: deque[tuple[int, bytes]] = deque()
        self._answered: deque[tuple[int, bytes]] = deque()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0

    # ---- the driver's end

    async def build(self, make: Any) -> None:
        """Wait until the part is built, as a call of `__start__` does."""
        await self._call("__start__", (make,), pickled=False)

    async def call(self, method: str, *args: Any) -> Any:
        return await self._call(method, args)

    async def _call(self, method: str, args: tuple, *, pickled: bool = True) -> Any:
        if self._gone.is_set():
            raise WorkerDied(f"{self.name}: the worker has ended")
        self._calls += 1
        number, loop = self._calls, asyncio.get_running_loop()
        future = self._waiting[number] = loop.create_future()
        self._world.at_call(self, method, "sent")
        try:
            message = pickle.dumps((method, args)) if pickled else (method, args)
            if self.loses:
                self.loses -= 1
            else:
                self._asked.append((number, message))  # type: ignore[arg-type]
                loop.call_later(self._world.delay(0.004), self._deliver)
            return await future
        finally:
            self._waiting.pop(number, None)

    def _receive(self) -> None:
        """Take the oldest answer, unless the process died before the answer was read."""
        if not self._answered or self._gone.is_set():
            return
        number, message = self._answered.popleft()
        result, error = pickle.loads(message)
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _notice_death(self) -> None:
        if not self._gone.is_set():
            self._gone.set()
            died = WorkerDied(f"{self.name}: the worker ended unexpectedly")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(died)

    async def ended(self) -> str:
        await self._gone.wait()
        return f"{self.name}: the worker ended unexpectedly"

    async def stack(self) -> str:
        return "(a simulated process)"

    async def activity(self) -> float | None:
        await asyncio.sleep(self._world.delay(0.004))
        return self._spent_s

    async def kill(self) -> None:
        self.die()
        await asyncio.sleep(self._world.delay(0.01))

    async def close(self) -> None:
        self.die()
        self._notice_death()
        await asyncio.sleep(self._world.delay(0.01))

    # ---- the process

    def die(self) -> None:
        """End now; the driver notices a moment later, after the answers that were already sent."""
        if self.is_dead:
            return
        self.is_dead = True
        self._world.processes.remove(self)
        self._world.memory.writer_died(self)
        for task in list(self._serving):
            task.cancel()
        asyncio.get_running_loop().call_later(self._world.delay(0.01), self._notice_death)

    def stall(self, seconds: float | None) -> None:
        """Do nothing for some seconds; None: for ever."""
        if self.is_dead:
            return
        self._runs.clear()
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._runs.set)

    def _deliver(self) -> None:
        if self._asked and not self.is_dead:
            number, message = self._asked.popleft()
            task = asyncio.get_running_loop().create_task(
                self._serve(number, message), name=f"{self.name} serves"
            )
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, number: int, message: Any) -> None:
        await self._runs.wait()
        method, args = pickle.loads(message) if isinstance(message, bytes) else message
        self._world.at_call(self, method, "begun")
        if self.is_dead:
            return
        try:
            result, error = await self._run(method, args), None
        except Exception as fault:
            result, error = None, portable_error(self.name, fault)
        self._world.at_call(self, method, "done")
        await self._runs.wait()
        if self.is_dead:
            return
        if self.loses:
            self.loses -= 1
            return
        self._answered.append((number, pickle.dumps((result, error))))
        asyncio.get_running_loop().call_later(self._world.delay(0.004), self._receive)
        self._world.at_call(self, method, "answered")

    async def _run(self, method: str, args: tuple) -> Any:
        if method == "__start__":
            await self.work(1.0)
            self._part = args[0]()
            await self.work(0.5)
            return None
        function = getattr(self._part, method)
        if method in self._part.BLOCKING and method not in IMMEDIATE:
            async with self._thread:
                return await function(*args)
        return await function(*args)

    async def work(self, seconds: float) -> None:
        """Work for about so long, in two pieces; a stalled process stands still in between."""
        for _ in range(2):
            some = seconds * self.pace * (0.25 + self._world.random.random() / 2)
            await asyncio.sleep(some)
            await self._runs.wait()
            self._spent_s += some
            self.pieces += 1

    async def meet(self, what: Any, rank: int, given: Any) -> list[Any]:
        """Exchange a value with the other ranks; wait for ever for a rank that is dead."""
        where, ranks = self.peers
        if ranks == 1:
            return [given]
        meeting = self._world.meetings.setdefault((where, what), Meeting())
        meeting.given[rank] = given
        if len(meeting.given) == ranks:
            meeting.complete.set()
        await meeting.complete.wait()
        await self._runs.wait()
        return [meeting.given[number] for number in range(ranks)]
