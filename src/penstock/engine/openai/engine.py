"""Any server that speaks /v1/completions with token ids and log-probs, as an engine.

Several URLs: the least loaded takes a request, a rollout that goes on returns to its server. Answers are
streamed where the server can, so that an abort returns what came until then, and a cut stream goes on
elsewhere from its tokens. Weights go out by vLLM's own calls for RL, or as a safetensors folder and a
reload call; without either the engine serves for evaluation only, and says so. A server that was lost
serves again only with the newest weights (`servers.py` says when one is lost).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.engine.openai.completions import (
    STREAMED,
    CompletionChunks,
    WrongAnswer,
    completion_body,
    neutral,
    probe_body,
    read_completion,
)
from penstock.engine.openai.http_client import HttpError, JsonClient
from penstock.engine.openai.options import OpenAIOptions
from penstock.engine.openai.servers import Server, Servers
from penstock.engine.protocol import (
    EngineStats,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
)
from penstock.engine.remote_requests import RemoteRequest, RemoteRequests
from penstock.errors import EngineError, UserError
from penstock.types import WeightHandle

if TYPE_CHECKING:
    import torch

    from penstock.config import Config
    from penstock.engine.openai.server_weights import Prepared, WeightLoader

__all__ = ["OpenAIEngine", "OpenAIOptions"]

Fetch = Callable[[WeightHandle], "Iterable[tuple[str, torch.Tensor]]"]
_PATH = "/v1/completions"


@dataclass(slots=True, eq=False)
class _Stream:
    """One streamed answer; `limit` ends it, also when it is cut to go on after an update."""

    server: Server
    limit: asyncio.Timeout
    stops_by_text: bool
    cut: bool = False
    over: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end_at(self, when: float | None) -> None:
        if not self.over and not self.limit.expired():
            self.limit.reschedule(when)

    def end_now(self) -> None:
        self.end_at(asyncio.get_running_loop().time())
        self.over = True


class OpenAIEngine:
    """See `InferenceEngine`.

    `keep` uses the servers' own pause where they have one (vLLM in its development mode). Elsewhere streams
    are cut and go on from their tokens after `resume`; responses with stop strings are waited for.
    """

    def __init__(self, options: OpenAIOptions, *, fetch: Fetch) -> None:
        if not options.urls:
            raise UserError("engine.options.urls: got none, allowed: at least one URL")
        key = os.environ.get(options.api_key_variable, "") if options.api_key_variable else ""
        self._options, self._fetch = options, fetch
        clients = [JsonClient(url, options.timeout_s, key) for url in options.urls]
        self._servers = Servers(clients, self._come_back, self._end_streams, options.backoff_s)
        self._requests = RemoteRequests()
        self._streams: set[_Stream] = set()
        self._asking = asyncio.Event()  # set: requests inside may ask a server
        self._model, self._longest = options.model, options.max_model_len
        self._raw_logprobs = self._streaming = self._native_pause = False
        self._loader: WeightLoader | None = None
        self._updating = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._held_natively = False
        self._version, self._digest = 0, ""
        self._latest: tuple[int, WeightHandle] | None = None  # None: it serves what it started with
        self._end_reason = "it was not started"

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        return cls(OpenAIOptions.from_config(config), fetch=fetch)

    # ---- what the servers can do

    async def start(self) -> None:
        """Find the model and learn what the servers can do; all of them must be there."""
        raw, self._streaming, self._native_pause = [], True, True
        self._servers.begin()
        for server in self._servers.all:
            client = server.client
            try:
                await self._find_model(client)
                own_pause = await server.has_own_pause()
                raw.append(abs(await self._probe(client)) > 1e-4)
            except (HttpError, WrongAnswer, KeyError) as error:
                raise EngineError(
                    f"engine openai: {client.base_url} is of no use: {error}"
                ) from error
            self._native_pause = self._native_pause and own_pause
        self._raw_logprobs = any(raw)
        self._loader = self._find_loader()
        self._paused, self._held_natively, self._end_reason = None, False, ""
        self._version, self._digest, self._latest = 0, "", None
        self._asking.set()
        self._requests.gate.set()

    async def _find_model(self, client: JsonClient) -> None:
        listed = (await client.get("/v1/models")).get("data", [])
        chosen = next((m for m in listed if not self._model or m["id"] == self._model), None)
        if chosen is None:
            raise UserError(
                f"engine.options.model: got {self._model!r}, allowed: "
                f"{', '.join(m['id'] for m in listed) or 'nothing is served'}"
            )
        self._model = chosen["id"]
        self._longest = self._longest or int(chosen.get("max_model_len") or 1 << 20)

    async def _probe(self, client: JsonClient) -> float:
        """The log-prob of one certain token; on the way, whether streams carry token ids."""
        body, chunks, found = probe_body(self._model), CompletionChunks(1), []
        try:
            async with (
                asyncio.timeout(self._options.timeout_s),
                aclosing(client.stream(_PATH, {**body, **STREAMED})) as events,
            ):
                async for event in events:
                    found += chunks.read(event)[1]
            chunks.end()
        except (HttpError, WrongAnswer, TimeoutError):
            self._streaming = False
            _, found, _ = read_completion(await client.post(_PATH, body), 1)
        return found[0]

    def _find_loader(self) -> WeightLoader | None:
        from penstock.engine.openai.server_weights import ReloadCall, VllmCalls, on_this_machine

        options = self._options
        if options.reload_path and options.weights_folder:
            return ReloadCall(options.weights_folder, options.reload_path)
        if self._native_pause and (
            options.weights_folder or all(map(on_this_machine, options.urls))
        ):
            return VllmCalls(options.weights_folder)
        return None

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

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        self._check(request)
        if self._end_reason:
            return RemoteRequest(request).generation("error", f"engine openai: {self._end_reason}")
        return await self._requests.run(request, self._follow)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        for request in requests:
            self._check(request)
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def _follow(self, remote: RemoteRequest) -> Generation:
        """Ask until there is an answer or the tries are used up; being cut for an update is no try."""
        reason, failures = "", 0
        while failures <= self._options.retries:
            if failures:
                await asyncio.sleep(self._options.backoff_s * 2 ** (failures - 1))
            request, before = _going_on(remote), len(remote.ids)
            if len(request.response_ids) >= request.sampling.max_tokens:
                return remote.generation("length")
            try:
                ended = await self._ask(remote, request)
                if ended is not None:
                    return remote.generation(ended)
            except (HttpError, WrongAnswer) as error:
                reason, failures = str(error), failures + 1
                if isinstance(error, WrongAnswer):
                    remote.truncate(before)  # none of this answer is to be trusted
                elif request.sampling.stop:
                    remote.truncate(0)  # a stop string could lie across the cut
                if isinstance(error, HttpError) and not error.again:
                    break
        return remote.generation("error", reason)

    async def _ask(self, remote: RemoteRequest, request: GenerationRequest) -> FinishReason | None:
        """One server, once; None: it was cut and is to go on."""
        while True:
            server = await self._servers.choose(request.request_id)
            await self._asking.wait()
            if server.ready:  # nobody lost it meanwhile
                break
        epoch = server.epoch
        server.outstanding += request.num_tokens
        try:
            ask = self._follow_stream if self._streaming else self._ask_once
            ended = await ask(server, remote, request)
            server.faults = 0
            return ended
        except (HttpError, WrongAnswer) as error:
            self._servers.failed(request.request_id, server, epoch, error)
            raise
        finally:
            server.outstanding -= request.num_tokens

    async def _ask_once(
        self, server: Server, remote: RemoteRequest, request: GenerationRequest
    ) -> FinishReason:
        version, left = self._version, request.sampling.max_tokens - len(request.response_ids)
        epoch = server.epoch
        answer = await server.client.post(_PATH, self._body(request))
        _check_epoch(server, epoch)
        ids, logprobs, ended = read_completion(answer, left)
        self._requests.add(remote, ids, logprobs, version)
        return ended

    async def _follow_stream(
        self, server: Server, remote: RemoteRequest, request: GenerationRequest
    ) -> FinishReason | None:
        """Why it ended; None if it was cut and is to go on."""
        chunks = CompletionChunks(request.sampling.max_tokens - len(request.response_ids))
        stream: _Stream | None = None
        epoch = server.epoch
        try:
            async with asyncio.timeout(self._options.timeout_s) as limit:
                stream = _Stream(server, limit, bool(request.sampling.stop))
                self._streams.add(stream)
                body = {**self._body(request), **STREAMED}
                async with aclosing(server.client.stream(_PATH, body)) as events:
                    async for event in events:
                        _check_epoch(server, epoch)
                        ids, logprobs = chunks.read(event)
                        self._requests.add(remote, ids, logprobs, self._version)
                        stream.end_at(self._deadline())
            return chunks.end()
        except HttpError:
            if chunks.complete:  # all that was lost is the stream's own end
                return chunks.end()
            raise
        except TimeoutError:
            if stream is not None and stream.cut:
                return None
            _check_epoch(server, epoch)
            waited = f"no token within {self._options.timeout_s:g} s"
            raise HttpError(f"{server.client.base_url}: {waited}") from None
        finally:
            if stream is not None:
                self._streams.discard(stream)
                stream.ended.set()

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        body = completion_body(self._model, request)
        if self._native_pause:  # vLLM: the prefix cache never mixes weights
            body["cache_salt"] = f"v{self._version}"
        return body

    def _deadline(self) -> float | None:
        """When a stream that stays silent is given up; never while a server holds it for us."""
        if self._held_natively:
            return None
        return asyncio.get_running_loop().time() + self._options.timeout_s

    async def abort(self, request_id: str) -> None:
        await self._requests.abort(request_id)  # servers drop a request whose client is gone

    # ---- pause and resume

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._paused = mode
        self._requests.gate.clear()
        if mode == "abort":
            await self._requests.abort_all()
        elif mode == "wait":
            await self._requests.wait_running()
        else:
            await self._hold(self._native_pause)

    async def resume(self) -> None:
        self._paused = None
        await self._let_go()

    async def _hold(self, natively: bool) -> None:
        """Nothing is generated after this; what runs goes on later."""
        if natively and not self._held_natively:
            self._asking.clear()
            self._held_natively = True  # first: a server that comes back does as this says
            try:
                await self._pause_all(True)
            except EngineError:
                self._held_natively = False
                raise
            for stream in self._streams:
                stream.end_at(None)
        elif self._streaming and not natively:
            self._asking.clear()
            streams = list(self._streams)
            for stream in streams:
                if not stream.stops_by_text:
                    stream.cut = True
                    stream.end_now()
            await asyncio.gather(*(stream.ended.wait() for stream in streams))
        elif not natively:
            await self._requests.wait_running()

    async def _let_go(self) -> None:
        if self._held_natively:
            self._held_natively = False
            await self._pause_all(False)
            for stream in self._streams:
                stream.end_at(self._deadline())
        self._asking.set()
        self._requests.gate.set()

    async def _pause_all(self, paused: bool) -> None:
        try:
            await self._servers.on_all(lambda server: server.set_paused(paused))
        except HttpError as error:
            raise EngineError(f"engine openai: its pause: {error}") from error

    # ---- weights

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        loader = self._loader
        if loader is None:
            raise EngineError(
                "engine openai: this server cannot be trained against, evaluation only: start vLLM "
                "with its calls for RL (docs/engines.md), or set engine.options.reload_path and "
                "weights_folder if it can load weights from disk"
            )
        from penstock.weights.model_weights import checked_weights

        async with self._updating:
            weights = await asyncio.to_thread(checked_weights, self._fetch, source)
            prepared = await loader.prepare(version, source, weights)
            try:
                await self._hold_on_all()
                async with self._holding(loader):
                    self._latest = (version, source)  # from now on for those that come back, too
                    await self._load(loader, prepared)
                    self._version, self._digest = version, source.digest
            finally:
                prepared.release()
        return source.digest

    async def _hold_on_all(self) -> None:
        """From here on no server ends unnoticed."""
        try:
            await self._servers.some_ready()
            await self._servers.on_all(self._servers.hold_on)
        except HttpError as error:
            raise EngineError(f"engine openai: {error}") from error

    async def _load(self, loader: WeightLoader, prepared: Prepared) -> None:
        """Into every server that serves; where one refuses, nobody knows what it holds."""
        try:
            await self._servers.on_all(lambda server: loader.load(server, prepared))
        except HttpError as error:
            self._end_reason = f"weights {prepared.version} were not loaded: {error}"
            await self._requests.abort_all()
            raise EngineError(f"engine openai: {self._end_reason}") from error

    async def _come_back(self, server: Server) -> None:
        """For one that was lost: it holds the newest weights after this, and is paused as the others are."""
        await server.ask_health()
        try:
            await self._find_model(server.client)
        except (AttributeError, KeyError, TypeError) as error:
            raise EngineError(f"it does not list its models: {error!r}") from error
        paused = self._native_pause and await server.is_paused()
        held: tuple[int, WeightHandle] | None = None
        while held is not self._latest or paused is not self._held_natively:
            if held is not self._latest and self._latest is not None:
                held = self._latest
                paused = await self._load_again(server, held) or paused
            else:
                paused = self._held_natively
                await server.set_paused(paused)

    async def _load_again(self, server: Server, newest: tuple[int, WeightHandle]) -> bool:
        from penstock.engine.openai.server_weights import load_again

        assert self._loader is not None, "weights that were loaded once have a loader"
        await self._servers.hold_on(server)
        return await load_again(self._loader, server, self._fetch, newest)

    def _end_streams(self, server: Server) -> None:
        for stream in self._streams:
            if stream.server is server:
                stream.end_now()

    @asynccontextmanager
    async def _holding(self, loader: WeightLoader) -> AsyncIterator[None]:
        """A pause of its own where nobody has paused."""
        self._requests.gate.clear()
        try:
            if self._paused is None or loader.native_pause:
                await self._hold(loader.native_pause)
        except EngineError:
            self._asking.set()
            self._requests.gate.set()
            raise
        yield
        if self._paused is None:
            await self._let_go()

    async def sleep(self) -> None:
        """The server's memory is its own."""

    async def wake(self) -> None:
        """Undo `sleep`."""

    async def stats(self) -> EngineStats:
        if self._end_reason:
            raise EngineError(f"engine openai: {self._end_reason}")
        try:
            await self._servers.some_ready()
        except HttpError as error:
            raise EngineError(f"engine openai: {error}") from error
        return EngineStats(
            policy_version=self._version,
            digest=self._digest,
            running=self._requests.running,
            waiting=self._requests.waiting,
            tokens_generated=self._requests.tokens,
            busy_s=0.0,
            paused=self._paused is not None,
            live=self._streaming,
        )

    async def close(self) -> None:
        self._end_reason = "it was closed"
        await self._requests.abort_all()
        await self._servers.close()


def _check_epoch(server: Server, epoch: int) -> None:
    """What comes after a loss may be another process's, with other weights."""
    if server.epoch != epoch:
        raise HttpError(f"{server.url}: it was lost meanwhile: {server.reason}")


def _going_on(remote: RemoteRequest) -> GenerationRequest:
    """The request as it is to be asked now: what has come already is part of its response."""
    if not remote.ids:
        return remote.request
    made = np.concatenate([remote.request.response_ids, np.array(remote.ids, np.int32)])
    return replace(remote.request, response_ids=made)
