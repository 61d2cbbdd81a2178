"""Any server that speaks /v1/completions with token ids and log-probs, as an engine. Layer 1.

Several URLs: the least loaded takes a request, a rollout that goes on returns to its server. Faults are
retried elsewhere, then come back as errors. Weights go out as a safetensors folder and a reload call
where the server has one; without it the engine serves for evaluation only, and says so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.engine.completions import (
    WrongAnswer,
    completion_body,
    neutral,
    probe_body,
    read_completion,
)
from penstock.engine.http_client import HttpError, JsonClient
from penstock.engine.protocol import EngineStats, Generation, GenerationRequest, PauseMode
from penstock.errors import DigestMismatch, EngineError, UserError
from penstock.types import VersionSegment, WeightHandle

if TYPE_CHECKING:
    import torch

    from penstock.config import Config

Fetch = Callable[[WeightHandle], "Iterable[tuple[str, torch.Tensor]]"]


@dataclass(slots=True, frozen=True, kw_only=True)
class OpenAIOptions:
    """[engine.options] of the openai engine."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)
    model: str = ""  # name the server knows the model by; empty: the first it lists
    api_key_variable: str = ""  # environment variable that holds the key
    timeout_s: float = 600.0
    retries: int = 3  # further tries of one request
    backoff_s: float = 0.5  # before the second try; doubles
    max_model_len: int = 0  # most tokens of a request; 0: as the server says
    reload_path: str = ""  # e.g. /update_weights_from_disk (SGLang); empty: evaluation only
    weights_folder: str = ""  # where new weights are written; servers must see it too


class _Server:
    """One URL and what is under way there."""

    def __init__(self, client: JsonClient) -> None:
        self.client, self.outstanding, self.healthy = client, 0, True


class OpenAIEngine:
    """See `InferenceEngine`. `keep` pauses like `wait`: a server's requests cannot be held from here."""

    def __init__(self, options: OpenAIOptions, *, fetch: Fetch) -> None:
        if not options.urls:
            raise UserError("engine.options.urls: got none, allowed: at least one URL")
        key = os.environ.get(options.api_key_variable, "") if options.api_key_variable else ""
        self._options, self._fetch = options, fetch
        self._servers = [_Server(JsonClient(u, options.timeout_s, key)) for u in options.urls]
        self._model, self._longest = options.model, options.max_model_len
        self._raw_logprobs = False
        self._owner: dict[str, _Server] = {}
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._passed: set[str] = set()  # running requests that no pause holds back
        self._open = asyncio.Event()
        self._version, self._digest = 0, ""
        self._tokens, self._started = 0, False

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        given = dict(config.engine.options)
        names = tuple(OpenAIOptions.__dataclass_fields__)
        unknown = sorted(given.keys() - set(names))
        if unknown:
            raise UserError(f"engine.options: got {unknown[0]!r}, allowed: {', '.join(names)}")
        if "urls" in given:
            given["urls"] = tuple(given["urls"])
        return cls(OpenAIOptions(**given), fetch=fetch)

    async def start(self) -> None:
        """Find the model and see whether log-probs are those of the sampling distribution."""
        client = self._servers[0].client
        try:
            listed = (await client.get("/v1/models")).get("data", [])
            chosen = next((m for m in listed if not self._model or m["id"] == self._model), None)
            if chosen is None:
                raise UserError(
                    f"engine.options.model: got {self._model!r}, allowed: "
                    f"{', '.join(m['id'] for m in listed) or 'nothing is served'}"
                )
            self._model = chosen["id"]
            self._longest = self._longest or int(chosen.get("max_model_len") or 1 << 20)
            answer = await client.post("/v1/completions", probe_body(self._model))
            _, logprobs, _ = read_completion(answer, 1)
        except (HttpError, WrongAnswer, KeyError) as error:
            raise EngineError(f"engine openai: {client.base_url} is of no use: {error}") from error
        self._raw_logprobs = bool(abs(logprobs[0]) > 1e-4)
        self._open.set()
        self._started = True

    async def generate(self, request: GenerationRequest) -> Generation:
        self._check(request)
        if not self._started:
            return _ended(request, "error", "the engine is not running")
        if request.request_id in self._running:
            return _ended(request, "error", f"request {request.request_id} is running already")
        task = asyncio.create_task(self._generate(request))
        self._running[request.request_id] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by abort, pause or close; not our caller's doing
                return _ended(request, "abort")
            task.cancel()
            raise
        finally:
            self._running.pop(request.request_id, None)
            self._passed.discard(request.request_id)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        for request in requests:
            self._check(request)
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def _generate(self, request: GenerationRequest) -> Generation:
        await self._open.wait()
        self._passed.add(request.request_id)
        left = request.sampling.max_tokens - len(request.response_ids)
        if left <= 0:
            return _ended(request, "length")
        body, reason = completion_body(self._model, request), ""
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(self._options.backoff_s * 2 ** (attempt - 1))
            server, version = await self._choose(request.request_id), self._version
            try:
                server.outstanding += request.num_tokens
                answer = await server.client.post("/v1/completions", body)
                ids, logprobs, why = read_completion(answer, left)
            except (HttpError, WrongAnswer) as error:
                reason = str(error)
                server.healthy = not (isinstance(error, HttpError) and error.status == 0)
                self._owner.pop(request.request_id, None)
                if isinstance(error, HttpError) and not error.again:
                    break
                continue
            finally:
                server.outstanding -= request.num_tokens
            self._tokens += len(ids)
            return Generation(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=logprobs,
                segments=(VersionSegment(version, len(ids)),) if len(ids) else (),
                finish_reason=why,
            )
        return _ended(request, "error", reason)

    async def _choose(self, request_id: str) -> _Server:
        """The rollout's own server if it is well, else the least loaded one that answers."""
        owner = self._owner.get(request_id)
        if owner is None or not owner.healthy:
            if not any(server.healthy for server in self._servers):
                await asyncio.gather(*(self._ask_health(server) for server in self._servers))
            well = [server for server in self._servers if server.healthy] or self._servers
            owner = min(well, key=lambda server: server.outstanding)
        self._owner[request_id] = owner
        return owner

    async def _ask_health(self, server: _Server) -> None:
        try:
            await server.client.get("/health")
            server.healthy = True
        except HttpError as error:
            server.healthy = error.status != 0  # a server without this page is alive all the same

    def _check(self, request: GenerationRequest) -> None:
        name = f"request {request.request_id}"
        if not len(request.prompt_ids):
            raise UserError(f"{name}: got an empty prompt, allowed: at least 1 token")
        if self._longest and request.num_tokens > self._longest:
            raise UserError(f"{name}: got {request.num_tokens} tokens, allowed: {self._longest}")
        if self._raw_logprobs and not neutral(request.sampling):
            raise UserError(
                f"{name}: got {request.sampling}, allowed: temperature 1 without top_k and top_p, as "
                "this server gives raw log-probs (vLLM: --logprobs-mode processed_logprobs)"
            )

    async def abort(self, request_id: str) -> None:
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._open.clear()
        tasks = list(self._running.values())
        if mode == "abort":
            for task in tasks:
                task.cancel()
        else:
            tasks = [self._running[request_id] for request_id in self._passed]
        if tasks:
            await asyncio.wait(tasks)

    async def resume(self) -> None:
        self._open.set()

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        options = self._options
        if not options.reload_path or not options.weights_folder:
            raise EngineError(
                "engine openai: this server cannot be trained against, evaluation only: set "
                "engine.options.reload_path and weights_folder if it can load weights from disk"
            )
        folder = Path(options.weights_folder) / f"version-{version}"
        digest = await asyncio.to_thread(self._write, folder, source)
        body = {"model_path": str(folder), "version": version, "digest": digest}
        try:
            await asyncio.gather(
                *(server.client.post(options.reload_path, body) for server in self._servers)
            )
        except HttpError as error:
            raise EngineError(
                f"engine openai: weights {version} were not loaded: {error}"
            ) from error
        self._version, self._digest = version, digest
        return digest

    def _write(self, folder: Path, source: WeightHandle) -> str:
        """Write the weights whole or not at all; returns their digest."""
        from safetensors.torch import save_file

        from penstock.engine.weights import digest_of

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._fetch(source)}
        digest = digest_of(tensors.items())
        if digest != source.digest:
            raise DigestMismatch(
                f"weights refused, the old ones stay: got digest {digest}, "
                f"announced was {source.digest}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "model.safetensors.part"
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(folder / "model.safetensors")
        return digest

    async def sleep(self) -> None:
        """The server's memory is its own."""

    async def wake(self) -> None:
        """Undo `sleep`."""

    async def stats(self) -> EngineStats:
        if not self._started:
            raise EngineError("engine openai: it is not running")
        return EngineStats(
            policy_version=self._version,
            digest=self._digest,
            running=len(self._passed),
            waiting=len(self._running) - len(self._passed),
            tokens_generated=self._tokens,
            busy_s=0.0,
            paused=not self._open.is_set(),
        )

    async def close(self) -> None:
        self._started = False
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.sleep(0)


def _ended(request: GenerationRequest, why: Any, error: str = "") -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason=why,
        error=error,
    )
