"""An agent loop around a function, with a policy that answers by a script and no journal."""

from __future__ import annotations

from typing import Any

from penstock.agent.bridge import Bridge
from penstock.agent.function import AgentSettings, FunctionAgent
from penstock.agent.session import Limits
from penstock.config import SamplingConfig
from penstock.data.sampler import Sampler
from penstock.types import Group
from stages.chat_policy import Kept, ScriptedEngine, chat_template
from stages.rollouts import make_prompts


def make_group(size: int = 2) -> Group:
    return Sampler(make_prompts(3), task_name="t", prompt_repeat_k=size, seed=0).group_at(0)


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
        settings=AgentSettings.read("agent_options", options, Limits(max_context=200)),
        decode=chat.decode,
        recorder=recorder or Kept(),
        endpoint=endpoint,
        options=own,
        system_prompt="be good",
    )
