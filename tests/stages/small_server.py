"""A completions server process that tests can kill; its tokens show which weights it holds.

    python tests/stages/small_server.py PORT reload|rl|frozen [TOKENS]

Every token is 10 + the version loaded last; 10 means the weights of the start. With TOKENS, a stream sends
that many tokens and then stays silent. Imports only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

FIRST_TOKEN = 10


class SmallServer:
    def __init__(self, kind: str, silent_after: int) -> None:
        self._kind, self._silent_after = kind, silent_after
        self._version, self._label, self._paused = 0, "default", False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ]
            body = json.loads(await reader.readexactly(sum(sizes)) or b"{}")
            path = head.split()[1].partition("?")[0]
            if path == "/v1/completions":
                await self._stream(body, writer)
            else:
                _send(writer, self._answer(path, body))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer, or None if there is no such call."""
        if path in ("/health", "/v1/models"):
            return {"data": [{"id": "small", "max_model_len": 512}]}
        if path == "/reload" and self._kind == "reload":
            assert (Path(body["model_path"]) / "model.safetensors").exists()
            self._version = body["version"]
            return {}
        if self._kind != "rl":
            return None
        if path in ("/pause", "/resume"):
            self._paused = path == "/pause"
        elif path == "/update_weights":
            assert self._paused, "a real one dies of this"
            assert body["update_info"]["entries"]
        elif path == "/finish_weight_update":
            self._label = body["weight_version"]
            self._version = int(self._label.split("-")[0])
        elif path == "/weight_info":
            return {"weight_version": self._label}
        return {"is_paused": self._paused}

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        last = body["max_tokens"] - 1
        for number in range(body["max_tokens"]):
            if number == self._silent_after:
                await asyncio.Event().wait()
            choice = {
                "token_ids": [FIRST_TOKEN + self._version],
                "logprobs": {"token_logprobs": [0.0]},
                "finish_reason": "length" if number == last else None,
            }
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


def _send(writer: asyncio.StreamWriter, answer: dict[str, Any] | None) -> None:
    data = json.dumps(answer or {}).encode()
    status = 404 if answer is None else 200
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


async def main(port: int, kind: str, silent_after: int) -> None:
    server = await asyncio.start_server(SmallServer(kind, silent_after).serve, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int((sys.argv[3:] or ["-1"])[0])))
