"""An agent in the simulation: three model calls with two tools between them, whose effects stay outside.

The real agent loop, sessions and call trees run; only messages become ids in a simple way (`SimBridge`). A
tool's effect outlives the driver, as that of a payment would: no call of a tool may ever have it twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from penstock.rollout.agent.session import Model, Task, session_of
from penstock.store.journal import Journal
from penstock.types import ModelCall
from simulation.disk import SimWriter

TURNS = 3
AGENT = "simulation.agents:sim_agent"


class SimBridge:
    """Stands in for the chat template: one id for each message."""

    def __init__(self, chat: Any, arguments: Mapping[str, Any] | None = None) -> None: ...

    def rendered_whole(self) -> list[tuple[str, str]]:
        return []

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> np.ndarray:
        ids = [1 + crc32(json.dumps(message).encode()) % 900 for message in messages]
        return np.array(ids, dtype=np.int32)

    def suffix(self, call: ModelCall, added: Sequence[Any]) -> np.ndarray:
        return self.render(added)

    def parse(self, token_ids: np.ndarray, *_: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": str(int(token_ids.sum()))}


async def sim_agent(task: Task, model: Model) -> float:
    """Ask, act, ask, act, ask; return a reward that depends on the answers alone."""
    rollout, world = session_of(model).rollout, SimWriter.world
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]

    async def act(**arguments: Any) -> str:
        await asyncio.sleep(0.02)
        world.acted(rollout.rollout_id, rollout.seed, str(arguments["turn"]))
        await asyncio.sleep(0.02)
        return f"done {arguments['turn']}"

    for turn in range(TURNS):
        answer = await model.chat(messages)
        if turn < TURNS - 1:
            arguments = json.dumps({"turn": turn})
            call = {"id": str(turn), "function": {"name": "act", "arguments": arguments}}
            result = await model.tool(call, act)
            messages += [answer, {"role": "tool", "content": result, "tool_call_id": str(turn)}]
    return float(int(answer["content"]) % 5)


def agent_faults(journal: Journal, acted: Mapping[tuple[str, int, str], int]) -> list[str]:
    """Compare the tools in the journal with their effects; return what is broken."""
    faults = [f"tool call {key}: its effect was {n} times" for key, n in acted.items() if n > 1]
    done = journal.query("SELECT rollout_id, seed, call_id FROM tools WHERE outcome = 'done'")
    faults += [f"tool call {key}: done without its effect" for key in done if key not in acted]
    trained = journal.query(
        "SELECT r.rollout_id, (SELECT COUNT(*) FROM tools t WHERE t.rollout_id = r.rollout_id"
        " AND t.outcome = 'done' GROUP BY t.seed ORDER BY 1 DESC LIMIT 1)"
        " FROM rollouts r JOIN groups g USING (group_id) WHERE g.state = 'trained'"
        " AND EXISTS (SELECT 1 FROM calls c WHERE c.rollout_id = r.rollout_id)"
    )
    faults += [f"{name}: trained after {n} tools" for name, n in trained if n != TURNS - 1]
    return faults
