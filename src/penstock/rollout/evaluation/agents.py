"""Evaluation of an agent: every problem is a rollout of it, and the tree of its calls is kept.

Nothing is journalled: an evaluation that is interrupted begins again. A rollout that fails is made
again a few times; what still fails counts as a wrong answer and as a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import EngineError
from penstock.rollout.agent_loop import AgentLoop
from penstock.types import ModelCall, Rollout, Status

TRIES = 3  # of a rollout that fails
_MOST_AT_ONCE = 256  # rollouts


class KeptCalls:
    """Keeps the model calls of rollouts, as a journal would; tool calls are not recorded."""

    def __init__(self) -> None:
        self.of: dict[str, list[ModelCall]] = {}  # by rollout

    async def record_call(self, rollout: Rollout, call: ModelCall) -> None:
        self.of.setdefault(rollout.rollout_id, []).append(call)

    async def begin_tool(self, rollout: Rollout, call_id: str, name: str) -> None: ...

    async def end_tool(self, rollout: Rollout, call_id: str, outcome: str, result: str) -> None: ...


MakeAgent = Callable[..., AgentLoop]  # of an engine, and a recorder that keeps the calls


class WatchedEngine:
    """The engine of an evaluation as an agent uses it; remembers that it died."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.fault: EngineError | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        try:
            made: list[Generation] = await self._engine.generate_many(requests)
        except EngineError as error:
            self.fault = error
            raise
        return made

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)


async def play(make: MakeAgent, engine: Any, groups: Sequence[list[Rollout]]) -> KeptCalls:
    """Make every rollout; each ends COMPLETED with its score, or FAILED. Raise if the engine died."""
    watched, calls = WatchedEngine(engine), KeptCalls()
    agent = make(engine=watched, recorder=calls)
    size = max(len(group) for group in groups)
    places = asyncio.Semaphore(max(1, _MOST_AT_ONCE // size))

    async def one(group: list[Rollout]) -> None:
        async with places:
            await _play_group(agent, watched, calls, group)

    try:
        async with asyncio.TaskGroup() as tasks:
            _ = [tasks.create_task(one(group)) for group in groups]
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    finally:
        close = getattr(agent, "close", None)
        if close is not None:
            await close()
    return calls


async def _play_group(
    agent: AgentLoop, engine: WatchedEngine, calls: KeptCalls, group: list[Rollout]
) -> None:
    for _ in range(TRIES):
        for rollout in group:
            if rollout.status is Status.FAILED:
                calls.of.pop(rollout.rollout_id, None)
                rollout.restart()
        await agent.generate_group(group)
        if engine.fault is not None:
            raise engine.fault
        if all(rollout.status is Status.COMPLETED for rollout in group):
            return
    for rollout in group:
        if rollout.status is not Status.COMPLETED and rollout.status is not Status.FAILED:
            rollout.fail(f"the agent loop left it {rollout.status}")


def call_line(call: ModelCall) -> dict[str, Any]:
    """Return a call as the file of samples has it."""
    return {
        "number": call.number,
        "parent": call.parent,
        "messages": list(call.messages),
        "answer": call.answer,
        "finish_reason": call.finish_reason,
        "tokens": len(call.token_ids),
    }
