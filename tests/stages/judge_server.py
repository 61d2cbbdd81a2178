"""A chat completions server whose judge is a function of the messages that it gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from penstock.reward.judge import Judge, JudgeOptions

Answer = Callable[[str, dict[str, Any]], str]  # (the word of the request, the material) -> text


class JudgeServer:
    """Keeps the bodies of its requests. `answer` may raise OSError: then the connection is closed."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> JudgeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def judge(self, **options: Any) -> Judge:
        settings = {"url": self.url, "model": "m", "rubric": "Good is good.", "retries": 0}
        return Judge(JudgeOptions.model_validate(settings | options), max_tokens=64)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            int(x.split(":")[1]) for x in head.splitlines() if "content-length" in x.lower()
        )
        body = json.loads(await reader.readexactly(size))
        self.heads.append(head)
        self.bodies.append(body)
        system, user = (message["content"] for message in body["messages"])
        word = system.splitlines()[-1].split()[0]
        try:
            text = self._answer(word, json.loads(user))
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            data = json.dumps({"choices": [choice]}).encode()
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
