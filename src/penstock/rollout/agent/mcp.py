"""Tools of MCP servers: a small client of the Model Context Protocol, over a process's pipes or HTTP.

A server of the agent `tools` is started, or its session opened, for each rollout, and ended with it; a
process also ends with the driver, however that ends. Knows tools only: no prompts, resources or sampling.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.config.secrets import from_environment
from penstock.errors import RunError, UserError
from penstock.rollout.agent.process import Process

PROTOCOL = "2025-06-18"
_POLICIES = ("fail", "retry", "rebuild")
_KEYS = ("command", "url", "token_variable", "unknown")
_START_TIMEOUT_S = 60.0
_METHOD_NOT_FOUND = -32601


class ServerFault(RunError):
    """A server died or broke the protocol: the rollout fails and is retried, the policy is told nothing."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerConfig:
    """One table of the option `mcp`."""

    command: tuple[str, ...] = ()
    url: str = ""
    token_variable: str = ""  # environment variable with the bearer token of a URL
    unknown: str = "fail"  # what happens after a crash to a call that was only begun

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)


def read_servers(where: str, given: Any) -> list[ServerConfig]:
    """Check the option `mcp`: a list of tables, each with a command line or a URL."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise UserError(
            f'{where}: got {given!r}, allowed: [{{ command = ["python", "server.py"] }}]'
        )
    for one in given:
        for key in one:
            if key not in _KEYS:
                raise UserError(f"{where}: got {key!r}, allowed: {', '.join(_KEYS)}")
        command, url = one.get("command", []), one.get("url", "")
        words = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if not words or not isinstance(url, str) or bool(command) == bool(url):
            raise UserError(f"{where}: got {one!r}, allowed: a command, a list of words, or a url")
        if url and not url.startswith(("http://", "https://")):
            raise UserError(f"{where}.url: got {url!r}, allowed: http:// or https://")
        if (variable := one.get("token_variable", "")) and not url:
            raise UserError(f"{where}.token_variable: got {variable!r}, allowed: only with a url")
        from_environment(f"{where}.token_variable", str(variable))
        if one.get("unknown", "fail") not in _POLICIES:
            raise UserError(
                f"{where}.unknown: got {one['unknown']!r}, allowed: {', '.join(_POLICIES)}"
            )
    return [ServerConfig(**{**one, "command": tuple(one.get("command", ()))}) for one in given]


class Transport(Protocol):
    """Carries JSON-RPC messages to one server."""

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""

    async def tell(self, message: dict[str, Any]) -> None:
        """Send a notification."""

    def agree(self, version: str) -> None:
        """Take the version of the protocol that the server speaks."""

    async def close(self) -> None: ...


class Pipes:
    """A server that is a process: one JSON line per message."""

    def __init__(self, process: Process, name: str) -> None:
        self._process, self._name = process, name
        self._asking = asyncio.Lock()

    @classmethod
    async def start(cls, config: ServerConfig) -> Pipes:
        return cls(await Process.start(sys.executable, ("exec", *config.command)), config.name)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._asking:
            await self.tell(message)
            while True:
                line = await self._process.read_line()
                if line is None:
                    raise ServerFault(
                        f"MCP server {self._name}: it ended: {self._process.last_words()}"
                    )
                told = _parsed(line)
                if told.get("id") == message["id"] and "method" not in told:
                    return told
                if "method" in told and "id" in told:
                    await self.tell(_reply(told))

    async def tell(self, message: dict[str, Any]) -> None:
        await self._process.write_line(json.dumps(message))

    def agree(self, version: str) -> None: ...

    async def close(self) -> None:
        await self._process.kill()


class Http:
    """A server behind a URL: one POST per message, answered by JSON or a stream of events."""

    def __init__(self, config: ServerConfig, timeout_s: float) -> None:
        self._url, self._timeout_s = config.url, timeout_s
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        if config.token_variable:
            token = from_environment("mcp.token_variable", config.token_variable)
            self._headers["Authorization"] = f"Bearer {token}"

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        for told in await asyncio.to_thread(self._post, message):
            if told.get("id") == message["id"] and "method" not in told:
                return told
        raise ServerFault(f"MCP server {self._url}: it gave no answer to {message['method']}")

    async def tell(self, message: dict[str, Any]) -> None:
        await asyncio.to_thread(self._post, message)

    def _post(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        request = urllib.request.Request(self._url, json.dumps(message).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                if session := answer.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                if "text/event-stream" in answer.headers.get("Content-Type", ""):
                    return list(_events(answer, message.get("id")))
                return [_parsed(answer.read())]
        except (OSError, urllib.error.URLError) as error:
            raise ServerFault(f"MCP server {self._url}: {error}") from error

    def agree(self, version: str) -> None:
        self._headers["MCP-Protocol-Version"] = version

    async def close(self) -> None:
        """Say that the session is over; a server need not know that."""
        if "Mcp-Session-Id" in self._headers:
            await asyncio.to_thread(self._delete)

    def _delete(self) -> None:
        request = urllib.request.Request(self._url, headers=self._headers, method="DELETE")
        try:
            urllib.request.urlopen(request, timeout=self._timeout_s).close()
        except OSError:
            return  # it refuses, or is gone: the rollout has ended anyway


def _events(stream: Any, wanted: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream of events, up to the answer that is wanted."""
    data: list[bytes] = []
    for line in stream:
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line.strip() and data:
            told = _parsed(b"\n".join(data))
            data = []
            yield told
            if told.get("id") == wanted:
                return


def _parsed(text: bytes | str) -> dict[str, Any]:
    """Return a message; an empty one for what is no message, such as a line that a server prints."""
    try:
        told = json.loads(text or b"{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _reply(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request of the server: a ping; nothing else is offered to it."""
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**answer, "result": {}}
    return {**answer, "error": {"code": _METHOD_NOT_FOUND, "message": "not offered"}}


class Server:
    """A session with one server."""

    def __init__(self, config: ServerConfig, transport: Transport) -> None:
        self._config, self._transport = config, transport
        self._numbers = itertools.count(1)

    async def begin(self) -> None:
        """Agree on the protocol."""
        client = {"name": "penstock", "version": "1"}
        given = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        agreed = await self._ask("initialize", given)
        self._transport.agree(str(agreed.get("protocolVersion", PROTOCOL)))
        await self._transport.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the server as it describes them."""
        tools: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            page = await self._ask("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}

    def tool(self, name: str) -> Callable[..., Any]:
        """Return a tool as a function; `idempotency_key` goes along as metadata."""

        async def call(idempotency_key: str, **arguments: Any) -> str:
            key = {"idempotencyKey": idempotency_key}
            given = {"name": name, "arguments": arguments, "_meta": key}
            return _text(await self._ask("tools/call", given))

        return call

    async def _ask(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        request = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": given}
        told = await self._transport.ask(request)
        if "error" in told:
            raise ToolRefused(str(told["error"].get("message", told["error"])))
        return dict(told.get("result") or {})


class ToolRefused(Exception):
    """The server answers a call with an error: the policy is told."""


def _text(result: Mapping[str, Any]) -> str:
    """Return what the policy gets for a result."""
    parts = [
        part["text"] if part.get("type") == "text" else json.dumps(part, ensure_ascii=False)
        for part in result.get("content", ())
    ]
    text = "\n".join(parts)
    if result.get("isError"):
        raise ToolRefused(text)
    return text


@dataclass(slots=True, frozen=True)
class ServerTools:
    """The tools of all servers of a rollout."""

    functions: dict[str, Callable[..., Any]]
    schemas: list[dict[str, Any]]
    unknown: dict[str, str]  # by tool: what happens to a call that was only begun


@asynccontextmanager
async def open_servers(
    configs: Sequence[ServerConfig], timeout_s: float
) -> AsyncIterator[ServerTools]:
    """Start the servers, and end them with the block."""
    found = ServerTools({}, [], {})
    async with AsyncExitStack() as closing:
        for config in configs:
            transport: Transport = (
                Http(config, timeout_s) if config.url else await Pipes.start(config)
            )
            closing.push_async_callback(transport.close)
            server = Server(config, transport)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await server.begin()
                    tools = await server.list_tools()
            except (TimeoutError, ToolRefused) as error:
                raise ServerFault(
                    f"MCP server {config.name}: it does not start: {error}"
                ) from error
            for tool in tools:
                _add(found, config, server, tool)
        yield found


def _add(found: ServerTools, config: ServerConfig, server: Server, tool: Mapping[str, Any]) -> None:
    name = str(tool["name"])
    if name in found.functions:
        raise ServerFault(f"MCP server {config.name}: got the tool {name}, which is there already")
    function = {
        "name": name,
        "description": tool.get("description", ""),
        "parameters": tool.get("inputSchema") or {"type": "object", "properties": {}},
    }
    found.functions[name] = server.tool(name)
    found.schemas.append({"type": "function", "function": function})
    found.unknown[name] = config.unknown
