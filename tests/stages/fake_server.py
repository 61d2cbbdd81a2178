"""A small /v1/completions server over a real tiny engine, with whole or streamed answers and faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config import ModelConfig
from penstock.engine.openai.engine import OpenAIEngine, OpenAIOptions
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.types import WeightHandle
from penstock.weights.model_weights import read_folder, read_shared
from stages import tiny_policy as tiny

PIECE = 4  # tokens per chunk


class FakeServer:
    """Shows one of `faults` per completion call after the probe, then answers correctly.

    `streams`: it can stream, as most servers can; `rl`: it has vLLM's calls for RL; `penalty`: it divides the
    logits of seen tokens by it, whatever is asked, and scores prompts; `refuses`: fields that it does not know.
    """

    def __init__(
        self,
        *faults: str,
        streams: bool = True,
        rl: bool = False,
        raw_logprobs: bool = False,
        penalty: float | None = None,
        refuses: Collection[str] = (),
    ) -> None:
        self.faults, self.streams, self.rl = list(faults), streams, rl
        self.raw_logprobs, self.penalty, self.refuses = raw_logprobs, penalty, refuses
        self.bodies: list[dict[str, Any]] = []  # of completions
        self.completions = 0  # calls after the client's probe
        self.calls: list[str] = []  # calls of other paths, in order
        self._engine = TransformersEngine(
            lambda: tiny.tiny_model(0, "penstock"),
            fetch=self._read_weights,
            options=TransformersOptions(max_slots=4),
            text_of=tiny.text_of,
        )
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._number = 0
        self._probed = False
        self._release = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._stepping = asyncio.Lock()
        self._version, self._label = 0, "default"

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

    def die(self) -> None:
        """Close open connections, too."""
        self.go_away()
        self.close_connections()

    def close_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    @staticmethod
    def _read_weights(source: WeightHandle) -> Any:
        where = source.location
        if "file" in where:
            return read_shared(where["file"], where["entries"])
        return read_folder(where["folder"]).items()

    # ---- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ]
            body = json.loads(await reader.readexactly(sizes[0] if sizes else 0) or b"{}")
            path = head.split()[1]
            work = asyncio.create_task(self._answer(path, body, writer))
            gone = asyncio.create_task(reader.read())  # ends when the client disconnects
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            gone.cancel()
            await asyncio.wait([work, gone])
            if not work.cancelled() and work.exception() is not None:
                _send(writer, 500, {"error": str(work.exception())})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return _send(writer, 200, {"data": [{"id": "tiny", "max_model_len": 512}]})
        if path == "/health":
            return _send(writer, 200, {})
        if path != "/v1/completions":
            return await self._control(path, body, writer)
        self.bodies.append(body)
        if unknown := [field for field in self.refuses if field in body]:
            return _send(writer, 400, {"error": f"unknown fields {unknown}"})
        if body["logprobs"]:
            return self._score(body, writer)
        if body.get("stream") and not self.streams:
            return _send(writer, 400, {"error": "no streams here"})
        fault = ""
        if self._probed:
            self.completions += 1
            fault = self.faults.pop(0) if self.faults else ""
        self._probed = True
        if fault in ("500", "400"):
            return _send(writer, int(fault), {"error": "out of memory"})
        if body.get("stream"):
            return await self._stream(body, writer, fault)
        return await self._whole(body, writer, fault)

    async def _control(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        path, _, query = path.partition("?")
        self.calls.append(path)
        if path == "/update_weights_from_disk":
            where = {"folder": body["model_path"]}
            await self._load(body["version"], body["digest"], where)
        elif not self.rl:
            return _send(writer, 404, {"error": "no such page"})
        elif path == "/pause":
            assert "mode=keep" in query
            async with self._stepping:
                self._unpaused.clear()
        elif path == "/resume":
            self._unpaused.set()
        elif path == "/update_weights":
            assert not self._unpaused.is_set()  # a real server dies of this
            self._version += 1
            info = body["update_info"]
            await self._load(self._version, info["digest"], info)
        elif path == "/finish_weight_update":
            self._label = body["weight_version"]
        elif path == "/weight_info":
            return _send(writer, 200, {"weight_version": self._label})
        return _send(writer, 200, {"is_paused": not self._unpaused.is_set()})

    async def _load(self, version: int, digest: str, where: dict[str, Any]) -> None:
        source = WeightHandle(version=version, digest=digest, kind="given", location=where)
        await self._engine.update_weights(version, source)

    # ---- completions

    def _request(self, body: dict[str, Any]) -> GenerationRequest:
        self._number += 1
        return GenerationRequest(
            request_id=str(self._number),
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

    def _score(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Send the likeliest tokens at every place of the prompt, or as the next one is sampled."""
        if self.penalty is None:
            return _send(writer, 400, {"error": "no scores here"})
        ids = torch.tensor(body["prompt"])
        with torch.no_grad():
            logits = tiny.reference(0)(ids[None]).logits[0].float()
        if body.get("echo"):
            rows = logits[:-1].log_softmax(-1)
        else:
            logits[:, ids] = torch.where(
                logits[:, ids] > 0, logits[:, ids] / self.penalty, logits[:, ids] * self.penalty
            )
            rows = logits[-1:].log_softmax(-1)
        tops = [
            {
                str(token): float(row[token])
                for token in {*row.topk(5).indices.tolist(), int(ids[0])}
            }
            for row in rows
        ]
        logprobs = {
            "tokens": list(map(str, body["prompt"])),
            "top_logprobs": [None, *tops] if body.get("echo") else tops,
        }
        return _send(writer, 200, {"choices": [{"logprobs": logprobs}]})

    def _choice(self, made: Generation) -> dict[str, Any]:
        offset = -1.0 if self.raw_logprobs else 0.0
        return {
            "token_ids": made.token_ids.tolist(),
            "logprobs": {"token_logprobs": [float(x) + offset for x in made.logprobs]},
            "finish_reason": made.finish_reason,
        }

    async def _whole(self, body: dict[str, Any], writer: asyncio.StreamWriter, fault: str) -> None:
        choice = self._choice(await self._engine.generate(self._request(body)))
        if fault == "half":
            text = json.dumps({"choices": [choice]})
            return _send_raw(writer, 200, text[: len(text) // 2].encode())
        if fault == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            return None
        if fault == "slow":
            await self._release.wait()
        return _send(writer, 200, {"choices": [_spoiled(choice, fault)]})

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter, fault: str) -> None:
        """Send pieces of a few tokens; a fault shows in the second event, or at the end."""
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        request, tokens, ended = self._request(body), 0, False
        for number in range(1 << 20):
            piece, request, ended = await self._piece(request)
            choice = self._choice(piece) | {"finish_reason": piece.finish_reason if ended else None}
            tokens += len(piece.token_ids)
            if number and fault == "cut":
                return None  # close the connection within the stream
            if number and fault == "slow":
                await self._release.wait()
            if number and fault == "half":
                _event(writer, json.dumps({"choices": [choice]})[:20])
            elif number and fault == "error":
                _event(writer, json.dumps({"error": {"message": "out of memory", "code": 500}}))
            else:
                spoiled = _spoiled(choice, fault) if number else choice
                _event(writer, json.dumps({"choices": [spoiled]}))
            await writer.drain()
            if ended:
                break
        if fault != "no usage":
            counted = tokens + (fault == "usage")
            _event(writer, json.dumps({"choices": [], "usage": {"completion_tokens": counted}}))
        if fault != "no end":
            _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return await writer.drain()

    async def _piece(
        self, request: GenerationRequest
    ) -> tuple[Generation, GenerationRequest, bool]:
        """Return the next few tokens, the request that continues after them, and if it is done."""
        sampling, made = request.sampling, len(request.response_ids)
        most = sampling.max_tokens if sampling.stop else min(sampling.max_tokens, made + PIECE)
        part = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        while True:
            await self._unpaused.wait()
            async with self._stepping:
                if self._unpaused.is_set():
                    piece = await self._engine.generate(replace(request, sampling=part))
                    break
        ids = np.concatenate([request.response_ids, piece.token_ids])
        ended = piece.finish_reason != "length" or len(ids) >= sampling.max_tokens
        return piece, replace(request, response_ids=ids), ended


def _spoiled(choice: dict[str, Any], fault: str) -> dict[str, Any]:
    if fault == "counts":
        return choice | {"token_ids": choice["token_ids"][:-1]}
    if fault == "no ids":
        return {key: value for key, value in choice.items() if key != "token_ids"}
    if fault == "too many":
        return choice | {
            "token_ids": choice["token_ids"] * 300,
            "logprobs": {"token_logprobs": choice["logprobs"]["token_logprobs"] * 300},
        }
    if fault == "no reason":
        return choice | {"finish_reason": None}
    return choice


def _event(writer: asyncio.StreamWriter, text: str) -> None:
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    _send_raw(writer, status, json.dumps(body).encode())


def _send_raw(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


class ServedEngine(OpenAIEngine):
    """An openai engine that starts its own fake server."""

    def __init__(
        self,
        folder: Path,
        *faults: str,
        streams: bool = True,
        rl: bool = False,
        raw_logprobs: bool = False,
        penalty: float | None = None,
        refuses: Collection[str] = (),
        model: ModelConfig | None = None,
        **options: object,
    ) -> None:
        self._served_model = model
        self._new_fake = lambda: FakeServer(
            *faults,
            streams=streams,
            rl=rl,
            raw_logprobs=raw_logprobs,
            penalty=penalty,
            refuses=refuses,
        )
        self.fake: FakeServer | None = None
        reload = {} if rl else {
            "reload_path": "/update_weights_from_disk", "weights_folder": str(folder)
        }  # fmt: skip
        self._make = lambda url: OpenAIOptions(urls=(url,), backoff_s=0.0, **reload, **options)

    async def start(self) -> None:
        if self.fake is not None:
            await self.fake.close()
        self.fake = self._new_fake()
        await self.fake.start()
        super().__init__(self._make(self.fake.url), fetch=tiny.fetch, model=self._served_model)
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.fake.close()
