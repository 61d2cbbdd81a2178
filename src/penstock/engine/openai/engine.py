"""One or more servers that speak /v1/completions with token ids and log-probs, as an engine.

With several URLs, the least loaded server takes a request; a request id that was used before returns to its
last server. Answers are streamed if the server can, so that an abort returns the tokens so far and a broken
stream continues elsewhere from its tokens. New weights are sent by vLLM's calls for RL, or as a safetensors
folder and a reload call; without either the engine refuses updates and serves evaluation only. A server
that was lost serves again only with the newest weights (`servers.py` defines a loss).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.config.secrets import from_environment
from penstock.engine.openai.completions import (
    STREAMED,
    CompletionChunks,
    WrongAnswer,
    completion_body,
    is_unfiltered,
    probe_body,
    read_completion,
)
from penstock.engine.openai.http_client import HttpError, JsonClient
from penstock.engine.openai.servers import Server, Servers
from penstock.engine.protocol import (
    EngineStats,
    Fetch,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
    check_options,
    check_request,
)
from penstock.engine.remote_requests import RemoteRequest, RemoteRequests
from penstock.errors import EngineError, UserError
from penstock.types import WeightHandle

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.engine.openai.server_weights import PreparedWeights, WeightLoader

_PATH = "/v1/completions"


@dataclass(slots=True, frozen=True, kw_only=True)
class OpenAIOptions:
    """[engine.options] of the openai engine."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)
    model: str = ""  # the server's name for the model; empty: the first it lists
    api_key_variable: str = ""  # environment variable that holds the key
    timeout_s: float = 600.0  # longest wait for a token, or for an answer
    retries: int = 3  # further tries of one request
    backoff_s: float = 0.5  # wait before the second try or a lost server's next one; doubles
    max_model_len: int = 0  # most tokens of a request; 0: the server's limit
    reload_path: str = ""  # e.g. /update_weights_from_disk (SGLang); vLLM servers need none
    weights_folder: str = ""  # where new weights are written; servers must see it too

    @classmethod
    def from_config(cls, config: Config) -> Self:
        given = dict(check_options(cls, cls.__dataclass_fields__, config.engine.options))
        if "urls" in given:
            given["urls"] = tuple(given["urls"])
        return cls(**given)


@dataclass(slots=True, eq=False)
class _Stream:
    """One streamed answer; its timeout ends it, also when it is cut to continue after an update."""

    server: Server
    timeout: asyncio.Timeout
    has_stop_strings: bool
    cut: bool = False
    over: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end_at(self, when: float | None) -> None:
        if not self.over and not self.timeout.expired():
            self.timeout.reschedule(when)

    def end_now(self) -> None:
        self.end_at(asyncio.get_running_loop().time())
        self.over = True


class OpenAIEngine:
    """See `InferenceEngine`.

    A pause with mode `keep` uses the servers' own pause if all have one (vLLM in its development mode).
    Otherwise it cuts the streams, which continue from their tokens after `resume`, but waits for responses
    with stop strings.
    """

    def __init__(self, options: OpenAIOptions, *, fetch: Fetch) -> None:
        if not options.urls:
            raise UserError("engine.options.urls: got none, allowed: at least one URL")
        key = from_environment("engine.options.api_key_variable", options.api_key_variable)
        self._options, self._fetch = options, fetch
        clients = [JsonClient(url, options.timeout_s, key) for url in options.urls]
        self._servers = Servers(clients, self._restore, self._end_streams, options.backoff_s)
        self._requests = RemoteRequests()
        self._streams: set[_Stream] = set()
        self._sending = asyncio.Event()  # set: admitted requests may be sent to a server
        self._model, self._longest = options.model, options.max_model_len
        self._raw_logprobs = self._streaming = self._native_pause = False
        self._loader: WeightLoader | None = None
        self._updating = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._held_natively = False
        self._version, self._digest = 0, ""
        # None: it serves the weights it started with
        self._latest: tuple[int, WeightHandle] | None = None
        self._end_reason = "it was not started"

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        return cls(OpenAIOptions.from_config(config), fetch=fetch)

    # ---- start: what the servers can do

    async def start(self) -> None:
        """Find the model and learn what the servers can do; every server must answer."""
        raw, self._streaming, self._native_pause = [], True, True
        self._servers.reset()
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
        self._sending.set()
        self._requests.gate.set()

    async def _find_model(self, client: JsonClient) -> None:
        listed = (await client.get("/v1/models")).get("data", [])
        chosen = next((m for m in listed if not self._model or m["id"] == self._model), None)
        if chosen is None:
            raise UserError(
                f"engine.options.model: got {self._model!r}, allowed: "
                f"{', '.join(m['id'] for m in listed) or 'none, as the server lists no model'}"
            )
        self._model = chosen["id"]
        self._longest = self._longest or int(chosen.get("max_model_len") or 1 << 20)

    async def _probe(self, client: JsonClient) -> float:
        """Return the log-prob of a certain token; note whether streams carry token ids."""
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
        check_request(request, longest=self._longest or 1 << 30)
        if self._raw_logprobs and not is_unfiltered(request.sampling):
            raise UserError(
                f"request {request.request_id}: got {request.sampling}, allowed: temperature 1 without "
                "top_k, top_p and min_tokens, because this server returns raw log-probs "
                "(vLLM: --logprobs-mode processed_logprobs)"
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
        """Try until an answer comes or the tries are used up; a cut for an update is not a try."""
        reason, failures = "", 0
        while failures <= self._options.retries:
            if failures:
                await asyncio.sleep(self._options.backoff_s * 2 ** (failures - 1))
            request, before = _continued(remote), len(remote.ids)
            if len(request.response_ids) >= request.sampling.max_tokens:
                return remote.generation("length")
            try:
                ended = await self._send(remote, request)
                if ended is not None:
                    return remote.generation(ended)
            except (HttpError, WrongAnswer) as error:
                reason, failures = str(error), failures + 1
                if isinstance(error, WrongAnswer):
                    remote.truncate(before)  # no token of this answer can be trusted
                elif request.sampling.stop:
                    remote.truncate(0)  # a stop string could span the break
                if isinstance(error, HttpError) and not error.retryable:
                    break
        return remote.generation("error", reason)

    async def _send(self, remote: RemoteRequest, request: GenerationRequest) -> FinishReason | None:
        """Send a request to one server, once; return None if it was cut and must continue."""
        while True:
            server = await self._servers.choose(request.request_id)
            await self._sending.wait()
            if server.ready:  # it was not lost during the wait
                break
        epoch = server.epoch
        server.outstanding += request.num_tokens
        try:
            receive = self._receive_stream if self._streaming else self._receive_whole
            ended = await receive(server, remote, request)
            server.faults = 0
            return ended
        except (HttpError, WrongAnswer) as error:
            self._servers.failed(request.request_id, server, epoch, error)
            raise
        finally:
            server.outstanding -= request.num_tokens

    async def _receive_whole(
        self, server: Server, remote: RemoteRequest, request: GenerationRequest
    ) -> FinishReason:
        version, left = self._version, request.sampling.max_tokens - len(request.response_ids)
        epoch = server.epoch
        answer = await server.client.post(_PATH, self._body(request))
        _check_epoch(server, epoch)
        ids, logprobs, ended = read_completion(answer, left)
        self._requests.add(remote, ids, logprobs, version)
        return ended

    async def _receive_stream(
        self, server: Server, remote: RemoteRequest, request: GenerationRequest
    ) -> FinishReason | None:
        """Return the finish reason, or None if the stream was cut and must continue."""
        chunks = CompletionChunks(request.sampling.max_tokens - len(request.response_ids))
        stream: _Stream | None = None
        epoch = server.epoch
        try:
            async with asyncio.timeout(self._options.timeout_s) as timeout:
                stream = _Stream(server, timeout, bool(request.sampling.stop))
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
            if chunks.complete:  # only the end of the stream is missing
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
        if self._native_pause:  # vLLM: keeps weights apart in the prefix cache
            body["cache_salt"] = f"v{self._version}"
        return body

    def _deadline(self) -> float | None:
        """Return when a silent stream fails; None (never) while a server's own pause holds it."""
        if self._held_natively:
            return None
        return asyncio.get_running_loop().time() + self._options.timeout_s

    async def abort(self, request_id: str) -> None:
        # servers drop a request whose client has disconnected
        await self._requests.abort(request_id)

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
        await self._release()

    async def _hold(self, natively: bool) -> None:
        """Stop generation; running requests continue after `_release`."""
        if natively and not self._held_natively:
            self._sending.clear()
            self._held_natively = True  # set first, because a restored server follows this flag
            try:
                await self._pause_all(True)
            except EngineError:
                self._held_natively = False
                raise
            for stream in self._streams:
                stream.end_at(None)
        elif self._streaming and not natively:
            self._sending.clear()
            streams = list(self._streams)
            for stream in streams:
                if not stream.has_stop_strings:
                    stream.cut = True
                    stream.end_now()
            await asyncio.gather(*(stream.ended.wait() for stream in streams))
        elif not natively:
            await self._requests.wait_running()

    async def _release(self) -> None:
        if self._held_natively:
            self._held_natively = False
            await self._pause_all(False)
            for stream in self._streams:
                stream.end_at(self._deadline())
        self._sending.set()
        self._requests.gate.set()

    async def _pause_all(self, paused: bool) -> None:
        try:
            await self._servers.call_all(lambda server: server.set_paused(paused))
        except HttpError as error:
            action = "pause" if paused else "resume"
            raise EngineError(f"engine openai: {action} failed: {error}") from error

    # ---- weights

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        loader = self._loader
        if loader is None:
            raise EngineError(
                "engine openai: got new weights for a server that takes none, allowed: evaluation only; "
                "to train, start vLLM with its calls for RL (docs/engines.md), or set "
                "engine.options.reload_path and weights_folder if the server loads from disk"
            )
        from penstock.weights.model_weights import checked_weights

        async with self._updating:
            weights = await asyncio.to_thread(checked_weights, self._fetch, source)
            prepared = await loader.prepare(version, source, weights)
            try:
                await self._watch_all()
                async with self._holding(loader):
                    self._latest = (version, source)  # from now on for restored servers, too
                    await self._load(loader, prepared)
                    self._version, self._digest = version, source.digest
            finally:
                prepared.release()
        return source.digest

    async def _watch_all(self) -> None:
        """Watch every server, so that none can restart unnoticed with other weights."""
        try:
            await self._servers.wait_ready()
            await self._servers.call_all(self._servers.watch)
        except HttpError as error:
            raise EngineError(f"engine openai: {error}") from error

    async def _load(self, loader: WeightLoader, prepared: PreparedWeights) -> None:
        """Load into every ready server; end the engine if one refuses, as its weights are unknown."""
        try:
            await self._servers.call_all(lambda server: loader.load(server, prepared))
        except HttpError as error:
            self._end_reason = f"weights {prepared.version} were not loaded: {error}"
            await self._requests.abort_all()
            raise EngineError(f"engine openai: {self._end_reason}") from error

    async def _restore(self, server: Server) -> None:
        """Bring a lost server to the newest weights and to the pause state of the others."""
        await server.check_health()
        try:
            await self._find_model(server.client)
        except (AttributeError, KeyError, TypeError) as error:
            raise EngineError(f"its list of models is malformed: {error!r}") from error
        paused = self._native_pause and await server.is_paused()
        held: tuple[int, WeightHandle] | None = None
        while held is not self._latest or paused is not self._held_natively:
            if held is not self._latest and self._latest is not None:
                held = self._latest
                paused = await self._restore_weights(server, held) or paused
            else:
                paused = self._held_natively
                await server.set_paused(paused)

    async def _restore_weights(self, server: Server, newest: tuple[int, WeightHandle]) -> bool:
        from penstock.engine.openai.server_weights import restore_weights

        assert self._loader is not None, "weights were loaded before, by this loader"
        await self._servers.watch(server)
        return await restore_weights(self._loader, server, self._fetch, newest)

    def _end_streams(self, server: Server) -> None:
        for stream in self._streams:
            if stream.server is server:
                stream.end_now()

    @asynccontextmanager
    async def _holding(self, loader: WeightLoader) -> AsyncIterator[None]:
        """Hold requests during a load, unless a pause holds them already."""
        self._requests.gate.clear()
        try:
            if self._paused is None or loader.native_pause:
                await self._hold(loader.native_pause)
        except EngineError:
            self._sending.set()
            self._requests.gate.set()
            raise
        yield
        if self._paused is None:
            await self._release()

    async def sleep(self) -> None:
        """Do nothing: the servers manage their own memory."""

    async def wake(self) -> None:
        """Do nothing, like `sleep`."""

    async def stats(self) -> EngineStats:
        if self._end_reason:
            raise EngineError(f"engine openai: {self._end_reason}")
        try:
            await self._servers.wait_ready()
        except HttpError as error:
            raise EngineError(f"engine openai: {error}") from error
        paused, live = self._paused is not None, self._streaming
        return self._requests.stats(self._version, self._digest, paused=paused, live=live)

    async def close(self) -> None:
        self._end_reason = "it was closed"
        await self._requests.abort_all()
        await self._servers.close()


def _check_epoch(server: Server, epoch: int) -> None:
    """Raise HttpError if the server was lost since: another process may answer, with other weights."""
    if server.epoch != epoch:
        raise HttpError(f"{server.url}: it was lost during the request: {server.reason}")


def _continued(remote: RemoteRequest) -> GenerationRequest:
    """Return the request with the tokens so far as part of its response."""
    if not remote.ids:
        return remote.request
    made = np.concatenate([remote.request.response_ids, np.array(remote.ids, np.int32)])
    return replace(remote.request, response_ids=made)
