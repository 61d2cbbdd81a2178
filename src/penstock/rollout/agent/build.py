"""Makes the agent loop that a task names: a class with `generate_group`, a function, or a command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import SamplingConfig, TaskConfig, TaskDataConfig, plugins
from penstock.config.plugins import check_name
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import gives_own_reward
from penstock.engine.protocol import InferenceEngine
from penstock.errors import UserError
from penstock.reward import build_reward
from penstock.reward.protocol import Reward
from penstock.rollout.agent import AGENTS, AgentLoop
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.check import AgentCheck, CheckResult, NoReward
from penstock.rollout.agent.demonstration import Demonstrations
from penstock.rollout.agent.function import (
    AgentOptions,
    FunctionAgent,
    FunctionPool,
    InterruptedCalls,
    check_function,
    read_options,
)
from penstock.rollout.agent.process import Command, CommandOptions, FunctionOptions, Pool
from penstock.rollout.agent.session import Function, Recorder
from penstock.types import Prompt

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint


def check_agent(where: str, task: TaskDataConfig, sampling: SamplingConfig) -> None:
    """Raise a UserError for the first thing that the task's agent cannot use."""
    check_name(f"{where}.agent", task.agent, AGENTS)
    if loop_class(where, task) is not None:
        return
    if isinstance(task, TaskConfig) and task.agent_actors:
        raise UserError(
            f"{where}.agent_actors: got {task.agent_actors} with the agent {task.agent!r}, which runs in "
            "processes of its own, allowed: 0, or an agent that is the class of an agent loop"
        )
    if sampling.min_tokens:
        raise UserError(
            f"{where}: sampling.min_tokens got {sampling.min_tokens} with an agent, allowed: 0"
        )
    _function(where, task)
    read_options(f"{where}.agent_options", AgentOptions, task.agent_options)
    if not gives_own_reward(task) and build_reward(task.rewards, max_tokens=1).needs_group:
        raise UserError(
            f"{where}.rewards: got a reward that compares the rollouts of a group, allowed with an "
            "agent: rewards of one rollout"
        )


def loop_class(where: str, task: TaskDataConfig) -> Any:
    """The class of an agent loop, if the task names one."""
    if task.agent_options.get("python") or task.agent == "command":
        return None  # nothing of it is imported here
    agent = plugins.load(f"{where}.agent", task.agent, AGENTS)
    return agent if inspect.isclass(agent) else None


def build_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    *,
    engine: InferenceEngine,
    reward: Reward,
    chat: ChatTemplate,
    recorder: Recorder,
    endpoint: Endpoint | None,
    positions: int | None,
    note: Callable[[str], None] = lambda text: None,
    interrupted: InterruptedCalls | None = None,
) -> AgentLoop:
    """The task's agent loop; `positions` is the model's context, if it is known."""
    if task.demonstrates:
        return Demonstrations(
            chat,
            system_prompt=task.system_prompt,
            arguments=task.chat_template_kwargs,
            max_tokens=sampling.max_tokens,
        )
    if loop_class(where, task) is not None:
        return build_loop(where, task, sampling, engine=engine, reward=reward, decode=chat.decode)
    bridge = Bridge(chat, task.chat_template_kwargs)
    for turns, reason in bridge.rendered_whole():
        note(f"note: {where}: {turns}: {reason}")
    make = _function_agent(
        where, task, sampling, bridge=bridge, reward=reward, endpoint=endpoint, positions=positions
    )
    return make(engine=engine, decode=chat.decode, recorder=recorder, interrupted=interrupted)


def _function_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    *,
    bridge: Bridge,
    reward: Reward,
    endpoint: Endpoint | None,
    positions: int | None,
) -> partial[FunctionAgent]:
    """What makes the loop of a task's function for an engine and a recorder."""
    function, options = _function(where, task)
    return partial(
        FunctionAgent,
        function,
        sampling=sampling,
        bridge=bridge,
        settings=read_options(f"{where}.agent_options", AgentOptions, task.agent_options),
        max_context=task.max_prompt_tokens,
        max_positions=positions or 1 << 30,
        endpoint=endpoint,
        reward=None if gives_own_reward(task) else reward,
        options=options,
        system_prompt=task.system_prompt,
    )


def build_loop(
    where: str, task: TaskDataConfig, sampling: SamplingConfig, **parts: Any
) -> AgentLoop:
    """The agent loop of a task that names a class; `parts`: its engine, reward and decode."""
    loop: AgentLoop = loop_class(where, task)(sampling=sampling, **parts, **task.agent_options)
    return loop


async def try_agent(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    chat: ChatTemplate,
    prompt: Prompt,
    positions: int | None,
) -> list[CheckResult]:
    """Check the task's agent against a made-up policy (`check.py`)."""
    if loop_class(where, task) is not None:
        raise UserError(
            f"{where}.agent: got {task.agent!r}, allowed: a function, tools, gym, command"
        )
    from penstock.rollout.agent.endpoint import Endpoint  # lazily: most runs serve no agents

    endpoint, bridge = Endpoint(), Bridge(chat, task.chat_template_kwargs)
    make = _function_agent(
        where,
        task,
        sampling,
        bridge=bridge,
        reward=NoReward(),
        endpoint=endpoint,
        positions=positions,
    )
    await endpoint.start()
    try:
        return await AgentCheck(make, chat=chat, bridge=bridge, prompt=prompt).run()
    finally:
        await endpoint.close()


def _function(where: str, task: TaskDataConfig) -> tuple[Function | FunctionPool, dict[str, Any]]:
    """The agent's function, and the options that it is called with."""
    options, key = task.agent_options, f"{where}.agent_options"
    if task.agent == "command":
        command = read_options(key, CommandOptions, options)
        return Command(command.command, command.processes), {}
    if task.agent in ("tools", "gym"):
        return plugins.load(f"{where}.agent", task.agent, AGENTS)(key, options), {}
    settings = read_options(key, FunctionOptions, options)
    arguments = dict(settings.model_extra or {})
    if settings.python:
        return Pool(task.agent, settings.processes, settings.python), arguments
    function = plugins.load(f"{where}.agent", task.agent, AGENTS)
    check_function(f"{where}.agent", function, arguments)
    if inspect.iscoroutinefunction(function) and "processes" not in options:
        return function, arguments
    return Pool(task.agent, settings.processes), arguments
