"""An agent loop in Ray actors (`tasks.NAME.agent_actors`), with the rewards of its task.

`AgentPart` lives in an actor and holds the user's loop. As the engine of that loop it only passes requests
on: the driver takes them, asks the engines of the run, and sends the answers back. So which engine answers,
under which weights, and what follows its death stay decisions of the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from penstock.config import Config, SamplingConfig
from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import Generation, GenerationRequest, InferenceEngine
from penstock.errors import RunError, WorkerDied
from penstock.reward import build_reward
from penstock.rollout import AgentLoop
from penstock.rollout.agent.build import build_loop
from penstock.rollout.agent.single_turn import ask_policy
from penstock.types import Rollout
from penstock.waits import WaitKind, Waits, end_all
from penstock.workers.rpc import portable_error
from penstock.workers.supervise.supervised import Supervised, Worker

_CLOSE_TIMEOUT_S = 5.0


class ActorCalls:
    """A user's Ray actor as a plain object: an agent loop, or a rollout controller, in Python."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return getattr(self._actor, method).remote


class Question(NamedTuple):
    """A call of the engine that waits for the driver."""

    number: int
    method: str
    argument: Any


class AgentPart:
    """The part of an agent's actor: the loop of one task, with its rewards and its tokenizer.

    The loop and its rewards ask it as their engine: it takes requests, and gives them the driver's answers.
    """

    def __init__(self, config: Config, name: str, sampling: SamplingConfig, is_chat: bool) -> None:
        self._asked: asyncio.Queue[Question] = asyncio.Queue()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        task, chat = config.tasks[name], ChatTemplate.from_config(config.model)
        self._reward = build_reward(
            task.rewards,
            max_tokens=sampling.max_tokens,
            is_chat=is_chat,
            ask_policy=partial(ask_policy, cast(InferenceEngine, self), chat),
        )
        self._loop = build_loop(
            f"tasks.{name}",
            task,
            sampling,
            engine=self,
            reward=self._reward,
            decode=chat.decode,
        )
        self._groups: dict[int, asyncio.Task[list[Rollout]]] = {}

    # ---- asked by the loop

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await self._ask("generate", request)
        return generation

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        generations: list[Generation] = await self._ask("generate_many", requests)
        return generations

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id)

    async def _ask(self, method: str, argument: Any) -> Any:
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(Question(number, method, argument))
        try:
            return await answer
        finally:
            del self._open[number]

    # ---- asked by the driver

    async def take_questions(self) -> list[Question]:
        """Wait for a question; return all that wait."""
        first = await self._asked.get()
        return [first, *(self._asked.get_nowait() for _ in range(self._asked.qsize()))]

    async def answer(self, number: int, error: Exception | None, result: Any) -> None:
        waiting = self._open.get(number)
        if waiting is None or waiting.done():
            return  # whoever asked was cancelled
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(result)

    async def generate_group(
        self, number: int, rollouts: list[Rollout], partial: bool
    ) -> list[Rollout]:
        making = self._loop.generate_group(rollouts, enable_partial_rollout=partial)
        self._groups[number] = asyncio.ensure_future(making)
        try:
            return await self._groups[number]
        finally:
            del self._groups[number]

    async def cancel(self, number: int) -> None:
        """Give up a group that the driver no longer waits for."""
        if number in self._groups:
            self._groups[number].cancel()

    async def pause(self) -> None:
        await self._loop.pause()

    async def close(self) -> None:
        await self._reward.close()


class ActorAgentLoop(AgentLoop):
    """The driver's end: gives each group to the actor that has the fewest, and answers for the engine.

    A group whose actor dies fails with that reason and is retried like any other failed group.
    """

    def __init__(self, engine: InferenceEngine, waits: Waits, note: Callable[[str], None]) -> None:
        self._engine, self._waits, self._note = engine, waits, note
        self._groups: dict[Supervised, int] = {}  # groups under way, by actor
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def actors(self) -> list[Supervised]:
        return list(self._groups)

    def add(self, actor: Supervised) -> None:
        self._groups[actor] = 0

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        actor = min(
            self._groups,
            key=lambda a: (a.given_up is not None, a.worker is None, self._groups[a]),
        )
        self._groups[actor] += 1
        try:
            if actor.worker is None:
                await actor.ready()
            worker = actor.worker
            if worker is None:
                raise WorkerDied(f"{actor.name}: it is being started again")
            number = next(self._numbers)
            try:
                # no responder: the actor mostly waits for an engine, whose own wait is watched
                with self._waits.wait(actor.name, WaitKind.GENERATE, "a group of an agent"):
                    group: list[Rollout] = await worker.call(
                        "generate_group", number, rollouts, enable_partial_rollout
                    )
                    return group
            except asyncio.CancelledError:
                self._start(_unless_dead(worker.call("cancel", number)))
                raise
        finally:
            self._groups[actor] -= 1

    async def pause(self) -> None:
        living = [actor.worker for actor in self._groups if actor.worker is not None]
        await asyncio.gather(*(_unless_dead(worker.call("pause")) for worker in living))

    def serve(self, worker: Worker) -> None:
        """Answer the questions of this actor until it ends."""
        self._start(self._relay(worker))

    async def _relay(self, worker: Worker) -> None:
        """Waits for: questions of the actor. Ends with the actor, and then asks the engines no more."""
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                for question in await worker.call("take_questions"):
                    task = asyncio.create_task(self._answer(worker, question))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
        except WorkerDied:
            return  # supervision starts the next one
        except RunError as error:  # no group of this actor could ever end
            self._note(f"{worker.name}: its requests cannot be taken: {error}")
            await worker.kill()
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, worker: Worker, question: Question) -> None:
        error, result = None, None
        try:
            result = await getattr(self._engine, question.method)(question.argument)
        except Exception as fault:  # the loop in the actor gets it, as it would beside the producer
            error = portable_error(worker.name, fault)
        await _unless_dead(worker.call("answer", question.number, error, result))

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close the rewards in the actors, then end the actors."""
        for actor in self._groups:
            if actor.worker is not None:
                # whatever a user's reward raises here, its actor is ended below
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await actor.worker.call("close")
        await asyncio.gather(*(actor.close() for actor in self._groups))
        await end_all(self._tasks)


async def _unless_dead(call: Any) -> None:
    """Wait for a call whose answer nobody needs if the actor has died."""
    with contextlib.suppress(WorkerDied):
        await call
