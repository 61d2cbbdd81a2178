"""Makes the agent loop that a task names: a class with `generate_group`, a function, or a command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.config import SamplingConfig, TaskConfig, TaskDataConfig, plugins
from penstock.config.plugins import check_name
from penstock.data.chat import ChatTemplate
from penstock.data.dataset import gives_own_reward
from penstock.engine.protocol import InferenceEngine
from penstock.errors import UserError
from penstock.reward import build_reward
from penstock.reward.protocol import Reward
from penstock.rollout.agent import AGENTS, AgentLoop, gym, tools
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.check import AgentCheck, CheckResult
from penstock.rollout.agent.function import (
    OWN_OPTIONS,
    AgentSettings,
    FunctionAgent,
    Interrupted,
    Placed,
    check_function,
)
from penstock.rollout.agent.process import Command, Pool, read_command, read_python, read_size
from penstock.rollout.agent.session import Function, Limits, Recorder
from penstock.types import Prompt

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint

_MADE: dict[str, tuple[str, ...]] = {"tools": tools.OPTIONS, "gym": gym.OPTIONS}  # own options
_OUTSIDE = ("python", "processes")  # options of a function that runs in processes of its own


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
    AgentSettings.read(f"{where}.agent_options", task.agent_options, Limits())
    if not gives_own_reward(task) and build_reward(task.rewards, max_tokens=1).needs_group:
        raise UserError(
            f"{where}.rewards: got a reward that compares the rollouts of a group, allowed with an "
            "agent: rewards of one rollout"
        )


def loop_class(where: str, task: TaskDataConfig) -> Any:
    """Return the class of an agent loop, if the task names one."""
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
    note: Callable[[str], None],
    interrupted: Interrupted | None = None,
) -> AgentLoop:
    """Return the task's agent loop; `positions` is the model's context, if it is known."""
    if loop_class(where, task) is not None:
        return build_loop(where, task, sampling, engine=engine, reward=reward, decode=chat.decode)
    bridge = Bridge(chat, task.chat_template_kwargs)
    for turns, reason in bridge.rendered_whole():
        note(f"note: {where}: {turns}: {reason}")
    function, options = _function(where, task)
    return FunctionAgent(
        function,
        engine=engine,
        sampling=sampling,
        bridge=bridge,
        settings=_settings(where, task, positions),
        decode=chat.decode,
        recorder=recorder,
        endpoint=endpoint,
        reward=None if gives_own_reward(task) else reward,
        options=options,
        system_prompt=task.system_prompt,
        interrupted=interrupted,
    )


def agent_maker(
    where: str,
    task: TaskDataConfig,
    sampling: SamplingConfig,
    *,
    reward: Reward,
    chat: ChatTemplate,
    endpoint: Endpoint | None,
    positions: int | None,
) -> Callable[[InferenceEngine, Recorder], AgentLoop] | None:
    """Return what makes an evaluation's agent for an engine; None: its prompts are asked directly."""
    if task.agent == "single_turn":
        return None

    def make(engine: InferenceEngine, recorder: Recorder) -> AgentLoop:
        return build_agent(
            where,
            task,
            sampling,
            engine=engine,
            reward=reward,
            chat=chat,
            recorder=recorder,
            endpoint=endpoint,
            positions=positions,
            note=lambda text: None,  # it says how turns are trained
        )

    return make


def build_loop(
    where: str, task: TaskDataConfig, sampling: SamplingConfig, **parts: Any
) -> AgentLoop:
    """Return the agent loop of a task that names a class; `parts`: its engine, reward and decode."""
    made: AgentLoop = loop_class(where, task)(sampling=sampling, **parts, **task.agent_options)
    return made


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
    function, options = _function(where, task)
    from penstock.rollout.agent.endpoint import Endpoint  # lazily: most runs serve no agents

    endpoint = Endpoint()
    await endpoint.start()
    try:
        return await AgentCheck(
            function,
            options,
            settings=_settings(where, task, positions),
            chat=chat,
            template_arguments=task.chat_template_kwargs,
            sampling=sampling,
            prompt=prompt,
            system_prompt=task.system_prompt,
            endpoint=endpoint,
            gives_reward=gives_own_reward(task),
        ).run()
    finally:
        await endpoint.close()
        if hasattr(function, "close"):
            await function.close()


def _settings(where: str, task: TaskDataConfig, positions: int | None) -> AgentSettings:
    limits = Limits(max_context=task.max_prompt_tokens, max_positions=positions or 1 << 30)
    return AgentSettings.read(f"{where}.agent_options", task.agent_options, limits)


def _function(where: str, task: TaskDataConfig) -> tuple[Function | Placed, dict[str, Any]]:
    """Return the agent's function, and the options that it is called with."""
    options, key = task.agent_options, f"{where}.agent_options"
    if task.agent == "command":
        _refuse_others(key, options, ("command", "processes"))
        return Command(read_command(key, options), read_size(key, options)), {}
    if task.agent in _MADE:
        _refuse_others(key, options, _MADE[task.agent])
        return plugins.load(f"{where}.agent", task.agent, AGENTS)(key, options), {}
    own = {name: value for name, value in options.items() if name not in (*OWN_OPTIONS, *_OUTSIDE)}
    if options.get("python"):
        return Pool(task.agent, read_size(key, options), read_python(key, options)), own
    function = plugins.load(f"{where}.agent", task.agent, AGENTS)
    check_function(f"{where}.agent", function, own)
    if inspect.iscoroutinefunction(function) and "processes" not in options:
        return function, own
    return Pool(task.agent, read_size(key, options)), own


def _refuse_others(key: str, options: Mapping[str, Any], own: Sequence[str]) -> None:
    """Refuse an option that neither this agent nor every agent takes."""
    for name in options:
        if name not in (*own, *OWN_OPTIONS):
            raise UserError(f"{key}: got {name!r}, allowed: {', '.join((*own, *OWN_OPTIONS))}")
