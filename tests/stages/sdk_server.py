"""A server written with the MCP SDK: `python sdk_server.py` over its pipes, or with a PORT over HTTP.

Over HTTP it wants the bearer token "secret" and ends itself when its tool `die` is called.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import uvicorn
from mcp.server import MCPServer
from starlette.responses import PlainTextResponse

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def die() -> None:
    """End the server."""
    print("no more", file=sys.stderr, flush=True)
    os._exit(3)


def with_token(app: Any) -> Any:
    """Refuse requests without the token."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != b"Bearer secret":
            await PlainTextResponse("wrong token", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvicorn.run(with_token(server.streamable_http_app()), port=int(sys.argv[1]))
    else:
        server.run()
