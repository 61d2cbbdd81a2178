"""A small /v1/completions server over a real tiny engine, with faults on demand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from penstock.engine.loading import TransformersOptions
from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers_engine import TransformersEngine
from penstock.types import WeightHandle


class FakeServer:
    """`faults` are played one per completion call, then the server behaves; see `_fault`."""

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        self.completions = 0
        self.raw_logprobs = False
        self._engine = TransformersEngine(
            lambda: tiny.tiny_model(0, "penstock"),
            fetch=self._read_folder,
            options=TransformersOptions(max_slots=4),
            text_of=tiny.text_of,
        )
        self._server: asyncio.Server | None = None
        self._calls = 0
        self._release = asyncio.Event()

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        await self._engine.start()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._release.set()
        self._server.close()
        await self._engine.close()

    def go_away(self) -> None:
        """Refuse new connections from now on."""
        assert self._server is not None
        self._server.close()

    @staticmethod
    def _read_folder(source: WeightHandle) -> Any:
        from safetensors.torch import load_file

        return load_file(Path(source.location) / "model.safetensors").items()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = next(
                (
                    int(line.split(":")[1])
                    for line in head.splitlines()
                    if line.lower().startswith("content-length")
                ),
                0,
            )
            body = json.loads(await reader.readexactly(size) or b"{}")
            path = head.split()[1]
            work = asyncio.create_task(self._answer(path, body, writer))
            gone = asyncio.create_task(reader.read())  # ends when the client hangs up
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            gone.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return _send(writer, 200, {"data": [{"id": "tiny", "max_model_len": 512}]})
        if path == "/health":
            return _send(writer, 200, {})
        if path == "/update_weights_from_disk":
            source = WeightHandle(
                version=body["version"],
                digest=body["digest"],
                kind="folder",
                location=body["model_path"],
            )
            await self._engine.update_weights(body["version"], source)
            return _send(writer, 200, {"success": True})
        self.completions += 1
        answer = await self._complete(body)
        if self.completions > 1 and self.faults:  # the first call is the client's probe
            return await self._fault(self.faults.pop(0), answer, writer)
        return _send(writer, 200, answer)

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        request = GenerationRequest(
            request_id=str(self._calls),
            prompt_ids=np.array(body["prompt"], np.int32),
            sampling=SamplingParams(
                temperature=body["temperature"],
                top_p=body.get("top_p", 1.0),
                top_k=max(0, body.get("top_k", 0)),
                min_tokens=body.get("min_tokens", 0),
                max_tokens=body["max_tokens"],
                stop_token_ids=tuple(body.get("stop_token_ids", ())),
                stop=tuple(body.get("stop", ())),
            ),
            seed=body.get("seed", 0),
        )
        made = await self._engine.generate(request)
        offset = -1.0 if self.raw_logprobs else 0.0
        return {
            "choices": [
                {
                    "token_ids": made.token_ids.tolist(),
                    "logprobs": {"token_logprobs": [float(x) + offset for x in made.logprobs]},
                    "finish_reason": made.finish_reason,
                }
            ]
        }

    async def _fault(
        self, fault: str, answer: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        choice = answer["choices"][0]
        if fault == "500":
            return _send(writer, 500, {"error": "out of memory"})
        if fault == "400":
            return _send(writer, 400, {"error": "no such model"})
        if fault == "half":
            text = json.dumps(answer)
            return _send_raw(writer, 200, text[: len(text) // 2].encode())
        if fault == "counts":
            choice["token_ids"] = choice["token_ids"][:-1]
        if fault == "no ids":
            del choice["token_ids"]
        if fault == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            writer.close()
            return None
        if fault == "slow":
            await self._release.wait()
        return _send(writer, 200, answer)


def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    _send_raw(writer, status, json.dumps(body).encode())


def _send_raw(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
