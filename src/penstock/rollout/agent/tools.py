"""The agent `tools`: the policy calls functions, methods of an environment or MCP servers, until it answers.

An environment is a class as TRL takes it: `reset(**row)` may return text for the last user message, every
other public method is a tool, `get_reward()` ends the rollout. A tool that raises tells the policy so.
Functions are called at most once per call (docs/agents.md); an environment is rebuilt after a crash.

MCP servers are reached through the official SDK of the Model Context Protocol (the extra `mcp`): started, or
their sessions opened, for each rollout, and ended with it; a process also ends with the driver, however that
ends. Only tools are known: no prompts, resources or sampling.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from pydantic import Field, model_validator

from penstock.config import Section, plugins
from penstock.config.secrets import from_environment
from penstock.config.server_url import server_url
from penstock.errors import RunError, UserError
from penstock.reward.line_process import last_line
from penstock.rollout.agent.function import AgentOptions, guarded, read_options
from penstock.rollout.agent.session import (
    ContextOverflow,
    Model,
    Session,
    Task,
    TurnsExceeded,
    session_of,
)

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport
    from mcp_types import CallToolResult, Tool


_START_TIMEOUT_S = 60.0


class ServerFault(RunError):
    """A server died or broke the protocol: the rollout fails and is retried, the policy is told nothing."""


class ToolRefused(Exception):
    """The server answers a call with an error: the policy is told."""


class ServerConfig(Section):
    """One table of the option `mcp`."""

    command: list[str] = Field(default_factory=list)
    url: str = ""
    token_variable: str = ""
    """Environment variable with the bearer token of a URL."""
    variables: list[str] = Field(default_factory=list)
    """Environment variables that a command gets beside PATH, HOME and the like."""
    unknown: Literal["fail", "retry", "rebuild"] = "fail"
    """What happens after a crash to a call that was only begun."""

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError(
                f"got command={self.command!r} and url={self.url!r}, allowed: a command, a list of words, or a url"
            )
        if self.url:
            server_url("url", self.url)
        if self.token_variable and not self.url:
            raise ValueError(
                f"token_variable: got {self.token_variable!r}, allowed: only with a url"
            )
        if self.variables and self.url:
            raise ValueError(f"variables: got {self.variables!r}, allowed: only with a command")
        from_environment("token_variable", self.token_variable)
        for variable in self.variables:
            from_environment("variables", variable)
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(
                "the package mcp is not installed; install it with: pip install 'penstock[mcp]'"
            )
        return self


@dataclass(slots=True, frozen=True)
class Tools:
    """What a policy may call in a rollout."""

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)  # what a call that was only begun gets

    def add(
        self, name: str, function: Callable[..., Any], schema: dict[str, Any], unknown: str
    ) -> None:
        if name in self.functions:
            raise RunError(f"got two tools with the name {name}, allowed: one")
        self.functions[name], self.unknown[name] = function, unknown
        self.schemas.append(schema)


@asynccontextmanager
async def open_servers(
    configs: Sequence[ServerConfig], timeout_s: float, tools: Tools
) -> AsyncIterator[None]:
    """Start the servers, add their tools, and end the servers with the block."""
    async with AsyncExitStack() as stack:
        for config in configs:
            server = await stack.enter_async_context(_open(config, timeout_s))
            for tool in server.tools:
                function = server.function(tool.name)
                described = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schema = {"type": "function", "function": described}
                tools.add(tool.name, function, schema, config.unknown)
        yield


@asynccontextmanager
async def _open(config: ServerConfig, timeout_s: float) -> AsyncIterator[Server]:
    """Begin a session with a server, and end it with the block."""
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # a server may print what is no message
    with tempfile.TemporaryFile("w+") as errors:
        server, stack = Server(config, errors), AsyncExitStack()
        try:
            await server.start(stack, timeout_s)
            yield server
        finally:
            # closed without the error of the block, which the SDK would wrap in an exception group
            try:
                await stack.aclose()
            except ExceptionGroup as error:  # a transport of the SDK failed, and ended the block
                raise server.fault(error) from error


class Server:
    """A session with one server."""

    def __init__(self, config: ServerConfig, errors: TextIO) -> None:
        self.config = config
        self.tools: list[Tool] = []
        self._errors = errors  # what a process writes to stderr
        self._client: Client

    async def start(self, stack: AsyncExitStack, timeout_s: float) -> None:
        """Begin the session, which ends with the stack, and list the tools of the server."""
        from mcp import Client, MCPError

        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                transport = await self._transport(stack, timeout_s)
                self._client = await stack.enter_async_context(Client(transport))
                page = await self._client.list_tools()
                self.tools += page.tools
                while page.next_cursor:
                    page = await self._client.list_tools(cursor=page.next_cursor)
                    self.tools += page.tools
        except TimeoutError as error:
            late = TimeoutError(f"it did not start in {_START_TIMEOUT_S:g} s")
            raise self.fault(late) from error
        except (OSError, ValueError, MCPError, ExceptionGroup) as error:
            raise self.fault(error) from error

    async def _transport(self, stack: AsyncExitStack, timeout_s: float) -> Transport:
        """The pipes of a process, or the connection to a URL; neither is begun yet."""
        from httpx2 import AsyncClient
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.stdio import get_default_environment
        from mcp.client.streamable_http import streamable_http_client

        config = self.config
        if not config.url:
            command, *words = guarded(sys.executable, "exec", *config.command)
            given = {name: os.environ[name] for name in config.variables}
            environment = get_default_environment() | given
            parameters = StdioServerParameters(command=command, args=words, env=environment)
            return stdio_client(parameters, self._errors)
        headers = {}
        if config.token_variable:
            token = from_environment("mcp.token_variable", config.token_variable)
            headers["Authorization"] = f"Bearer {token}"
        longest = 2 * timeout_s  # whoever makes a call gives it up before
        client = AsyncClient(headers=headers, timeout=longest, verify=_tls_context())
        await stack.enter_async_context(client)
        return streamable_http_client(config.url, http_client=client)

    def function(self, name: str) -> Callable[..., Any]:
        """A tool as a function; `idempotency_key` goes along as metadata."""
        from mcp import MCPError

        async def call(idempotency_key: str, **arguments: Any) -> str:
            key: Any = {"idempotencyKey": idempotency_key}
            try:
                return _text(await self._client.call_tool(name, arguments, meta=key))
            except MCPError as error:
                if _is_end(error):
                    raise self.fault(error) from error
                raise ToolRefused(error.message) from error

        return call

    def fault(self, error: BaseException) -> ServerFault:
        """Name the server and its fault: for a process that ended, what it wrote last."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = str(error) or type(error).__name__
        if self.config.command and _is_end(error):
            reason = f"it ended: {last_line(self._errors.buffer)}"
        return ServerFault(f"MCP server {self.config.name}: {reason}")


def _is_end(error: BaseException) -> bool:
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code == CONNECTION_CLOSED


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Read the certificates once: that takes tens of milliseconds, and every rollout has a client."""
    return ssl.create_default_context()


def _text(result: CallToolResult) -> str:
    """What the policy gets for a result."""
    text = "\n".join(
        part.text if part.type == "text" else part.model_dump_json(by_alias=True, exclude_none=True)
        for part in result.content
    )
    if result.is_error:
        raise ToolRefused(text)
    return text


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
        session, tools = session_of(model), Tools()
        limit = session.limits.tool_timeout_s
        async with _environment(kind, session) as environment:
            for name, schema in schemas.items():
                function = plain[name] if environment is None else getattr(environment, name)
                unknown = "fail" if environment is None else "rebuild"
                tools.add(name, function, schema, unknown)
            async with open_servers(servers, limit, tools):
                messages = list(task.messages)
                text = await _reset(environment, task, model.seed, session)
                if text:
                    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{text}"}
                await converse(model, messages, tools)
                reward = getattr(environment, "get_reward", None)
                return None if reward is None else await session.apply(reward)

    return use_tools


@asynccontextmanager
async def _environment(kind: Any, session: Session) -> AsyncIterator[Any]:
    """Make an environment, and close it with the block; None: there is none."""
    environment: Any = await session.apply(kind) if kind else None
    try:
        yield environment
    finally:
        if hasattr(environment, "close"):
            await session.apply(environment.close)


def tools_of(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment's class, by name."""
    members = inspect.getmembers(kind, callable)
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


async def _reset(environment: Any, task: Task, seed: int, session: Session) -> Any:
    """Call `reset`, if there is one, with the fields of the task that it takes; return its result."""
    reset = getattr(environment, "reset", None)
    if reset is None:
        return None
    row = {"prompt": task.messages, "gt_answer": task.gt_answer, "seed": seed, **task.extra}
    parameters = inspect.signature(reset).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        row = {name: value for name, value in row.items() if name in names}
    return await session.apply(functools.partial(reset, **row))
