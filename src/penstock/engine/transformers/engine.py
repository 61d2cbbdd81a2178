"""The default engine: continuous batching over any transformers decoder, in a thread of its own.

The event loop only posts orders and awaits replies (`mailbox.py`); the thread owns the model. The thread
consumes requests, produces generations, waits for orders when idle, and is woken by each order. What
happens within a step is up to the runner (`cpu_runner.py`, `cuda_runner.py`).
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.data.chat import load_tokenizer, response_end_ids
from penstock.engine.protocol import (
    EngineStats,
    Fetch,
    FinishReason,
    Generation,
    GenerationRequest,
    Generations,
    PauseMode,
    check_request,
)
from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.engine.transformers.mailbox import Burst, Inbox, Order, Replies, Reply
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.transformers.sequences import Finished, Runner, Sequence, TextOf
from penstock.errors import EngineError, PenstockError, UserError
from penstock.model.arithmetic import use_arithmetic, use_threads
from penstock.model.loading import add_end_ids, load_causal_lm
from penstock.types import WeightHandle
from penstock.waits import tell_stage
from penstock.weights.model_weights import checked_weights, model_digest
from penstock.weights.offload import first_sentences

if TYPE_CHECKING:
    from penstock.config import Config, ModelConfig

_LOADING = threading.Lock()  # transformers can load only one model at a time in a process

_UNKNOWN_RESPONSE = 0.5  # expected share of max_tokens before the first response has ended
_NEWEST_SHARE = 0.1  # weight of the last response in the expected length
_LONGER = 1.25  # responses are expected to be this much longer once they did not fit

_NO_DISTRIBUTION = "the model's logits are no distribution (NaN, infinite, or all masked)"


class TransformersEngine:
    """See `InferenceEngine`."""

    def __init__(
        self,
        load: Callable[[], torch.nn.Module],
        *,
        fetch: Fetch,
        options: TransformersOptions | None = None,
        text_of: TextOf | None = None,
        name: str = "engine",
    ) -> None:
        self._load, self._fetch, self._name = load, fetch, name
        self._fetching = asyncio.Lock()
        self._options = options or TransformersOptions()
        self._text_of: TextOf = text_of or _no_tokenizer
        self._thread: threading.Thread | None = None
        self._ended = EngineError(f"{name}: it was not started")  # what callers get from now on
        self._reset()
        self._inbox.close()

    @classmethod
    def from_config(
        cls, config: Config, *, fetch: Fetch, index: int = 0, adapters: bool = False
    ) -> Self:
        """Build the engine that a config describes; `index` counts the engines of a run."""
        options = replace(TransformersOptions.from_config(config, index), adapters=adapters)
        return cls(
            lambda: _load_model(options, config.model),
            fetch=fetch,
            options=options,
            text_of=_text_decoder(options),
            name=f"engine-{index}",
        )

    def _reset(self) -> None:
        self._inbox = Inbox()
        self._runner: Runner | None = None
        self._waiting: deque[Sequence] = deque()
        self._waiting_prompts: Counter[bytes] = Counter()
        self._by_id: dict[str, Sequence] = {}
        self._num_submitted = 0
        self._expected_response = 0.0  # tokens of a response; 0: none has ended yet
        self._paused: PauseMode | None = None
        self._pausing: list[Reply] = []  # pauses with mode "wait" that still wait for requests
        self._asleep = self._closing = False
        self._version, self._digest = 0, ""
        self._tokens_generated, self._tokens_prefilled, self._busy_s = 0, 0, 0.0
        self._burst = Burst()

    # ---- on the event loop

    async def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            if not self._inbox.closed:
                raise EngineError(f"{self._name}: it is running already")
            await asyncio.to_thread(self._thread.join)  # the thread failed and is about to end
        self._reset()
        ready = Reply()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name=self._name, daemon=True
        )
        self._thread.start()
        await ready

    async def generate(self, request: GenerationRequest) -> Generation:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        self._check(requests)
        replies = Replies(len(requests))
        sequences = [
            Sequence(request, replies.setter(place)) for place, request in enumerate(requests)
        ]

        def refuse(error: Exception) -> None:
            for sequence in sequences:
                sequence.deliver(sequence.failed(str(error)))

        self._post(Order(lambda: self._submit(sequences), refuse))
        try:
            return Generations(await replies)
        except asyncio.CancelledError:
            self._post(Order(lambda: self._withdraw(sequences), lambda _: None))
            raise

    async def abort(self, request_id: str) -> None:
        await self._ask(lambda: self._abort(request_id))

    async def pause(self, mode: PauseMode = "abort") -> None:
        reply = Reply()
        self._post(Order(lambda: self._pause(mode, reply), reply.fail))
        await reply

    async def resume(self) -> None:
        await self._ask(self._resume)

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Fetch and check the weights while decoding runs; stop decoding only for the final copy."""
        async with self._fetching:
            weights = await self._fetch_weights(source)
            return await self._ask(lambda: self._switch(version, weights, source.digest))

    async def hold_adapter(self, name: str, source: WeightHandle) -> None:
        """Fetch and check an adapter, and keep it beside the model; see `RowAdapters.hold`."""
        async with self._fetching:
            weights = await asyncio.to_thread(checked_weights, self._fetch, source)
            await self._ask(lambda: self._live_runner.hold_adapter(name, weights))

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        adapters = self._live_runner.adapters
        assert adapters is not None
        await self._ask(lambda: adapters.drop(name))

    async def _fetch_weights(self, source: WeightHandle) -> dict[str, torch.Tensor]:
        """Checked weights; any error but ours (of the device) ends the engine."""
        if self._runner is None:
            raise self._ended
        try:
            model = self._runner.model
            return await asyncio.to_thread(checked_weights, self._fetch, source, model)
        except PenstockError:
            raise
        except Exception as error:  # of any type, as it came from the device: the thread dies of it
            fault = error

            def die() -> None:
                raise fault

            return await self._ask(die)

    async def sleep(self) -> None:
        async with self._fetching:  # let an update finish first
            await self._ask(self._sleep)

    async def wake(self) -> None:
        async with self._fetching:  # do not capture graphs while weights arrive on the device
            await self._ask(self._wake)

    async def stats(self) -> EngineStats:
        return await self._ask(self._stats)

    async def close(self) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._post(Order(self._close, lambda _: None))
            await asyncio.to_thread(thread.join)

    async def _ask(self, action: Callable[[], Any]) -> Any:
        reply = Reply()

        def run() -> None:
            try:
                reply.set(action())
            except PenstockError as error:  # the order was refused and changed nothing
                reply.fail(error)

        self._post(Order(run, reply.fail))
        return await reply

    def _post(self, order: Order) -> None:
        if not self._inbox.post(order):
            order.fail(self._ended)

    def _check(self, requests: list[GenerationRequest]) -> None:
        """Raise UserError for a request that cannot be served; the members of a group are checked once."""
        runner, last = self._runner, None
        for request in requests:
            if last is not None and _differ_by_seed(request, last):
                continue
            if runner is not None:
                if not (runner.adapters.holds(request.adapter) if runner.adapters else not request.adapter):  # fmt: skip
                    raise UserError(
                        f"request {request.request_id}: got adapter {request.adapter!r}, allowed: one that is held"
                    )
                check_request(request, vocabulary=runner.vocabulary, longest=runner.longest)
            if request.sampling.stop:
                self._text_of([])  # raises if there is no tokenizer
            last = request

    # ---- in the thread

    def _run(self, ready: Reply) -> None:
        """Consumes orders, produces generations; waits in the inbox, woken by each order."""
        current: Order | None = Order(lambda: None, ready.fail)
        try:
            with torch.inference_mode():
                self._open_model()
                ready.set(None)
                while not self._closing:
                    current = self._inbox.take(wait_s=self._order_wait_s())
                    if current is not None:
                        current.run()
                    elif self._can_step():
                        self._step()
            self._end("it was closed", None)
        except Exception as error:  # the thread ends here: every waiting caller must get the error
            self._end(f"it died: {_describe(error)}", error)
            if current is not None:
                current.fail(error if isinstance(error, PenstockError) else self._ended)

    def _open_model(self) -> None:
        use_threads(self._options.threads)
        with _LOADING:
            model = self._load()
        use_arithmetic(self._options.arithmetic, model)
        tell_stage("hashing the weights")
        self._digest = model_digest(model)
        tell_stage("preparing to decode")
        self._runner = _make_runner(model, self._options, self._text_of)

    def _end(self, reason: str, error: Exception | None) -> None:
        failure = self._ended = EngineError(f"{self._name}: {reason}")
        if error is not None:
            failure.add_note("".join(traceback.format_exception(error)))
        orders = self._inbox.close()
        for sequence in list(self._by_id.values()):
            if error is None:
                self._finish(sequence, "abort")
            else:  # the fault may have corrupted the tokens so far
                sequence.deliver(sequence.failed(str(failure)))
        for reply in self._pausing:
            reply.fail(failure)
        for order in orders:
            order.fail(failure)
        self._runner = None

    @property
    def _live_runner(self) -> Runner:
        assert self._runner is not None
        return self._runner

    def _can_step(self) -> bool:
        if self._asleep or self._paused in ("keep", "abort") or self._runner is None:
            return False
        running = len(self._by_id) > len(self._waiting)
        return running or (self._paused is None and bool(self._waiting))

    def _order_wait_s(self) -> float | None:
        """How long to wait for an order before the next step; None: there is no step to do yet."""
        if not self._can_step():
            self._burst.over()
            return None
        if len(self._by_id) > len(self._waiting):
            return 0.0
        return self._burst.wait_s(time.perf_counter())

    def _step(self) -> None:
        runner, started = self._live_runner, time.perf_counter()
        fits = self._make_room()
        new = self._admit() if fits and self._paused is None else []
        running = len(self._by_id) - len(self._waiting)
        finished = runner.step(new, set(self._waiting_prompts))
        self._tokens_generated += running
        self._busy_s += time.perf_counter() - started
        self._finish_slots(finished)

    def _finish_slots(self, finished: Finished) -> None:
        for slot, reason in finished:
            sequence = self._live_runner.table.sequences[slot]
            assert sequence is not None
            self._finish(sequence, reason)
        self._answer_pauses()

    def _admit(self) -> list[Sequence]:
        """Admit waiting requests in order, as slots, memory and the prefill limit allow."""
        runner, prefill_tokens = self._live_runner, 0
        admitted: list[Sequence] = []
        prefilled: set[bytes] = set()
        limit, expected = self._most_tokens, self._expected_tokens() if self._waiting else 0
        while self._waiting:
            sequence = self._waiting[0]
            cost = sequence.num_prefill_tokens - runner.known(sequence)
            if sequence.prompt_key in prefilled:
                cost = 0  # computed in the same step
            size = sequence.num_prefill_tokens + self._expected_rest(sequence)
            if (admitted and prefill_tokens + cost > self._options.prefill_limit) or (
                expected and expected + size > limit
            ):
                break
            # the first request gets all that it may need, so that one at least always ends
            if not runner.admit(sequence, size if expected else sequence.request.num_tokens):
                break
            self._forget_waiting(self._waiting.popleft())
            if sequence.prompt_key:
                prefilled.add(sequence.prompt_key)
            prefill_tokens += cost
            expected += size
            sequence.mark_version(0, self._version)
            admitted.append(sequence)
        self._tokens_prefilled += prefill_tokens
        return admitted

    @property
    def _most_tokens(self) -> int:
        """The most tokens of the running requests."""
        return self._options.max_tokens_in_flight or self._live_runner.kv_tokens

    def _expected_rest(self, sequence: Sequence, num_new: int = 0) -> int:
        """The tokens that a request is expected to sample still, of which it has `num_new` in its slot."""
        request = sequence.request
        done = len(request.response_ids) + num_new
        most = request.sampling.max_tokens
        expected = self._expected_response or _UNKNOWN_RESPONSE * most
        return max(1, int(min(expected, most)) - done)

    def _expected_tokens(self) -> int:
        """The tokens that the running requests are expected to hold when they end."""
        table = self._live_runner.table
        return sum(
            int(table.length[sequence.slot])
            + self._expected_rest(sequence, int(table.num_new[sequence.slot]))
            for sequence in table.running
        )

    def _make_room(self) -> bool:
        """Send the newest requests back to the queue until the next step fits; False: some were sent."""
        table, fits = self._live_runner.table, True
        while not self._fits():
            if fits:
                self._synchronize()  # which may end some
                fits = False
                continue
            newest = max(table.running, key=lambda sequence: sequence.number)
            ids, logprobs = table.output(newest.slot)
            choices = self._live_runner.choices(newest.slot)
            self._live_runner.release(newest.slot)
            newest.send_back(ids, logprobs, choices)
            self._waiting.appendleft(newest)
            self._expected_response *= _LONGER
        return fits

    def _fits(self) -> bool:
        """Whether there is memory for one token more of each running request."""
        table = self._live_runner.table
        slots = [sequence.slot for sequence in table.running]
        within = int(table.length[slots].sum()) + len(slots) <= self._most_tokens
        return (within or len(slots) <= 1) and self._live_runner.make_room()

    def _forget_waiting(self, sequence: Sequence) -> None:
        if sequence.prompt_key:
            self._waiting_prompts[sequence.prompt_key] -= 1
            if not self._waiting_prompts[sequence.prompt_key]:
                del self._waiting_prompts[sequence.prompt_key]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Answer a waiting or running request and forget it."""
        del self._by_id[sequence.request.request_id]
        if sequence.slot < 0:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
                self._forget_waiting(sequence)
            sequence.deliver(sequence.waiting(reason))
            return
        ids, logprobs = self._live_runner.table.output(sequence.slot)
        choices = self._live_runner.choices(sequence.slot)
        self._live_runner.release(sequence.slot)
        length = len(sequence.request.response_ids) + len(ids)
        before = self._expected_response or length
        self._expected_response = before + _NEWEST_SHARE * (length - before)
        error = _NO_DISTRIBUTION if reason == "error" else ""
        sequence.deliver(sequence.generation(ids, logprobs, reason, error, choices))

    def _submit(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            request = sequence.request
            if request.request_id in self._by_id:
                message = f"request {request.request_id} is running already"
                sequence.deliver(sequence.failed(message))
            elif len(request.response_ids) >= request.sampling.max_tokens:
                sequence.deliver(sequence.waiting("length"))
            else:
                sequence.number = self._num_submitted = self._num_submitted + 1
                self._by_id[request.request_id] = sequence
                self._waiting.append(sequence)
                if sequence.prompt_key:
                    self._waiting_prompts[sequence.prompt_key] += 1

    def _withdraw(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._by_id.get(sequence.request.request_id) is sequence:
                self._abort(sequence.request.request_id)

    def _abort(self, request_id: str) -> None:
        self._synchronize()
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")
            self._answer_pauses()

    def _synchronize(self) -> None:
        """Wait for device work, so that the slot table is exact."""
        self._finish_slots(self._live_runner.synchronize())

    def _pause(self, mode: PauseMode, reply: Reply) -> None:
        self._paused = mode
        self._synchronize()
        if mode == "abort":
            for sequence in list(self._by_id.values()):
                self._finish(sequence, "abort")
        if mode == "wait":
            self._pausing.append(reply)
        else:
            reply.set(None)
        self._answer_pauses()

    def _answer_pauses(self) -> None:
        """Answer pauses with mode "wait" once no request is running."""
        if len(self._by_id) == len(self._waiting):
            for reply in self._pausing:
                reply.set(None)
            self._pausing.clear()

    def _resume(self) -> None:
        self._paused = None
        for reply in self._pausing:
            reply.set(None)
        self._pausing.clear()

    def _switch(self, version: int, weights: dict[str, torch.Tensor], digest: str) -> str:
        """Load checked weights; a sleeping engine wakes with them."""
        self._synchronize()
        runner = self._live_runner
        runner.load(weights)
        self._version, self._digest = version, digest
        for sequence in runner.table.running:
            sequence.mark_version(int(runner.table.num_new[sequence.slot]), version)
        return self._digest

    def _sleep(self) -> None:
        if not self._asleep:
            self._synchronize()
            for sequence in self._live_runner.table.running:
                self._finish(sequence, "abort")
            self._answer_pauses()
            self._live_runner.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._live_runner.wake()
            self._asleep = False

    def _stats(self) -> EngineStats:
        adapters = self._live_runner.adapters
        return EngineStats(
            policy_version=self._version,
            digest=self._digest,
            running=len(self._by_id) - len(self._waiting),
            waiting=len(self._waiting),
            tokens_generated=self._tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            busy_s=self._busy_s,
            paused=self._paused is not None,
            batch_invariant=self._live_runner.batch_invariant,
            slots=len(self._live_runner.table.sequences),
            most_adapters=0 if adapters is None else adapters.most,
        )

    def _close(self) -> None:
        self._synchronize()
        self._closing = True


def _load_model(options: TransformersOptions, config: ModelConfig) -> torch.nn.Module:
    """Load the engine's model with the KV-cache attention in its layers."""
    model: torch.nn.Module = load_causal_lm(
        options.path,
        dtype=options.dtype,
        device=torch.device(options.device),
        trust_remote_code=options.trust_remote_code,
        attention=IMPLEMENTATION,
    )
    add_end_ids(model, response_end_ids(config))
    return model


def _text_decoder(options: TransformersOptions) -> TextOf:
    """Ids -> text, for stop strings; the first call loads the tokenizer."""
    loaded: list[Any] = []

    def text_of(ids: list[int]) -> str:
        if not loaded:
            try:
                trusted = options.trust_remote_code
                loaded.append(load_tokenizer(options.tokenizer, trust_remote_code=trusted))
            except UserError as error:
                raise UserError(
                    f"sampling.stop: got strings, which need a tokenizer: {error}"
                ) from error
        return loaded[0].decode(ids, skip_special_tokens=False)

    return text_of


def _make_runner(model: torch.nn.Module, options: TransformersOptions, text_of: TextOf) -> Runner:
    """The runner for the model's device."""
    if next(model.parameters()).device.type == "cuda":
        from penstock.engine.transformers.cuda.cuda_runner import CudaRunner

        return CudaRunner(model, options, text_of)
    from penstock.engine.transformers.cpu.cpu_runner import CpuRunner

    return CpuRunner(model, options, text_of)


def _describe(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{first_sentences(error)}; lower engine.options.kv_memory_share or prefill_rows; "
            "a trainer on the same device releases its memory only with launch.colocate=true"
        )
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


def _differ_by_seed(first: GenerationRequest, second: GenerationRequest) -> bool:
    """Whether two requests ask the same of an engine but for the seed, as those of a group do."""
    same = first.prompt_ids is second.prompt_ids and first.sampling is second.sampling
    same = same and first.adapter == second.adapter
    return same and not len(first.response_ids) and not len(second.response_ids)


def _no_tokenizer(ids: list[int]) -> str:
    raise UserError(
        "sampling.stop: got strings, allowed: none, because the engine has no tokenizer"
    )
