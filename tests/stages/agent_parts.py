"""An agent loop around a function, with a policy that answers by a script and no journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from penstock.config import SamplingConfig
from penstock.data.sampler import Sampler
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.function import AgentOptions, FunctionAgent, read_options
from penstock.store.journal.calls import ToolResult
from penstock.types import Group, Rollout
from stages.chat_policy import TEMPLATE, Kept, ScriptedEngine, chat_template
from stages.rewards import CountingReward
from stages.rollouts import make_prompts


def make_group(size: int = 2) -> Group:
    return Sampler(make_prompts(3), task_name="t", prompt_repeat_k=size, seed=0).group_at(0)


def play(
    function: Any,
    *texts: str,
    template: str = TEMPLATE,
    interrupted: Sequence[ToolResult] | None = None,
    reward: bool = False,
    **options: Any,
) -> tuple[Rollout, Kept, list[str]]:
    """Let the function play one rollout against a policy that says the texts in turn.

    Return the rollout, what a journal would keep, and the prompts. `reward`: any answer is worth 1.
    """
    left, chat, kept = list(texts), chat_template(template), Kept()
    engine = ScriptedEngine(lambda prompt: left.pop(0))
    agent = FunctionAgent(
        function,
        engine=engine,
        sampling=SamplingConfig(max_tokens=200),
        bridge=Bridge(chat),
        settings=read_options("o", AgentOptions, options),
        max_context=4000,
        decode=chat.decode,
        recorder=kept,
        reward=CountingReward() if reward else None,
    )
    (rollout,) = rollouts = make_group(1).rollouts
    if interrupted is not None:
        agent._interrupted.tools[rollout.rollout_id, rollout.seed] = list(interrupted)

    async def main() -> None:
        await agent.generate_group(rollouts)
        await agent.close()

    asyncio.run(main())
    prompts = [chat.decode_prompt(request.prompt_ids) for request in engine.requests]
    return rollout, kept, prompts


def tool_call(name: str, **arguments: Any) -> str:
    """Return a call as a policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_agent(
    function: Any,
    engine: Any = None,
    *,
    endpoint: Any = None,
    recorder: Any = None,
    own: dict[str, Any] | None = None,
    **options: Any,
) -> FunctionAgent:
    """Return the loop; `own` are options of the function, `options` those of every agent."""
    chat = chat_template()
    return FunctionAgent(
        function,
        engine=engine or ScriptedEngine(lambda prompt: "yes"),
        sampling=SamplingConfig(max_tokens=20),
        bridge=Bridge(chat),
        settings=read_options("agent_options", AgentOptions, options),
        max_context=200,
        decode=chat.decode,
        recorder=recorder or Kept(),
        endpoint=endpoint,
        options=own,
        system_prompt="be good",
    )
