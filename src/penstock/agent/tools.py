"""The agent `tools`: the policy calls Python functions, or the methods of an environment, until it answers.

An environment is a class as TRL takes it: `reset(**row)` may return text for the last user message, every
other public method is a tool, `get_reward()` ends the rollout. A tool that raises tells the policy so.
Functions are called at most once per call (docs/agents.md); an environment is rebuilt after a crash.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from penstock import plugins
from penstock.agent.session import ContextOverflow, Model, TurnsExceeded
from penstock.agent.task import Task
from penstock.errors import RunError, UserError

_NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
OPTIONS = ("env", "functions")


def make(where: str, options: Mapping[str, Any]) -> Callable[[Task, Model], Awaitable[Any]]:
    """Return the agent's function for `env = "file.py:Class"` or `functions = ["file.py:name", ...]`."""
    env, functions = options.get("env"), options.get("functions")
    if bool(env) == bool(functions) or not isinstance(functions or [], list):
        raise UserError(
            f"{where}: got env={env!r} and functions={functions!r}, allowed: one of "
            '`env = "file.py:Class"` and `functions = ["file.py:name"]`'
        )
    if functions:
        loaded = [plugins.load(f"{where}.functions", name, {}) for name in functions]
        tools = {function.__name__: function for function in loaded}
        schemas = schemas_of(f"{where}.functions", loaded)

        async def call_functions(task: Task, model: Model) -> Any:
            await converse(model, list(task.messages), tools, schemas, unknown="fail")

        return call_functions
    kind = plugins.load(f"{where}.env", str(env), {})
    schemas = schemas_of(f"{where}.env", list(tools_of(kind).values()))

    async def use_environment(task: Task, model: Model) -> Any:
        made = kind()
        messages = list(task.messages)
        told = await _finish(_call_reset(made, task, model.seed))
        if told:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{told}"}
        try:
            await converse(model, messages, tools_of(made), schemas, unknown="rebuild")
            reward = getattr(made, "get_reward", None)
            return None if reward is None else await _finish(reward())
        finally:
            if hasattr(made, "close"):
                await _finish(made.close())

    return use_environment


def tools_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an environment, by name."""
    found = inspect.getmembers(environment, callable)
    return {n: f for n, f in found if not n.startswith("_") and n not in _NOT_TOOLS}


def schemas_of(where: str, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas of typed functions with Google docstrings."""
    from transformers.utils import get_json_schema

    if not functions:
        raise UserError(f"{where}: got no tool, allowed: at least one public method")
    try:
        return [get_json_schema(_without_self(function)) for function in functions]
    except (
        Exception
    ) as error:  # transformers raises several kinds for a docstring that it cannot read
        raise UserError(
            f"{where}: got {error}, allowed: functions with types and a docstring that names every argument"
        ) from error


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a class as a function of its other parameters, for its schema."""
    signature = inspect.signature(function)
    if "self" not in signature.parameters:
        return function

    def shown() -> None: ...

    rest = [p for name, p in signature.parameters.items() if name != "self"]
    shown.__name__, shown.__doc__ = function.__name__, function.__doc__
    shown.__annotations__ = dict(function.__annotations__)
    shown.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return shown


async def converse(
    model: Model,
    messages: list[dict[str, Any]],
    tools: Mapping[str, Callable[..., Any]],
    schemas: Sequence[Mapping[str, Any]],
    *,
    unknown: str,
) -> None:
    """Let the policy call tools until it answers without a call, or a limit of the rollout is reached."""
    while True:
        try:
            said = await model.chat(messages, schemas)
        except (ContextOverflow, TurnsExceeded):
            return  # the rollout is truncated; what it reached is scored
        messages.append(said)
        calls = said.get("tool_calls") or ()
        if not calls:
            return
        for call in calls:
            result = await _result(model, call, tools, unknown)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _result(
    model: Model, call: Mapping[str, Any], tools: Mapping[str, Callable[..., Any]], unknown: str
) -> str:
    """Return what the policy gets for a call; an error of the tool is told, ours is raised."""
    name = call["function"]["name"]
    if name not in tools:
        return json.dumps({"error": f"no tool {name}; there are {', '.join(tools)}"})
    try:
        return await model.tool(call, tools[name], unknown=unknown)
    except RunError:
        raise
    except Exception as error:  # whatever the user's tool raises
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _call_reset(environment: Any, task: Task, seed: int) -> Any:
    """Call `reset` with the fields of the task that it takes."""
    reset = getattr(environment, "reset", None)
    if reset is None:
        return None
    row = {"prompt": task.messages, "gt_answer": task.gt_answer, "seed": seed, **task.extra}
    parameters = inspect.signature(reset).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        row = {name: value for name, value in row.items() if name in names}
    return reset(**row)


async def _finish(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
