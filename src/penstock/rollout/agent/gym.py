"""The agent `gym`: an environment with reset and step over text; each answer of the policy is an action.

The rewards of the steps add up. Four forms of environment are known by their methods: (observation,
reward, done) and Gymnasium's five values (GEM), SkyRL-gym (`init`, step returns a dict), TextArena
(`get_observation`), OpenEnv's clients (results with attributes). Steps are journalled; after a crash the
environment is rebuilt from its seed and the recorded actions, and every observation compared.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from penstock.config import plugins
from penstock.errors import RewardError
from penstock.reward.call_threads import CallThreads
from penstock.rollout.agent.function import AgentOptions, read_options
from penstock.rollout.agent.session import (
    ContextOverflow,
    Model,
    Task,
    TurnsExceeded,
    session_of,
)


class GymOptions(AgentOptions, extra="forbid"):
    """The options of the agent `gym`."""

    env: str
    """The environment, "file.py:Class"."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """What the class is made with, for each rollout."""


@dataclass(slots=True, frozen=True)
class Step:
    """What an environment gave for an action."""

    observation: str
    reward: float
    done: bool


def make(where: str, options: Mapping[str, Any]) -> Callable[[Task, Model], Awaitable[Any]]:
    """The agent's function for `env = "file.py:Class"`, made with `env_options` per rollout."""
    settings = read_options(where, GymOptions, options)
    kind = plugins.load(f"{where}.env", settings.env, {})

    async def play(task: Task, model: Model) -> float:
        session, messages = session_of(model), list(task.messages)
        # one for each environment, as some can be used by no other thread
        thread = CallThreads("environment", 1, session.limits.tool_timeout_s)
        apply = partial(session.apply, threads=thread)
        environment = Environment(None, apply)
        try:
            environment = Environment(await apply(partial(kind, **settings.env_options)), apply)
            messages += await environment.start(task, model.seed)
            for number in range(1 << 30):
                try:
                    answer = await model.chat(messages)
                except (ContextOverflow, TurnsExceeded):
                    return 0.0  # the rollout is truncated; the rewards of its steps stay
                step = await _journalled(model, environment, number, answer["content"])
                model.reward(step.reward)
                if step.done:
                    return 0.0
                messages += [answer, {"role": "user", "content": step.observation}]
        finally:
            try:
                await environment.close()
            finally:
                thread.close()
        raise AssertionError("a rollout has fewer turns")

    return play


async def _journalled(model: Model, environment: Environment, number: int, action: str) -> Step:
    """Make one step through the journal, as a tool call."""

    async def step(action: str) -> str:
        result = await environment.step(action)
        return json.dumps([result.observation, result.reward, result.done])

    call = {"id": f"step{number}", "function": {"name": "step", "arguments": {"action": action}}}
    return Step(*json.loads(await model.tool(call, step, unknown="rebuild")))


class Environment:
    """One environment, whatever its form; `apply` calls its methods, each for a bounded time."""

    def __init__(self, env: Any, apply: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._env, self._apply = env, apply
        self._shown = ""  # TextArena's observations repeat those before

    async def start(self, task: Task, seed: int) -> list[dict[str, Any]]:
        """Reset the environment; return the messages that the policy sees first."""
        env = self._env
        if hasattr(env, "init"):  # SkyRL-gym
            messages, _ = await self._apply(partial(env.init, task.messages))
            return list(messages)[len(task.messages) :]
        row = {"seed": seed, "num_players": 1, "gt_answer": task.gt_answer, **task.extra}
        parameters = inspect.signature(env.reset).parameters
        row = {name: value for name, value in row.items() if name in parameters}
        first = await self._apply(partial(env.reset, **row))
        if hasattr(env, "get_observation"):  # TextArena
            first = await self._new_text()
        text = _text(first[0] if isinstance(first, tuple) else first)
        return [{"role": "user", "content": text}] if text else []

    async def step(self, action: str) -> Step:
        """Give the environment an action; return what it answers."""
        env = self._env
        result = await self._apply(partial(env.step, action))
        if hasattr(env, "get_observation"):  # TextArena: rewards come at the end
            done = bool(result[0])
            rewards = await self._apply(env.close) if done else None
            if isinstance(rewards, tuple):  # with what happened in the game
                rewards = rewards[0]
            reward = rewards.get(0) if isinstance(rewards, Mapping) else rewards
            return _checked("" if done else await self._new_text(), reward, done)
        if isinstance(result, Mapping):  # SkyRL-gym
            text = "\n".join(_text(message) for message in result.get("observations") or ())
            return _checked(text, result.get("reward"), result.get("done"))
        if isinstance(result, tuple):
            observation, reward, *ends = result
            ends = ends[:2] if len(result) == 5 else ends[:1]  # terminated, truncated; or done
            return _checked(_text(observation), reward, any(ends))
        return _checked(_text(result.observation), result.reward, result.done)  # OpenEnv

    async def _new_text(self) -> str:
        """What TextArena's observation adds to the one before."""
        text = _text((await self._apply(self._env.get_observation))[1])
        new, self._shown = text.removeprefix(self._shown), text
        return new

    async def close(self) -> None:
        env = self._env
        if hasattr(env, "close") and not hasattr(env, "get_observation"):
            await self._apply(env.close)


def _checked(observation: str, reward: Any, done: Any) -> Step:
    try:
        return Step(observation, float(reward or 0.0), bool(done))
    except (TypeError, ValueError):
        raise RewardError(f"step: got the reward {reward!r}, allowed: a number") from None


def _text(observation: Any) -> str:
    """An observation as text: a string, a message, a list of either, or an object."""
    if observation is None or isinstance(observation, str):
        return observation or ""
    if isinstance(observation, Mapping):
        return str(observation.get("content", json.dumps(dict(observation))))
    if isinstance(observation, Sequence):
        return "\n".join(map(_text, observation))
    return str(getattr(observation, "text", None) or getattr(observation, "content", observation))
