"""Tools of MCP servers, through the official SDK of the Model Context Protocol (the extra `mcp`).

A server of the agent `tools` is started, or its session opened, for each rollout, and ended with it; a
process also ends with the driver, however that ends. Knows tools only: no prompts, resources or sampling.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from pydantic import Field, model_validator

from penstock.config import Section
from penstock.config.secrets import from_environment
from penstock.config.server_url import server_url
from penstock.errors import RunError
from penstock.reward.line_process import last_line
from penstock.rollout.agent.process import guarded

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
                tools.add(tool.name, function, _schema(tool), config.unknown)
        yield


def _schema(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


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
