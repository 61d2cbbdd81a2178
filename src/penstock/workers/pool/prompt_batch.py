"""The requests of one prompt on their way through the pool, and their answers so far. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from penstock.engine.protocol import FinishReason, Generation, GenerationRequest
from penstock.workers.pool.dispatch import Work


@dataclass(slots=True, eq=False, kw_only=True)
class PromptBatch(Work):
    """Requests of one prompt; those in `left` have no answer yet, the others are in `done`."""

    left: list[GenerationRequest]
    done: dict[str, Generation] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)  # request ids that a caller aborted
    room: asyncio.Future[bool] | None = None  # set while queued; False: left the queue
    last_engine_deaths: int = 0  # engines that died with this batch while no other engine served

    @classmethod
    def of(cls, requests: list[GenerationRequest], *, least_version: int = 0) -> Self:
        return cls(
            size=len(requests),
            tokens=sum(request.num_tokens for request in requests),
            least_version=least_version,
            left=requests,
        )

    def take(self, answers: Iterable[Generation], *, retry_failed: bool) -> None:
        """Keep an engine's answers to `left`; with `retry_failed`, those that failed stay in `left`."""
        self.done.update((answer.request_id, answer) for answer in answers)
        failed = []
        if retry_failed:
            failed = [r for r in self.left if self.done[r.request_id].finish_reason == "error"]
        for request in failed:
            del self.done[request.request_id]
        self.left = failed

    def end(
        self, reason: FinishReason, names: Collection[str] | None = None, error: str = ""
    ) -> None:
        """Answer requests of `left` (all of them, or those of `names`) with no tokens."""
        if not self.left or not (names is None or names):
            return
        chosen = {request.request_id for request in self.left}
        if names is not None:
            chosen &= set(names)
        self.done.update((name, empty_answer(name, reason, error)) for name in chosen)
        self.left = [request for request in self.left if request.request_id not in chosen]

    def wake(self, has_room: bool) -> None:
        if self.room is not None and not self.room.done():
            self.room.set_result(has_room)


def empty_answer(request_id: str, reason: FinishReason, error: str = "") -> Generation:
    """Return a response without tokens."""
    return Generation(
        request_id=request_id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        segments=(),
        finish_reason=reason,
        error=error,
    )
