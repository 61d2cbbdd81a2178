"""A server that speaks /v1/completions with token ids and log-probs, as an engine.

Answers are streamed if the server can, so that an abort returns the tokens so far and a broken stream
continues from its tokens. New weights are sent by vLLM's calls for RL, or as a safetensors folder and a
reload call; without either the engine refuses updates and serves evaluation only. The engine ends when its
server is lost, because a server that comes back may hold other weights: supervision starts the engine
again, and the pool gives it the newest weights. Several servers are several engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.config.secrets import from_environment
from penstock.config.server_url import server_url
from penstock.data.chat import response_end_ids
from penstock.engine.openai.server import (
    STREAMED,
    VLLM_NEUTRAL,
    CompletionChunks,
    HttpError,
    Server,
    WrongAnswer,
    completion_body,
    is_unfiltered,
    penalty_of,
    probe_body,
)
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
    from penstock.config import Config, ModelConfig
    from penstock.engine.openai.server_weights import WeightLoader, WeightPlace


_MOST_PENALTY = 0.5  # nats; half formats round the logits of one prompt differently by a quarter


@dataclass(slots=True, frozen=True, kw_only=True)
class OpenAIOptions:
    """[engine.options] of the openai engine."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)  # one for each engine
    model: str = ""  # the server's name for the model; empty: the first it lists
    api_key_variable: str = ""  # environment variable that holds the key
    timeout_s: float = 600.0  # longest wait for a token, or for an answer
    retries: int = 3  # further tries of one request, or of the first calls at the start
    backoff_s: float = 0.5  # wait before the second try; doubles
    max_model_len: int = 0  # most tokens of a request; 0: the server's limit
    reload_path: str = ""  # e.g. /update_weights_from_disk (SGLang); vLLM servers need none
    weights_folder: str = ""  # where new weights are written; servers must see it too

    @classmethod
    def from_config(cls, config: Config) -> Self:
        options = dict(check_options(cls, config.engine.options))
        if "urls" in options:
            options["urls"] = tuple(
                server_url("engine.options.urls", url) for url in options["urls"]
            )
        return cls(**options)


@dataclass(slots=True, eq=False)
class _Stream:
    """One streamed answer. Its timeout ends it, also when it is cut, to be continued after an update."""

    timeout: asyncio.Timeout
    can_be_cut: bool
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

    A pause with mode `keep` uses the server's own pause if it has one (vLLM in its development mode).
    Otherwise it cuts the streams, which continue from their tokens after `resume`, but waits for responses
    with stop strings.
    """

    def __init__(
        self, options: OpenAIOptions, *, fetch: Fetch, model: ModelConfig | None = None
    ) -> None:
        if len(options.urls) != 1:
            raise UserError(
                f"engine.options.urls: got {len(options.urls)} URLs for one engine, allowed: one"
            )
        key = from_environment("engine.options.api_key_variable", options.api_key_variable)
        self._options, self._fetch, self._policy = options, fetch, model
        self._end_ids: tuple[int, ...] = ()
        self._server = Server(options.urls[0], options.timeout_s, key)
        self._requests = RemoteRequests()
        self._streams: set[_Stream] = set()
        self._sending = asyncio.Event()  # set: admitted requests may be sent to the server
        self._model, self._longest = options.model, options.max_model_len
        self._raw_logprobs = self._streaming = self._native_pause = False
        self._neutral: dict[str, float] = {}  # settings that the server would else choose itself
        self._loader: WeightLoader | None = None
        self._updating = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._same_process = asyncio.Event()  # not set: the server may have been started again
        self._paused: PauseMode | None = None
        self._held_natively = False
        self._version, self._digest = 0, ""
        self._failed = False  # the newest answer was a fault: the server may be lost
        self._end_reason = "it was not started"

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        return cls(OpenAIOptions.from_config(config), fetch=fetch, model=config.model)

    # ---- start: what the server can do

    async def start(self) -> None:
        """Find the model and learn what the server can do; a server that does not answer is tried again."""
        await self._stop_watching()
        if self._policy is not None:
            self._end_ids = await asyncio.to_thread(response_end_ids, self._policy)
        for failures in range(self._options.retries + 1):
            try:
                await self._learn()
                break
            except (HttpError, WrongAnswer, TimeoutError, LookupError, AttributeError) as error:
                retryable = isinstance(error, HttpError) and error.retryable
                if not retryable or failures == self._options.retries:
                    reason = f"{self._server.url} is of no use: {error}"
                    raise EngineError(f"engine openai: {reason}") from error
            await asyncio.sleep(self._options.backoff_s * 2**failures)
        self._loader = self._find_loader()
        self._paused, self._held_natively, self._failed = None, False, False
        self._version, self._digest, self._end_reason = 0, "", ""
        self._open_gates()

    def _open_gates(self) -> None:
        self._same_process.set()
        self._sending.set()
        self._requests.gate.set()

    async def _learn(self) -> None:
        models = (await self._server.get("/v1/models")).get("data", [])
        names = [model["id"] for model in models]
        model = next((m for m in models if not self._model or m["id"] == self._model), None)
        if model is None:
            raise UserError(
                f"engine.options.model: got {self._model!r}, allowed: "
                f"{', '.join(names) or 'none, as the server lists no model'}"
            )
        self._model = model["id"]
        self._longest = self._longest or int(model.get("max_model_len") or 1 << 20)
        self._native_pause = await self._server.has_pause()
        self._raw_logprobs = abs(await self._learn_fields()) > 1e-4
        penalty = await penalty_of(self._server, self._model, self._neutral)
        if penalty > _MOST_PENALTY:
            raise UserError(
                f"engine.options.urls: got {self._server.url}, a server that moves the log-prob of a repeated "
                f"token by {penalty:.1f}, allowed: one without a penalty (vLLM: --generation-config vllm)"
            )

    async def _learn_fields(self) -> float:
        """Find the fields that the server takes; return the log-prob of the probe's token."""
        try:
            return await self._probe_streams(VLLM_NEUTRAL)
        except HttpError as error:
            if error.retryable:
                raise
        return await self._probe_streams({})

    async def _probe_streams(self, neutral: dict[str, float]) -> float:
        self._neutral, self._streaming = neutral, True
        try:
            return await self._probe(neutral | STREAMED)
        except (HttpError, WrongAnswer, TimeoutError):
            self._streaming = False
            return await self._probe(neutral)

    async def _probe(self, more: Mapping[str, Any]) -> float:
        """The log-prob of a token whose probability is 1 after top_k."""
        chunks, logprobs = CompletionChunks(1), []
        body = {**probe_body(self._model), **more}
        async with (
            asyncio.timeout(self._options.timeout_s),
            aclosing(self._server.completions(body)) as events,
        ):
            async for event in events:
                logprobs += chunks.read(event)[1]
        chunks.end()
        return logprobs[0]

    def _find_loader(self) -> WeightLoader | None:
        from penstock.engine.openai.server_weights import ReloadCall, VllmCalls

        folder, path = self._options.weights_folder, self._options.reload_path
        if path and folder:
            return ReloadCall(folder, path)
        if self._native_pause and (folder or self._server.is_on_this_machine):
            return VllmCalls(folder)
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
        while failures <= self._options.retries and not self._end_reason:
            if failures:
                await asyncio.sleep(self._options.backoff_s * 2 ** (failures - 1))
            request, before = _continued(remote), len(remote.ids)
            if len(request.response_ids) >= request.sampling.max_tokens:
                return remote.generation("length")
            await self._sending.wait()
            try:
                finish_reason = await self._receive(remote, request)
                self._failed = False
                await self._same_process.wait()
                if finish_reason is not None and not self._end_reason:
                    return remote.generation(finish_reason)
            except (HttpError, WrongAnswer) as error:
                reason, failures, self._failed = str(error), failures + 1, True
                if isinstance(error, WrongAnswer):
                    remote.truncate(before)  # no token of this answer can be trusted
                elif request.sampling.stop:
                    remote.truncate(0)  # a stop string could span the break
                if isinstance(error, HttpError) and not error.retryable:
                    break
        return remote.generation("error", self._end_reason or reason)

    async def _receive(
        self, remote: RemoteRequest, request: GenerationRequest
    ) -> FinishReason | None:
        """Send a request once; return the finish reason, or None if the stream was cut to continue."""
        chunks = CompletionChunks(request.sampling.max_tokens - len(request.response_ids))
        stream: _Stream | None = None
        try:
            async with asyncio.timeout(self._options.timeout_s) as timeout:
                stream = _Stream(timeout, self._streaming and not request.sampling.stop)
                self._streams.add(stream)
                async with aclosing(self._server.completions(self._body(request))) as events:
                    async for event in events:
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
            waited = self._end_reason or f"no token within {self._options.timeout_s:g} s"
            raise HttpError(f"{self._server.url}: {waited}") from None
        finally:
            if stream is not None:
                self._streams.discard(stream)
                stream.ended.set()

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        # a server without vLLM's fields may refuse them
        ends = self._end_ids if self._neutral else ()
        body = completion_body(self._model, request, ends) | self._neutral
        if self._streaming:
            body |= STREAMED
        if self._native_pause:  # vLLM: keeps weights apart in the prefix cache
            body["cache_salt"] = f"v{self._version}"
        return body

    def _deadline(self) -> float | None:
        """When a silent stream fails; None (never) while the server's own pause holds it."""
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
            await self._set_paused(True)
            self._held_natively = True
            for stream in self._streams:
                stream.end_at(None)
        elif not natively:
            if self._streaming:
                self._sending.clear()
            streams = list(self._streams)
            for stream in streams:
                if stream.can_be_cut:
                    stream.cut = True
                    stream.end_now()
            if self._streaming:
                await asyncio.gather(*(stream.ended.wait() for stream in streams))
            else:
                await self._requests.wait_running()

    async def _release(self) -> None:
        if self._held_natively:
            await self._set_paused(False)
            self._held_natively = False
            for stream in self._streams:
                stream.end_at(self._deadline())
        self._sending.set()
        self._requests.gate.set()

    async def _set_paused(self, paused: bool) -> None:
        try:
            await self._server.set_paused(paused)
        except HttpError as error:
            action = "pause" if paused else "resume"
            await self._end(f"{action} failed: {error}")
            raise EngineError(f"engine openai: {self._end_reason}") from error

    # ---- weights

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        loader = self._loader
        if loader is None:
            raise EngineError(
                "engine openai: got new weights for a server that takes none, allowed: evaluation only; "
                "to train, start vLLM with its calls for RL (docs/vllm.md), or set "
                "engine.options.reload_path and weights_folder if the server loads from disk"
            )
        from penstock.weights.model_weights import checked_weights

        async with self._updating:
            weights = await asyncio.to_thread(checked_weights, self._fetch, source)
            async with loader.prepared(source, weights) as place:
                await self._watch()
                async with self._holding(loader):
                    await self._load(loader, source, place)
                    self._version, self._digest = version, source.digest
        return source.digest

    async def _load(self, loader: WeightLoader, source: WeightHandle, place: WeightPlace) -> None:
        """Load into the server; end the engine if it refuses, as its weights are unknown then."""
        try:
            await loader.load(self._server, source, place)
        except HttpError as error:
            await self._end(f"weights {source.version} were not loaded: {error}")
        if self._end_reason:
            raise EngineError(f"engine openai: {self._end_reason}")

    @asynccontextmanager
    async def _holding(self, loader: WeightLoader) -> AsyncIterator[None]:
        """Hold requests during a load, unless a pause holds them already."""
        self._requests.gate.clear()
        if self._paused is None or loader.native_pause:
            await self._hold(loader.native_pause)
        yield
        if self._paused is None:
            await self._release()

    # ---- loss of the server

    async def _watch(self) -> None:
        """Keep an idle connection to a server that gets weights, so that it cannot restart unnoticed."""
        if self._watching is not None:
            return
        try:
            reader, writer = await self._server.connect()
        except HttpError as error:
            await self._end(str(error))
            raise EngineError(f"engine openai: {self._end_reason}") from error
        self._watching = asyncio.create_task(self._wait_closed(reader, writer))

    async def _wait_closed(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Consumes nothing, produces the end of the engine; waits for the connection, woken when it closes.

        A server that still reports our weights has only closed an idle connection.
        """
        try:
            while True:
                with suppress(OSError):
                    await reader.read(1)
                self._same_process.clear()
                writer.close()
                reader, writer = await self._server.connect()
                async with self._updating:
                    assert self._loader is not None, "weights were loaded before, by this loader"
                    if not await self._loader.holds(self._server, self._version, self._digest):
                        raise HttpError(f"{self._server.url}: it was started again")
                self._same_process.set()
        except HttpError as error:
            self._watching = None
            await self._end(f"the server is lost: {error}")
        finally:
            writer.close()

    async def _end(self, reason: str) -> None:
        """End the engine: every request fails with the reason, until the engine is started again."""
        self._end_reason = reason
        self._open_gates()
        for stream in self._streams:
            stream.end_now()
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])

    # ---- the rest of the protocol

    async def sleep(self) -> None:
        """Do nothing: the server manages its own memory."""

    async def wake(self) -> None:
        """Do nothing, like `sleep`."""

    async def stats(self) -> EngineStats:
        if self._failed and not self._end_reason:
            try:
                await self._server.check_health()
            except HttpError as error:
                await self._end(f"the server is lost: {error}")
        if self._end_reason:
            raise EngineError(f"engine openai: {self._end_reason}")
        paused, live = self._paused is not None, self._streaming
        return self._requests.stats(self._version, self._digest, paused=paused, live=live)

    async def close(self) -> None:
        self._end_reason = "it was closed"
        await self._requests.abort_all()
        await self._stop_watching()
        await self._server.close()


def _continued(remote: RemoteRequest) -> GenerationRequest:
    """The request with the tokens so far as part of its response."""
    if not remote.ids:
        return remote.request
    tokens = np.concatenate([remote.request.response_ids, np.array(remote.ids, np.int32)])
    return replace(remote.request, response_ids=tokens)
