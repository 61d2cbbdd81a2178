"""Sampling from many checkpoints: requests of all adapters and of the base run in one batch of each engine.

Checkpoints of all weights take turns with them: while others wait, one gets no new requests, and those that come later
wait for its next turn. Engines check the digest of what they load against the one that the checkpoint was saved with.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import numpy as np

from penstock.data.sampler import stable_hash
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.errors import EngineError, UserError
from penstock.service.batches import NO_LOGPROB, check_ids, dense, make_rows, readable
from penstock.service.models import Models
from penstock.service.turns import MOST_SAMPLES, PART, Seats, count_samples
from penstock.store import wire
from penstock.store.command_log import Command
from penstock.workers.workers import Engines, all_or_first_error

_NEWEST_SHARE, _LEAST_FILL = 0.2, 0.125  # of a running average
MOST_LIKELY = 1024  # tokens of one place that a request may ask for
_Admitted = deque[asyncio.Future[None]]
_Waiting = tuple[str, Any, _Admitted]  # for a checkpoint: its digest and settings, and who waits


class Samplers:
    """Whose turn it is. `in_trainer` runs a function in the trainer's thread.

    A request gives its seats back when the engines have done it: its log-probs may still wait for the trainer.
    """

    def __init__(
        self,
        models: Models,
        engines: Engines,
        in_trainer: Callable[..., Awaitable[Any]],
        seats: Seats,
        *,
        holds_adapters: bool,
    ) -> None:
        """holds_adapters: False if the model runs by its own code."""
        self._models, self._engines, self._in_trainer = models, engines, in_trainer
        self._seats = seats
        self._holds_adapters = holds_adapters
        self._current, self._running, self._switching = "", 0, False  # "": the base
        self._version = 0
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- turns

    @asynccontextmanager
    async def _turn(self, folder: str, digest: str, settings: Any) -> AsyncIterator[None]:
        """Let the engines have this checkpoint's weights inside the context."""
        if self._switching or self._waiting or folder != self._current:
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(folder, (digest, settings, deque()))[2].append(admitted)
            self._advance()
            try:
                await admitted  # `_switch` has counted it
            except asyncio.CancelledError:
                if not admitted.cancelled() and admitted.exception() is None:
                    self._running -= 1
                    self._advance()
                raise
        else:
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._advance()

    def _advance(self) -> None:
        """Begin the next turn, if the last one is over."""
        if self._running or self._switching or not self._waiting:
            return
        folder, turn = self._waiting.popitem(last=False)
        self._switching = True
        task = asyncio.create_task(self._switch(folder, *turn), name=f"sample {folder}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _switch(self, folder: str, digest: str, settings: Any, waiting: _Admitted) -> None:
        try:
            if folder != self._current:
                source = await self._in_trainer(self._models.scorer, folder, settings)
                digest = digest or await asyncio.to_thread(source.digest)
                self._version += 1
                publish, pool = self._engines.publish, self._engines.pool
                handle = await self._in_trainer(publish, self._version, digest, source.weights)
                await pool.update_weights(self._version, handle)
                self._current = folder
        except (
            Exception
        ) as error:  # whatever it is, those who wait for this checkpoint must hear of it
            for admitted in waiting:
                if not admitted.done():
                    admitted.set_exception(error)
        finally:
            self._switching = False
        for admitted in waiting:
            if not admitted.done():
                self._running += 1
                admitted.set_result(None)
        self._advance()

    # ---- one request

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample from the base."""
        async with self._turn("", "", None):
            return await self._engines.pool.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._engines.pool.abort(request_id)

    async def sample(self, command: Command, folder: str, digest: str, settings: Any) -> bytes:
        """The answer to an asample."""
        name, fields = command.request_id, command.fields
        with readable("asample"):
            prompt = prompt_ids(fields)
            check_ids(prompt, "prompt", vocabulary=self._models.vocabulary)
            is_adapter = settings is not None and settings.rank > 0 and self._holds_adapters
            adapter = f"{folder}@{digest}" if is_adapter else ""
            requests = self._requests(name, fields, prompt, adapter)
            ask = _Scores(fields, prompt, self._models.vocabulary)
        room, wanted = self._models.longest - len(prompt), requests[0].sampling.max_tokens
        if ask.asks_anything and (room, wanted) == (0, 1):  # so the SDK asks for log-probs alone
            generations = [_no_tokens(request) for request in requests]
        else:
            turn = ("", "", None) if adapter else (folder, digest, settings)  # adapters: the base's
            parts = [requests[first : first + PART] for first in range(0, len(requests), PART)]
            made = [self._part(command, turn, part, is_first=not n) for n, part in enumerate(parts)]
            generations = list(chain.from_iterable(await all_or_first_error(*made)))
        if failed := [g for g in generations if g.finish_reason in ("error", "abort")]:
            raise EngineError(f"sampling failed: {failed[0].error or 'the engine was stopped'}")
        lengths = [len(generation.token_ids) for generation in generations]
        share = sum(lengths) / (len(lengths) * max(1, *lengths))
        self._seats.fill += _NEWEST_SHARE * (max(share, _LEAST_FILL) - self._seats.fill)
        self._seats.give(name)
        answer: dict[str, Any] = {"sequences": [_sequence(g) for g in generations]}
        if ask.asks_anything:
            await self._in_trainer(self._add_scores, answer, ask, generations, folder, settings)
        return wire.encode("SampleResponse", answer)

    async def _part(
        self,
        command: Command,
        turn: tuple[str, str, Any],
        requests: list[GenerationRequest],
        *,
        is_first: bool,
    ) -> list[Generation]:
        """What the engines make of some samples of a request; the first ones have their seats already."""
        if not is_first:  # not within a turn, which those who have the seats may wait for
            await self._seats.take(command, len(requests))
        async with self._turn(*turn):
            generations = await self._engines.pool.generate_many(requests)
        self._seats.give(command.request_id, len(requests))
        return generations

    def _requests(
        self, name: str, fields: Mapping[str, Any], prompt: np.ndarray, adapter: str
    ) -> list[GenerationRequest]:
        count, params = count_samples(fields), fields.get("sampling_params") or {}
        if not count:
            got = fields["num_samples"]
            raise UserError(f"num_samples: got {got!r}, allowed: 1 to {MOST_SAMPLES}")
        seed = params.get("seed")
        seed = stable_hash(name) if seed is None else int(seed)
        sampling = sampling_params(params, self._models.longest - len(prompt))
        return [
            GenerationRequest(
                f"{name}/{n}", prompt, sampling, stable_hash(seed, n), adapter=adapter
            )
            for n in range(count)
        ]

    def _add_scores(
        self,
        answer: dict[str, Any],
        ask: _Scores,
        generations: list[Generation],
        folder: str,
        settings: Any,
    ) -> None:
        """Fill in log-probs of the prompt and the most likely tokens, by the trainer's own pass."""
        models, consumer = self._models, self._models.scorer(folder, settings)
        rows = make_rows([ask.prompt], [ask.prompt[1:]])
        if ask.logprobs:
            scores = np.append(np.float32(np.nan), models.score(consumer, rows))
            scores[: ask.first] = np.nan
            answer["prompt_logprobs"] = scores.astype("<f4").tobytes()
        if ask.most_likely:
            ids, logprobs = models.most_likely(consumer, rows, ask.most_likely)
            logprobs[: ask.first - 1], ids[: ask.first - 1] = NO_LOGPROB, 0
            answer["topk_prompt_logprobs"] = _table(
                np.pad(ids, ((1, 0), (0, 0))),  # its first token has no distribution
                np.pad(logprobs, ((1, 0), (0, 0)), constant_values=NO_LOGPROB),
            )
        if ask.targets is not None:
            chosen = np.maximum(ask.targets, 0)
            scores = models.score(consumer, make_rows([ask.prompt], [chosen]))
            answer["target_prompt_logprobs"] = ask.of_targets(scores.reshape(chosen.shape))
        for sequence, generation in zip(answer["sequences"], generations, strict=True):
            if ask.most_likely_sampled:
                whole = np.concatenate([ask.prompt, generation.token_ids])
                sampled = make_rows([whole], [whole[1:]])
                table = models.most_likely(consumer, sampled, ask.most_likely_sampled)
                sequence["topk_sampled_logprobs"] = _table(
                    *(part[len(ask.prompt) - 1 :] for part in table)
                )


class _Scores:
    """What a request asks for beside samples."""

    def __init__(self, fields: Mapping[str, Any], prompt: np.ndarray, vocabulary: int) -> None:
        self.prompt = prompt
        last_n = fields.get("prompt_logprobs_last_n")
        self.logprobs = bool(fields.get("prompt_logprobs")) or last_n is not None
        self.first = 1 if last_n is None else max(1, len(prompt) - int(last_n))  # that is scored
        self.most_likely = _count(fields, "topk_prompt_logprobs")
        self.most_likely_sampled = _count(fields, "topk_sample_logprobs")
        self.targets: np.ndarray | None = None
        self.sparse: dict[str, bytes] = {}  # the indices of sparse targets
        if (given := fields.get("target_prompt_logprobs")) is not None:
            self.targets, self.sparse = _targets(given, len(prompt), vocabulary)
        if fields.get("prompt_alt_tokens_k"):
            raise UserError("prompt_alt_tokens_k: got a number, allowed: 0 (not served here)")

    @property
    def asks_anything(self) -> bool:
        others = self.most_likely or self.most_likely_sampled or self.targets is not None
        return bool(self.logprobs or others)

    def of_targets(self, scores: np.ndarray) -> dict[str, Any]:
        """The log-probs of the targets, in their layout; 0 for none."""
        assert self.targets is not None
        about = {"dtype": wire.FLOAT32, "shape": list(scores.shape)}
        scores = np.where(self.targets >= 0, scores, 0.0).astype("<f4")
        if not self.sparse:
            return {"dense": scores.tobytes(), **about}
        crow, col = (np.frombuffer(octets, "<i8") for octets in self.sparse.values())
        values = scores[np.repeat(np.arange(len(scores)), np.diff(crow)), col]
        return {"sparse_csr": {**self.sparse, "values": values.tobytes()}, **about}


def prompt_ids(fields: Mapping[str, Any]) -> np.ndarray:
    """The token ids of a prompt in JSON."""
    chunks = (fields.get("prompt") or {}).get("chunks") or []
    ids: list[int] = []
    for chunk in chunks:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise UserError(f"prompt: got a chunk {chunk['type']!r}, allowed: 'encoded_text'")
        ids += chunk.get("tokens") or []
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UserError("prompt: got tokens that are no token ids, allowed: integers from 0")
    return np.array(ids, np.int32)


def sampling_params(params: Mapping[str, Any], room: int) -> SamplingParams:
    """The sampling parameters of the protocol as the engine's; `room` is what fits behind the prompt."""
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    texts = tuple(part for part in stops if isinstance(part, str))
    ids = tuple(part for part in stops if isinstance(part, int))
    if len(texts) + len(ids) < len(stops) or "" in texts:
        raise UserError(f"sampling_params.stop: got {stop!r}, allowed: strings or token ids")
    longest = params.get("max_tokens")
    numbers = (params.get("temperature", 1.0), params.get("top_p", 1.0), params.get("top_k", -1))
    if not all(isinstance(n, int | float) for n in (*numbers, longest or 0)):
        raise UserError(f"sampling_params: got {dict(params)}, allowed: numbers")
    return SamplingParams(
        temperature=float(numbers[0]),
        top_k=max(0, int(numbers[2])),
        top_p=float(numbers[1]),
        max_tokens=max(1, room) if longest is None else int(longest),
        stop_token_ids=ids,
        stop=texts,
        ends=stop is None or bool(stops),
    )


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name) or 0
    if not isinstance(value, int) or not 0 <= value <= MOST_LIKELY:
        raise UserError(f"{name}: got {value!r}, allowed: 0 to {MOST_LIKELY}")
    return int(value)


def _targets(
    given: Mapping[str, Any], length: int, vocabulary: int
) -> tuple[np.ndarray, dict[str, bytes]]:
    """The tokens [P-1, K] whose log-probs are asked for, -1 for none; the indices, if they are sparse."""
    place, sparse = "target_prompt_logprobs", {}
    shape = given.get("shape") or [len(given.get("data") or [])]
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MOST_LIKELY:
        allowed = f"[{length - 1}, K] with K from 1 to {MOST_LIKELY}"
        raise UserError(f"{place}: got shape {shape}, allowed: {allowed}")
    try:
        values = np.array(given.get("data"), np.int64).ravel() + 1  # what a sparse one lacks is 0
        for name in ("crow_indices", "col_indices"):
            if (indices := given.get(f"sparse_{name}")) is not None:
                sparse[name] = np.array(indices, "<i8").tobytes()
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{place}: got values that are no integers, allowed: token ids") from None
    octets = values.astype("<i8").tobytes()
    form = {"sparse_csr": {**sparse, "values": octets}} if sparse else {"dense": octets}
    targets = dense({**form, "dtype": wire.INT64, "shape": shape}, place) - 1
    check_ids(np.maximum(targets, 0).ravel(), place, vocabulary=vocabulary)
    return targets, sparse


def _table(ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """The most likely tokens of each place."""
    return {
        "token_ids": ids.astype("<i4").tobytes(),
        "logprobs": logprobs.astype("<f4").tobytes(),
        "k": ids.shape[1],
        "length": ids.shape[0],
    }


def _no_tokens(request: GenerationRequest) -> Generation:
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Generation(request.request_id, *nothing, segments=(), finish_reason="length")


def _sequence(generation: Generation) -> dict[str, Any]:
    return {
        "stop_reason": int(generation.finish_reason == "length"),
        "tokens": generation.token_ids.astype("<i4").tobytes(),
        "logprobs": generation.logprobs.astype("<f4").tobytes(),
    }
