"""An MCP server: `python mcp_server.py [FILE]` over its pipes; FILE gets the key of every call of `add`.

Speaks as real servers do: two pages of tools, a ping before an answer, a line that is no message.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": NUMBERS},
    {"name": "pid", "description": "Return the process id.", "inputSchema": {"type": "object"}},
    {"name": "names", "description": "List the environment.", "inputSchema": {"type": "object"}},
    {"name": "fail", "description": "Fail.", "inputSchema": {"type": "object"}},
    {"name": "die", "description": "End the server.", "inputSchema": {"type": "object"}},
]


def answer(method: str, given: dict[str, Any], note: str = "") -> dict[str, Any] | None:
    """Return the result of a request; None: there is no such method."""
    if method == "initialize":
        info = {"name": "sums", "version": "1"}
        return {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {},
            "serverInfo": info,
        }
    if method == "tools/list":
        return (
            {"tools": TOOLS[1:]} if given.get("cursor") else {"tools": TOOLS[:1], "nextCursor": "2"}
        )
    return use(given, note) if method == "tools/call" else None


def use(given: dict[str, Any], note: str) -> dict[str, Any]:
    name, arguments = given["name"], given["arguments"]
    if name == "die":
        print("no more", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "add" and note:
        with open(note, "a") as file:
            file.write(given["_meta"]["idempotencyKey"] + "\n")
    said = {
        "add": lambda: str(arguments["a"] + arguments["b"]),
        "pid": lambda: str(os.getpid()),
        "names": lambda: " ".join(sorted(os.environ)),
    }
    text = said[name]() if name in said else "it failed"
    return {"content": [{"type": "text", "text": text}], "isError": name == "fail"}


def main() -> None:
    note = sys.argv[1] if len(sys.argv) > 1 else ""
    print("starting", flush=True)  # no message
    for line in sys.stdin:
        request = json.loads(line)
        if "method" not in request or "id" not in request:
            continue  # a notification, or the client's answer to the ping
        print(json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"}), flush=True)
        assert json.loads(sys.stdin.readline())["result"] == {}
        result = answer(request["method"], request.get("params", {}), note)
        told: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if result is None:
            told["error"] = {"code": -32601, "message": "no such method"}
        else:
            told["result"] = result
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
