"""Requests of one prompt on their way through a pool of engines.

Keeps what each of them has brought so far: one that was cut short to go on at another engine ends as one
response, whose parts are joined here. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest
from penstock.pool.dispatch import Work
from penstock.types import extend_segments


@dataclass(slots=True, eq=False, kw_only=True)
class Family(Work):
    """`left`: what is still to be made, each from the tokens that it has."""

    left: list[GenerationRequest]
    done: dict[str, Generation] = field(default_factory=dict)
    parts: dict[str, Generation] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)  # by those who asked
    room: asyncio.Future[bool] | None = None  # it waits; False: there is nothing to wait for

    @classmethod
    def of(
        cls, requests: list[GenerationRequest], *, wanted: int | None = None, least_version: int = 0
    ) -> Self:
        longest = max(request.sampling.max_tokens for request in requests)
        return cls(
            size=len(requests),
            tokens=sum(request.num_tokens for request in requests),
            longest=longest,
            least_version=least_version,
            wanted=wanted,
            left=requests,
        )

    def take(self, made: Iterable[Generation]) -> None:
        """Answers of an engine; what was cut short to move stays in `left` with its tokens."""
        left = []
        by_id = {request.request_id: request for request in self.left}
        for one in made:
            name = one.request_id
            if one.finish_reason == "error":
                self.done[name] = one
                continue
            whole = joined(self.parts.pop(name, None), one)
            moves = self.moves_to is not None and name not in self.aborted
            if one.finish_reason == "abort" and moves:
                self.parts[name] = whole
                left.append(_going_on(by_id[name], one))
                newest = max((part.version for part in whole.segments), default=0)
                self.least_version = max(self.least_version, newest)  # it never goes back
            else:
                self.done[name] = whole
        self.left = left

    def retry(self, requests: Iterable[GenerationRequest]) -> None:
        """Those that failed with their engine are made once more, from the tokens of before."""
        self.left += [r for r in requests if self.done[r.request_id].finish_reason == "error"]
        for request in self.left:
            self.done.pop(request.request_id, None)

    def end(
        self, reason: FinishReason, names: Iterable[str] | None = None, error: str = ""
    ) -> None:
        """Those of `left` (all of them, or `names`) end here with what they have."""
        ending = {request.request_id for request in self.left}
        ending &= ending if names is None else set(names)
        for name in ending:
            ended = replace(_nothing(name), finish_reason=reason, error=error)
            part = self.parts.pop(name, None)
            self.done[name] = ended if reason == "error" else joined(part, ended)
        self.left = [request for request in self.left if request.request_id not in ending]

    def wake(self, has_room: bool) -> None:
        if self.room is not None and not self.room.done():
            self.room.set_result(has_room)


def joined(before: Generation | None, after: Generation) -> Generation:
    """Two parts of one response, which ends as the second one did."""
    if before is None:
        return after
    segments = before.segments
    for segment in after.segments:
        segments = extend_segments(segments, segment.version, segment.length)
    return replace(
        after,
        token_ids=np.concatenate([before.token_ids, after.token_ids]),
        logprobs=np.concatenate([before.logprobs, after.logprobs]),
        segments=segments,
    )


def _going_on(request: GenerationRequest, made: Generation) -> GenerationRequest:
    if not len(made.token_ids):
        return request
    ids = np.concatenate([request.response_ids, made.token_ids]).astype(np.int32)
    return replace(request, response_ids=ids)


def _nothing(name: str) -> Generation:
    return Generation(
        request_id=name,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason="abort",
    )
