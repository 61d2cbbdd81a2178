"""The service inside this process: clients with the SDK's methods, and nothing else running.

    service = penstock.Service("demo")
    trainer = service.create_lora_training_client(rank=8)

Commands go through the same log as those of HTTP: a notebook that was killed goes on with `resume_training_client`.
Datums, prompts and parameters may be those of the SDK, or the plain ones below.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import Future as ThreadFuture
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.errors import PenstockError, RunError, UserError
from penstock.store import wire

if TYPE_CHECKING:
    from penstock.service.core import ServiceCore

_OWNER = "local"
_WAITS = (
    "create_",
    "save_weights_and_",
    "forward_backward_custom",
)  # methods that return no future


@dataclass(slots=True)
class Datum:
    """One sequence: its tokens, and arrays over them such as target_tokens and weights."""

    model_input: Any  # token ids
    loss_fn_inputs: Mapping[str, Any]


@dataclass(slots=True)
class AdamParams:
    """AdamW's parameters for one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(slots=True)
class SamplingParams:
    """How to sample; `stop` is strings or token ids, [] lets nothing stop, not even the model's own end."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(slots=True)
class ForwardBackwardOutput:
    """The log-probs of each datum's targets, and the loss as `loss:sum`."""

    loss_fn_outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]


MostLikely = list[list[tuple[int, float]] | None]  # tokens and log-probs at each place


@dataclass(slots=True)
class SampledSequence:
    """One response."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    topk_logprobs: MostLikely | None = None


@dataclass(slots=True)
class SampleResponse:
    """The responses to a prompt; log-probs of the prompt, if they were asked for, have None at its start."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: MostLikely | None = None


@dataclass(slots=True)
class Future:
    """The answer to a command, when it is done."""

    _waiting: ThreadFuture[Any]
    _read: Callable[[bytes], Any] = field(repr=False)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer; raise UserError or RunError if the command failed."""
        try:
            command = self._waiting.result(timeout)
        except CancelledError:
            raise RunError(
                "service: it was closed before this command had its answer; the next service of its "
                "folder does it"
            ) from None
        if command.outcome == "done":
            return self._read(command.result)
        failure = json.loads(command.result)
        kind = UserError if failure["category"] == "user" else RunError
        raise kind(failure["error"])

    async def result_async(self, timeout: float | None = None) -> Any:
        return await asyncio.to_thread(self.result, timeout)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.result_async().__await__()


class _WithAsync:
    """Has NAME_async for each method NAME, as the SDK has it for programs with an event loop."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_async"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        method = getattr(self, name.removesuffix("_async"))

        async def call(*values: Any, **named: Any) -> Any:
            if name.startswith(_WAITS):
                return await asyncio.to_thread(method, *values, **named)
            made = method(
                *values, **named
            )  # in this thread: commands keep the order of their calls
            return await made if isinstance(self, SamplingClient) else made

        return call


class Service(_WithAsync):
    """A service of one model; see docs/service.md. Close it, or use it in a `with`."""

    def __init__(
        self,
        model: str = "demo",
        *,
        folder: str | Path = "runs/service",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """folder: of the log and the checkpoints, gone on with if it is there; settings: of `penstock config`."""
        from penstock.run.session import model_config
        from penstock.service.core import ServiceCore

        words = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
        config = model_config(model, words)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._core: ServiceCore = ServiceCore(config, Path(folder))
        self._thread.start()
        try:
            self._call(self._core.start())
        except BaseException:
            self._end()
            raise
        self._session = self._now(self._core.create_session, _OWNER)
        self._models, self._samplers = itertools.count(), itertools.count()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop.is_closed():
            work.close()
            raise UserError("service: got a call after close(), allowed: calls before it")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _now(self, function: Callable[..., Any], *values: Any) -> Any:
        """What a function of the core gives, called where the core runs."""

        async def call() -> Any:
            return function(*values)

        return self._call(call())

    def _submit(
        self, read: Callable[[bytes], Any], kind: str, line: str, seq: int, body: bytes
    ) -> Future:
        """Log a command; the future of its answer."""
        request_id = self._now(self._core.submit, _OWNER, kind, line, seq, body)

        async def answer() -> Any:
            while (command := await self._core.answer(_OWNER, request_id, 60.0)) is None:
                pass
            return command

        return Future(asyncio.run_coroutine_threadsafe(answer(), self._loop), read)

    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        """A new model: adapters of this rank; with rank 0 all weights are trained. The head has no adapter."""
        lora = {"rank": rank, "seed": seed, "train_mlp": train_mlp, "train_attn": train_attn}
        name = base_model or self._core.base_names[0]
        fields = {"base_model": name, "lora_config": lora, "user_metadata": user_metadata}
        line, body = f"{self._session}:train", json.dumps(fields).encode()
        made = self._submit(_read, "create_model", line, next(self._models), body)
        return TrainingClient(self, made.result().model_id)

    def create_training_client_from_state(
        self, path: str, optimizer: bool = False
    ) -> TrainingClient:
        """A new model with the weights of a checkpoint."""
        model_id = self._now(self._core.checkpoint, _OWNER, path)["model_id"]
        own = self._now(self._core.settings_of, _OWNER, model_id)
        made = self.create_lora_training_client(None, own.rank, None, own.train_mlp, own.train_attn)
        made._command("load_weights", path=path, optimizer=optimizer).result()
        return made

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient:
        """A new model with the weights and moments of a checkpoint."""
        return self.create_training_client_from_state(path, optimizer=True)

    def resume_training_client(self, model_id: str) -> TrainingClient:
        """A model of an earlier process, after the last command that it logged."""
        self._now(self._core.settings_of, _OWNER, model_id)
        sql = "SELECT max(seq) FROM commands WHERE line = ?"
        ((last,),) = self._now(self._core.log.query, sql, (model_id,))
        return TrainingClient(self, model_id, last or 0)

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Samples from a checkpoint, tinker://..., or from the base model."""
        fields = {"session_id": self._session, "sampling_session_seq_id": next(self._samplers)}
        fields |= {"model_path": model_path, "base_model": base_model or self._core.base_names[0]}
        return SamplingClient(self, self._now(self._core.create_sampler, _OWNER, fields))

    def get_server_capabilities(self) -> SimpleNamespace:
        """The base model, in `supported_models`."""
        name, longest = self._core.base_names[0], self._core.models.longest
        served = SimpleNamespace(model_name=name, max_context_length=longest)
        return SimpleNamespace(supported_models=[served])

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        from penstock.config.demo import resolve_model_path
        from penstock.data.chat import load_tokenizer

        config = self._core.config.model
        source = config.tokenizer or resolve_model_path(config.path)
        return load_tokenizer(source, trust_remote_code=config.trust_remote_code)

    def list_checkpoints(self) -> list[str]:
        """The paths of the checkpoints of this folder, the newest first."""
        rows = self._now(self._core.checkpoints, _OWNER)
        return [row["path"] for row in rows]

    def delete_checkpoint(self, path: str) -> None:
        self._now(self._core.delete_checkpoint, _OWNER, path)

    def close(self) -> None:
        """Stop; the folder keeps everything."""
        if self._thread.is_alive():
            self._call(self._core.close())
            self._end()

    def _end(self) -> None:
        async def give_up() -> None:
            """Let those who wait for answers hear that none will come."""
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        self._call(give_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TrainingClient(_WithAsync):
    """One model that is trained. Calls return futures at once, and are done in their order."""

    def __init__(self, service: Service, model_id: str, last_seq: int = 0) -> None:
        self._service, self.model_id, self._seq = service, model_id, last_seq
        self._counting = threading.Lock()
        self.create_sampling_client = service.create_sampling_client
        self.get_tokenizer = service.get_tokenizer

    def _command(self, kind: str, **fields: Any) -> Future:
        return self._submit(_read, kind, json.dumps(fields).encode())

    def _submit(self, read: Callable[[bytes], Any], kind: str, body: bytes) -> Future:
        with self._counting:  # a gap would let all later commands wait for ever
            self._seq += 1
            try:
                return self._service._submit(read, kind, self.model_id, self._seq, body)
            except PenstockError:  # it was refused
                self._seq -= 1
                raise

    def forward_backward(
        self,
        data: Sequence[Any],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        *,
        forward_only: bool = False,
    ) -> Future:
        """Add the gradients of a loss, a sum over all tokens, to those that wait for optim_step."""
        settings = {key: float(value) for key, value in (loss_fn_config or {}).items()}
        values = {
            "data": [_datum(datum) for datum in data],
            "loss_fn": loss_fn,
            "loss_fn_config": settings,
            "forward_only": forward_only or None,
        }
        body = wire.encode("ForwardBackwardRequest", values)
        return self._submit(_read_output, "forward_backward", body)

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> Future:
        """The log-probs and the loss, without gradients."""
        return self.forward_backward(data, loss_fn, loss_fn_config, forward_only=True)

    def forward_backward_custom(
        self, data: Sequence[Any], loss_fn: Callable[[Any, Any], tuple[Any, dict[str, float]]]
    ) -> Future:
        """Add the gradients of your own loss: loss_fn(data, log-probs as torch tensors) -> (loss, metrics)."""
        import torch

        plain = []
        for datum in data:
            ids = _ids(datum.model_input)
            plain.append(Datum(ids, {"weights": [0.0] * len(ids), **datum.loss_fn_inputs}))
        scored = self.forward(plain, "cross_entropy").result()
        logprobs = [
            torch.tensor(output["logprobs"], requires_grad=True)
            for output in scored.loss_fn_outputs
        ]
        loss, metrics = loss_fn(data, logprobs)
        gradients = torch.autograd.grad(loss, logprobs)
        for datum, gradient in zip(plain, gradients, strict=True):
            datum.loss_fn_inputs = {**datum.loss_fn_inputs, "weights": -gradient.numpy()}
        added = self.forward_backward(plain, "cross_entropy")
        own = {**metrics, "loss:sum": float(loss.detach())}
        return Future(
            added._waiting,
            lambda octets: ForwardBackwardOutput(added._read(octets).loss_fn_outputs, own),
        )

    def optim_step(self, adam_params: Any) -> Future:
        """One step of AdamW with the gradients so far."""
        params = adam_params if isinstance(adam_params, dict) else _fields(adam_params)
        return self._command("optim_step", adam_params=params)

    def save_state(self, name: str, **about: Any) -> Future:
        """Save weights and moments, with ttl_seconds and user_metadata if they are given."""
        return self._command("save_weights", path=name, **about)

    def save_weights_for_sampler(self, name: str, **about: Any) -> Future:
        """Save weights to sample from, with ttl_seconds and user_metadata if they are given."""
        return self._command("save_weights_for_sampler", path=name, **about)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """A client that samples from the weights of this moment."""
        number = next(self._service._samplers)
        kind = "save_weights_for_sampler"
        made = self._command(kind, sampling_session_seq_id=number).result()
        return SamplingClient(self._service, made.sampling_session_id)

    def load_state(self, path: str) -> Future:
        """Load weights; the optimizer begins anew."""
        return self._command("load_weights", path=path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> Future:
        """Load weights and moments."""
        return self._command("load_weights", path=path, optimizer=True)


class SamplingClient(_WithAsync):
    """Samples from one set of weights."""

    def __init__(self, service: Service, sampler_id: str) -> None:
        self._service, self.sampler_id, self._seq = service, sampler_id, itertools.count(1)
        self.get_tokenizer = service.get_tokenizer

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> Future:
        """Responses to a prompt; log-probs of the prompt and the k most likely tokens, if they are asked for."""
        chunk = {"type": "encoded_text", "tokens": _ids(prompt)}
        fields = {
            "prompt": {"chunks": [chunk]},
            "num_samples": num_samples,
            "sampling_params": _fields(sampling_params),
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
        }
        seq, body = next(self._seq), json.dumps(fields).encode()
        return self._service._submit(_read_samples, "asample", self.sampler_id, seq, body)

    def compute_logprobs(self, prompt: Any) -> Future:
        """The log-prob of each token of the prompt; None for the first."""
        asked = self.sample(prompt, 1, SamplingParams(max_tokens=1), include_prompt_logprobs=True)
        return Future(asked._waiting, lambda octets: _read_samples(octets).prompt_logprobs)


# ---- between plain values and messages


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, or of a record of the SDK."""
    if isinstance(value, AdamParams | SamplingParams):
        return asdict(value)
    return dict(value.model_dump() if hasattr(value, "model_dump") else vars(value))


def _ids(tokens: Any) -> list[int]:
    return [int(token) for token in (tokens.to_ints() if hasattr(tokens, "to_ints") else tokens)]


def _datum(datum: Any) -> dict[str, Any]:
    tokens = np.array(_ids(datum.model_input), "<i4").tobytes()
    inputs = {key: _tensor(key, value) for key, value in datum.loss_fn_inputs.items()}
    return {"model_input": [{"encoded_text": {"tokens": tokens}}], "loss_fn_inputs": inputs}


def _tensor(key: str, value: Any) -> dict[str, Any]:
    array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    whole = key == "target_tokens"
    octets = array.astype("<i8" if whole else "<f4").tobytes()
    dtype = wire.INT64 if whole else wire.FLOAT32
    return {"dense": octets, "dtype": dtype, "shape": list(array.shape)}


def _read_output(octets: bytes) -> ForwardBackwardOutput:
    message = wire.decode("ForwardBackwardOutput", octets)
    tensor = message["loss_fn_outputs"][0]["fields"]["logprobs"]
    shape = [-1, *tensor.get("trailing_shape", [])]
    bounds = np.frombuffer(tensor["offsets"], "<i8") // 4
    values = np.frombuffer(tensor["data"], "<f4")
    outputs = [
        {"logprobs": values[start:end].reshape(shape)} for start, end in itertools.pairwise(bounds)
    ]
    return ForwardBackwardOutput(outputs, message["metrics"])


def _read(octets: bytes) -> SimpleNamespace:
    """An answer in JSON: `path` of a checkpoint, `metrics` of a step."""
    return SimpleNamespace(**json.loads(octets))


def _read_most_likely(table: wire.Message | None) -> MostLikely | None:
    from penstock.service.batches import NO_LOGPROB

    if table is None:
        return None
    shape = table["length"], table["k"]
    ids = np.frombuffer(table["token_ids"], "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(table["logprobs"], "<f4").reshape(shape).tolist()
    rows = [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]
    return [[pair for pair in row if pair[1] != NO_LOGPROB] or None for row in rows]


def _read_samples(octets: bytes) -> SampleResponse:
    message = wire.decode("SampleResponse", octets)
    sequences = [
        SampledSequence(
            np.frombuffer(sequence.get("tokens", b""), "<i4").tolist(),
            np.frombuffer(sequence.get("logprobs", b""), "<f4").tolist(),
            "length" if sequence.get("stop_reason") else "stop",
            _read_most_likely(sequence.get("topk_sampled_logprobs")),
        )
        for sequence in message.get("sequences", [])
    ]
    prompt = None
    if "prompt_logprobs" in message:
        numbers = np.frombuffer(message["prompt_logprobs"], "<f4")
        prompt = [None if np.isnan(number) else float(number) for number in numbers]
    return SampleResponse(sequences, prompt, _read_most_likely(message.get("topk_prompt_logprobs")))
