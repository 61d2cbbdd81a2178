"""What every inference engine does. No framework is imported here.

An engine turns token ids into token ids with the log-probabilities of its sampling distribution.
It never sees text except to watch for stop strings, and never judges what it made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np

from penstock.types import VersionSegment, WeightHandle

if TYPE_CHECKING:
    from penstock.config import SamplingConfig

PauseMode = Literal["abort", "wait", "keep"]
FinishReason = Literal["stop", "length", "abort", "error"]
SetAside = Callable[[], AbstractAsyncContextManager[Any]]  # lends one engine of several, or None


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingParams:
    """How one response is sampled. Log-probs are those of this distribution, after all of it."""

    temperature: float = 1.0  # 0: greedy; its log-probs are those at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # added to the model's own end of sequence
    stop: tuple[str, ...] = ()  # strings; the text that matched stays in the response

    @classmethod
    def from_config(cls, config: SamplingConfig, **changes: Any) -> Self:
        """The fields of [sampling], with `changes` over them."""
        fields = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_tokens": config.min_tokens,
            "max_tokens": config.max_tokens,
            "stop": tuple(config.stop),
        }
        return cls(**{**fields, **changes})


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationRequest:
    """One response to sample. `response_ids` of a partial rollout go on from where it stopped."""

    request_id: str
    prompt_ids: np.ndarray  # int32
    sampling: SamplingParams
    seed: int
    response_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @property
    def num_tokens(self) -> int:
        """The most tokens that this request can hold at its end."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(slots=True, frozen=True, kw_only=True)
class Generation:
    """The NEW tokens of a request (those after `response_ids`), however it ended."""

    request_id: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    segments: tuple[VersionSegment, ...]  # of the new tokens
    finish_reason: FinishReason
    error: str = ""  # with finish_reason "error": why


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for displays and schedulers."""

    policy_version: int
    digest: str
    running: int  # requests that hold a slot
    waiting: int  # requests that do not yet
    tokens_generated: int  # since the engine started
    busy_s: float  # time spent in model steps
    paused: bool = False
    batch_invariant: bool = False  # a rollout's bits do not depend on who shares its batch
    live: bool = True  # tokens are counted as they are made, not when a response is whole
    moved: int = 0  # responses that were taken from a slow engine and went on at another


class InferenceEngine(Protocol):
    """Consumes requests, produces generations; weights change under it by `update_weights`."""

    async def start(self) -> None:
        """Load what is needed and be ready; raises with the reason if that fails."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """One response. A fault comes back as finish_reason "error", a user's mistake raises."""

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Several at once, in their order; equal prompts share one prefill."""

    async def abort(self, request_id: str) -> None:
        """End one request now; its `generate` returns the partial with finish_reason "abort"."""

    async def pause(self, mode: PauseMode = "abort") -> None:
        """abort: return partials; wait: let running ones finish; keep: hold them where they are."""

    async def resume(self) -> None:
        """Go on after a pause."""

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Switch between two decode steps, or asleep; returns the digest of what is loaded now."""

    async def sleep(self) -> None:
        """Give device memory back; weights are kept on the host."""

    async def wake(self) -> None:
        """Undo `sleep`, with the newest weights."""

    async def stats(self) -> EngineStats:
        """A snapshot."""

    async def close(self) -> None:
        """End the engine; what still runs comes back with finish_reason "abort"."""
