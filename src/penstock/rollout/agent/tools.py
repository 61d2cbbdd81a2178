"""The agent `tools`: the policy calls functions, methods of an environment or MCP servers, until it answers.

An environment is a class as TRL takes it: `reset(**row)` may return text for the last user message, every
other public method is a tool, `get_reward()` ends the rollout. A tool that raises tells the policy so.
Functions are called at most once per call (docs/agents.md); an environment is rebuilt after a crash.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from pydantic import Field, model_validator

from penstock.config import plugins
from penstock.errors import RunError, UserError
from penstock.rollout.agent.function import AgentOptions, read_options
from penstock.rollout.agent.mcp import ServerConfig, Tools, open_servers
from penstock.rollout.agent.session import (
    ContextOverflow,
    Model,
    Task,
    TurnsExceeded,
    session_of,
)

_NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
_NOT_SHOWN = frozenset({"self", "idempotency_key"})  # parameters that the policy does not give


class ToolOptions(AgentOptions, extra="forbid"):
    """The options of the agent `tools`."""

    env: str = ""
    """An environment, "file.py:Class", whose methods are the tools."""
    functions: list[str] = Field(default_factory=list)
    """The tools, each "file.py:name"."""
    mcp: list[dict[str, Any]] = Field(default_factory=list)
    """Servers whose tools are added, each a `ServerConfig`."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if (self.env and self.functions) or not (self.env or self.functions or self.mcp):
            raise ValueError(
                f"got env={self.env!r} and functions={self.functions!r}, allowed: one of "
                '`env = "file.py:Class"` and `functions = ["file.py:name"]`, or `mcp`'
            )
        return self


def make(where: str, options: Mapping[str, Any]) -> Callable[[Task, Model], Awaitable[Any]]:
    """The agent's function for `env = "file.py:Class"`, `functions = [...]` and `mcp = [...]`."""
    settings = read_options(where, ToolOptions, options)
    env = settings.env
    servers = [read_options(f"{where}.mcp", ServerConfig, table) for table in settings.mcp]
    kind = plugins.load(f"{where}.env", env, {}) if env else None
    if kind is not None and not isinstance(kind, type):
        raise UserError(f"{where}.env: got {env!r}, which is no class, allowed: a class")
    loaded = [plugins.load(f"{where}.functions", name, {}) for name in settings.functions]
    plain = {function.__name__: function for function in loaded}
    schemas = schemas_of(where, tools_of(kind) if kind else plain) if kind or plain else {}

    async def use_tools(task: Task, model: Model) -> Any:
        limit, tools = session_of(model).limits.tool_timeout_s, Tools()
        async with _environment(kind) as environment:
            callables = plain if environment is None else tools_of(environment)
            for name, schema in schemas.items():
                unknown = "fail" if environment is None else "rebuild"
                tools.add(name, callables[name], schema, unknown)
            async with open_servers(servers, limit, tools):
                messages = list(task.messages)
                text = await _reset(environment, task, model.seed)
                if text:
                    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{text}"}
                await converse(model, messages, tools)
                reward = getattr(environment, "get_reward", None)
                return None if reward is None else await finished(reward())

    return use_tools


@asynccontextmanager
async def _environment(kind: Any) -> AsyncIterator[Any]:
    """Make an environment, and close it with the block; None: there is none."""
    environment: Any = kind() if kind else None
    try:
        yield environment
    finally:
        if hasattr(environment, "close"):
            await finished(environment.close())


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment, by name."""
    members = inspect.getmembers(environment, callable)
    return {n: f for n, f in members if not n.startswith("_") and n not in _NOT_TOOLS}


def schemas_of(
    where: str, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, dict[str, Any]]:
    """The JSON schemas, by name, of typed functions with Google docstrings."""
    from transformers.utils import get_json_schema

    if not functions:
        raise UserError(f"{where}: got no tool, allowed: at least one public method")
    try:
        return {name: get_json_schema(_as_shown(function)) for name, function in functions.items()}
    except Exception as error:  # transformers raises several kinds for a docstring it cannot read
        raise UserError(
            f"{where}: got {error}, allowed: functions with types and a docstring that names every argument"
        ) from error


def _as_shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the parameters that the policy gives, for its schema."""
    signature = inspect.signature(function)
    if not _NOT_SHOWN & signature.parameters.keys():
        return function

    def stub() -> None: ...

    rest = [p for name, p in signature.parameters.items() if name not in _NOT_SHOWN]
    stub.__name__, stub.__doc__ = function.__name__, function.__doc__
    stub.__annotations__ = {
        name: kind for name, kind in function.__annotations__.items() if name not in _NOT_SHOWN
    }
    stub.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return stub


async def converse(
    model: Model,
    messages: list[dict[str, Any]],
    tools: Tools,
) -> None:
    """Let the policy call tools until it answers without a call, or a limit of the rollout is reached."""
    while True:
        try:
            answer = await model.chat(messages, tools.schemas)
        except (ContextOverflow, TurnsExceeded):
            return  # the rollout is truncated; what it reached is scored
        messages.append(answer)
        calls = answer.get("tool_calls") or ()
        if not calls:
            return
        for call in calls:
            result = await _result(model, call, tools)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _result(model: Model, call: Mapping[str, Any], tools: Tools) -> str:
    """The text that the policy gets for a call. It sees an error of the tool; our own errors are raised."""
    name = call["function"]["name"]
    if name not in tools.functions:
        return json.dumps({"error": f"no tool {name}; there are {', '.join(tools.functions)}"})
    try:
        return await model.tool(call, tools.functions[name], unknown=tools.unknown[name])
    except RunError:
        raise
    except Exception as error:  # whatever the user's tool raises
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


async def _reset(environment: Any, task: Task, seed: int) -> Any:
    """Call `reset`, if there is one, with the fields of the task that it takes; return its result."""
    reset = getattr(environment, "reset", None)
    if reset is None:
        return None
    row = {"prompt": task.messages, "gt_answer": task.gt_answer, "seed": seed, **task.extra}
    parameters = inspect.signature(reset).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        row = {name: value for name, value in row.items() if name in names}
    return await finished(reset(**row))


async def finished(value: Any) -> Any:
    """A value, or what it is awaited for: an environment's methods may be async."""
    return await value if inspect.isawaitable(value) else value
