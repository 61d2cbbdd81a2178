"""The contract that every inference engine keeps, and the checks that backends share.

An engine turns token ids into token ids with the log-probabilities of its sampling distribution. It
decodes text only to find stop strings, and never scores what it generates. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np

from penstock.errors import UserError
from penstock.types import Choices, VersionSegment, WeightHandle, pickled_by_position

if TYPE_CHECKING:
    import torch

    from penstock.config import SamplingConfig

PauseMode = Literal["abort", "wait", "keep"]
FinishReason = Literal["stop", "length", "abort", "error"]
Fetch = Callable[[WeightHandle], "Iterable[tuple[str, torch.Tensor]]"]  # reads named weights


@pickled_by_position
@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Sampling settings of one response. Log-probs are those of the distribution after all of them."""

    temperature: float = 1.0  # 0: greedy, with log-probs at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end of sequence
    stop: tuple[str, ...] = ()  # strings; the matched text stays in the response
    ends: bool = True  # the model's own end of sequence ends the response

    @classmethod
    def from_config(cls, config: SamplingConfig, **changes: Any) -> Self:
        """The fields of [sampling], overridden by `changes`."""
        shared = {f.name for f in fields(cls)} & type(config).model_fields.keys()
        configured = {name: getattr(config, name) for name in shared}
        return cls(**{**configured, "stop": tuple(config.stop), **changes})


@pickled_by_position
@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """One response to sample; a partial rollout continues after its `response_ids`."""

    request_id: str
    prompt_ids: np.ndarray  # int32
    sampling: SamplingParams
    seed: int
    response_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    session: str = ""  # requests of one session continue each other; "": it has no other request
    adapter: str = ""  # one that the engine holds; "": the model as it is

    @property
    def num_tokens(self) -> int:
        """The most tokens this request can hold, prompt and response."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@pickled_by_position
@dataclass(slots=True, frozen=True)
class Generation:
    """The NEW tokens of a request (those after its `response_ids`), however it ended."""

    request_id: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    segments: tuple[VersionSegment, ...]  # versions of the new tokens
    finish_reason: FinishReason
    error: str = ""  # the cause, if finish_reason is "error"
    # of the passes that the request had not made before; None: the engine records none
    choices: Choices | None = None


class Generations(list[Generation]):
    """Several generations, pickled with all their tokens together: an array of its own costs as much for each."""

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return Generations, ()
        ids = np.concatenate([generation.token_ids for generation in self], dtype=np.int32)
        logprobs = np.concatenate([generation.logprobs for generation in self], dtype=np.float32)
        unique: dict[tuple[VersionSegment, ...], tuple[VersionSegment, ...]] = {}
        rows = [
            (
                generation.request_id,
                len(generation.token_ids),
                unique.setdefault(generation.segments, generation.segments),
                generation.finish_reason,
                generation.error,
                generation.choices,
            )
            for generation in self
        ]
        return _split_generations, (rows, ids.tobytes(), logprobs.tobytes())


def _split_generations(
    rows: list[tuple[str, int, tuple[VersionSegment, ...], FinishReason, str, Choices | None]],
    id_bytes: bytes,
    logprob_bytes: bytes,
) -> Generations:
    """Generations whose arrays cannot be written: a rollout keeps them without a copy."""
    ids, logprobs = np.frombuffer(id_bytes, np.int32), np.frombuffer(logprob_bytes, np.float32)
    generations, start = Generations(), 0
    for name, length, segments, reason, error, choices in rows:
        place = slice(start, start := start + length)
        generations.append(
            Generation(name, ids[place], logprobs[place], segments, reason, error, choices)
        )
    return generations


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for displays and schedulers."""

    policy_version: int
    digest: str
    running: int  # requests in a slot
    waiting: int  # requests without a slot
    tokens_generated: int  # since the engine started
    busy_s: float  # time spent in model steps
    paused: bool = False
    batch_invariant: bool = False  # a rollout has the same bits in any batch
    slots: int = 0  # most requests that run at once; 0: unknown
    tokens_prefilled: int = 0  # tokens of requests that were computed; stored ones are not
    most_adapters: int = 0  # that it holds at once; 0: none
    live: bool = True  # tokens are counted as they are sampled; False: per finished response


class InferenceEngine(Protocol):
    """Consumes requests, produces generations; `update_weights` changes the weights in between."""

    async def start(self) -> None:
        """Load the model and get ready; raise with the reason if that fails."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Return a fault as finish_reason "error"; raise a user's mistake."""

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Sample several responses and return them in order; equal prompts share one prefill."""

    async def abort(self, request_id: str) -> None:
        """End one request now; its `generate` returns the partial with finish_reason "abort"."""

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling. abort: return partials; wait: finish running requests; keep: hold them."""

    async def resume(self) -> None:
        """Continue after a pause."""

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Load weights between two decode steps or during sleep; return the loaded digest."""

    async def sleep(self) -> None:
        """Release device memory; keep the weights on the host."""

    async def wake(self) -> None:
        """Undo `sleep`, with the newest weights."""

    async def stats(self) -> EngineStats:
        """A snapshot."""

    async def close(self) -> None:
        """End the engine; return running requests with finish_reason "abort"."""


def check_request(
    request: GenerationRequest, *, longest: int, vocabulary: int | None = None
) -> None:
    """Raise UserError for a request that an engine of this size can never serve."""
    name, sampling = f"request {request.request_id}", request.sampling
    if not len(request.prompt_ids):
        raise UserError(f"{name}: got an empty prompt, allowed: at least 1 token")
    if request.num_tokens > longest:
        raise UserError(
            f"{name}: got {len(request.prompt_ids)} prompt + {sampling.max_tokens} new tokens, "
            f"allowed: {longest} together"
        )
    for ids in (request.prompt_ids, request.response_ids):
        if vocabulary and len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise UserError(
                f"{name}: got token ids from {ids.min()} to {ids.max()}, allowed: 0 to {vocabulary - 1}, the rows of "
                "the model's embeddings (a tokenizer that got tokens needs a model that was resized to it)"
            )
    if vocabulary and any(not 0 <= stop < vocabulary for stop in sampling.stop_token_ids):
        raise UserError(
            f"{name}: got stop token ids {list(sampling.stop_token_ids)}, allowed: 0 to {vocabulary - 1}"
        )
    if sampling.max_tokens < 1 or sampling.min_tokens > sampling.max_tokens:
        raise UserError(
            f"{name}: got min_tokens {sampling.min_tokens} and max_tokens {sampling.max_tokens}, "
            "allowed: max_tokens >= 1 and not below min_tokens"
        )
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and 0 <= sampling.top_k < 2**63):
        raise UserError(
            f"{name}: got temperature {sampling.temperature}, top_p {sampling.top_p}, top_k "
            f"{sampling.top_k}, allowed: temperature >= 0, 0 < top_p <= 1, 0 <= top_k < 2**63"
        )


def check_options(settings: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """[engine.options] if `settings` has a field of that name and type for every key."""
    allowed = {f.name: f for f in fields(settings)}
    for key, value in options.items():
        if key not in allowed:
            raise UserError(f"engine.options: got {key!r}, allowed: {', '.join(allowed)}")
        default, factory = allowed[key].default, allowed[key].default_factory
        kind = type(factory() if factory is not MISSING else default)
        kinds: Any = {float: (float, int), tuple: (list, tuple)}.get(kind, (kind,))
        if not isinstance(value, kinds):
            raise UserError(f"engine.options.{key}: got {value!r}, allowed: {kinds[0].__name__}")
    return options
