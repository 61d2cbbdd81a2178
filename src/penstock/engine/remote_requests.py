"""Requests that vLLM, in this process or behind a URL, runs for us, each followed by one of our tasks.

`RemoteRequests` keeps the tokens that have arrived, so that an abort can return them, and a gate that
holds new requests back during a pause or an update. Does not know which backend samples the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engine.protocol import EngineStats, FinishReason, Generation, GenerationRequest
from penstock.types import VersionSegment, extend_segments


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """One request and the tokens that have arrived for it."""

    request: GenerationRequest
    admitted: bool = False  # the request has passed the gate
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: tuple[VersionSegment, ...] = ()
    task: asyncio.Task[Generation] | None = None

    def generation(self, reason: FinishReason, error: str = "") -> Generation:
        return Generation(
            request_id=self.request.request_id,
            token_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            segments=self.segments,
            finish_reason=reason,
            error=error,
        )

    def truncate(self, tokens: int) -> None:
        """Drop all but the first `tokens` tokens."""
        del self.ids[tokens:], self.logprobs[tokens:]
        segments: tuple[VersionSegment, ...] = ()
        for segment in self.segments:
            length = min(segment.length, tokens)
            segments, tokens = extend_segments(segments, segment.version, length), tokens - length
        self.segments = segments


def sampling_fields(request: GenerationRequest, end_ids: Sequence[int] = ()) -> dict[str, Any]:
    """vLLM's names and values for a request's sampling; a partial response shortens the limits."""
    sampling, tokens = request.sampling, len(request.response_ids)
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_tokens": max(0, sampling.min_tokens - tokens),
        "max_tokens": sampling.max_tokens - tokens,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "seed": (request.seed + tokens) % (1 << 31),
    }
    if not sampling.ends:
        fields["ignore_eos"], end_ids = True, ()
    if stops := sorted({*end_ids, *sampling.stop_token_ids}):  # not every server knows these two
        fields["stop_token_ids"] = stops
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


Follow = Callable[[RemoteRequest], Awaitable[Generation]]


class RemoteRequests:
    """All requests of one engine."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()  # set: new requests may pass
        self._tokens = 0  # tokens that have arrived, for all requests
        self._by_id: dict[str, RemoteRequest] = {}

    def stats(
        self, version: int, digest: str, *, paused: bool, live: bool = True, slots: int = 0
    ) -> EngineStats:
        running = sum(remote.admitted for remote in self._by_id.values())
        return EngineStats(
            policy_version=version,
            digest=digest,
            running=running,
            waiting=len(self._by_id) - running,
            tokens_generated=self._tokens,
            busy_s=0.0,
            paused=paused,
            live=live,
            slots=slots,
        )

    async def run(self, request: GenerationRequest, follow: Follow) -> Generation:
        """Wait for the gate, then follow the request; an abort returns the tokens so far."""
        remote = RemoteRequest(request)
        if request.request_id in self._by_id:
            return remote.generation("error", f"request {request.request_id} is running already")
        if len(request.response_ids) >= request.sampling.max_tokens:
            return remote.generation("length")
        remote.task = asyncio.create_task(self._follow(remote, follow))
        self._by_id[request.request_id] = remote
        try:
            return await asyncio.shield(remote.task)
        except asyncio.CancelledError:
            if remote.task.cancelled():  # cancelled by abort, pause or close, not by the caller
                return remote.generation("abort")
            remote.task.cancel()
            await asyncio.gather(remote.task, return_exceptions=True)
            raise
        finally:
            self._by_id.pop(request.request_id, None)

    async def _follow(self, remote: RemoteRequest, follow: Follow) -> Generation:
        await self.gate.wait()
        remote.admitted = True
        return await follow(remote)

    def add(
        self, remote: RemoteRequest, ids: Sequence[int], logprobs: Sequence[float], version: int
    ) -> None:
        """Append tokens that were sampled under `version`."""
        remote.ids.extend(ids)
        remote.logprobs.extend(logprobs)
        remote.segments = extend_segments(remote.segments, version, len(ids))
        self._tokens += len(ids)

    async def abort(self, request_id: str) -> None:
        remote = self._by_id.get(request_id)
        if remote is not None and remote.task is not None:
            remote.task.cancel()
            await asyncio.wait([remote.task])

    async def abort_all(self) -> None:
        await asyncio.gather(*(self.abort(request_id) for request_id in list(self._by_id)))

    async def wait_running(self) -> None:
        """Wait until every request that has passed the gate has ended."""
        tasks = [r.task for r in self._by_id.values() if r.admitted and r.task is not None]
        if tasks:
            await asyncio.wait(tasks)
