"""The service inside this process: clients with the SDK's methods, and nothing else running.

    service = penstock.Service("demo")
    trainer = service.create_lora_training_client(rank=8)

Commands go through the same log as those of HTTP: a notebook that was killed goes on with `resume_training_client`.
Datums, prompts and parameters may be those of the SDK, or the plain ones below.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.errors import RunError, UserError
from penstock.store import wire

if TYPE_CHECKING:
    from penstock.service.core import ServiceCore

_OWNER = "local"


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


@dataclass(slots=True)
class SampledSequence:
    """One response."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


@dataclass(slots=True)
class SampleResponse:
    """The responses to a prompt; log-probs of the prompt, if they were asked for, have None at its start."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(slots=True)
class Future:
    """The answer to a command, when it is done."""

    _waiting: ThreadFuture[Any]
    _read: Callable[[bytes], Any] = field(repr=False)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer; raise UserError or RunError if the command failed."""
        command = self._waiting.result(timeout)
        if command.outcome == "done":
            return self._read(command.result)
        failure = json.loads(command.result)
        kind = UserError if failure["category"] == "user" else RunError
        raise kind(failure["error"])


class Service:
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
        self._session = self._call(self._of(self._core.create_session, _OWNER))
        self._num_models = self._num_samplers = 0

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @staticmethod
    async def _of(function: Callable[..., Any], *values: Any) -> Any:
        return function(*values)

    def _submit(
        self, read: Callable[[bytes], Any], kind: str, line: str, seq: int, body: bytes
    ) -> Future:
        """Log a command; the future of its answer."""
        request_id = self._call(self._of(self._core.submit, _OWNER, kind, line, seq, body))

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
    ) -> TrainingClient:
        """A new model: adapters of this rank; with rank 0 all weights are trained."""
        lora = {"rank": rank, "seed": seed, "train_mlp": train_mlp, "train_attn": train_attn}
        fields = {"base_model": base_model or self._core.base_names[0], "lora_config": lora}
        line, seq = f"{self._session}:train", self._num_models
        self._num_models += 1
        made = self._submit(json.loads, "create_model", line, seq, json.dumps(fields).encode())
        return TrainingClient(self, made.result()["model_id"])

    def resume_training_client(self, model_id: str) -> TrainingClient:
        """A model of an earlier process, after the last command that it logged."""
        self._call(self._of(self._core.settings_of, _OWNER, model_id))
        sql = "SELECT max(seq) FROM commands WHERE line = ?"
        ((last,),) = self._call(self._of(self._core.log.query, sql, (model_id,)))
        return TrainingClient(self, model_id, last or 0)

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """Samples from a checkpoint, tinker://..., or from the base model."""
        fields: dict[str, Any] = {"session_id": self._session, "model_path": model_path}
        fields |= {
            "sampling_session_seq_id": self._next_sampler(),
            "base_model": self._core.base_names[0],
        }
        return SamplingClient(self, self._call(self._of(self._core.create_sampler, _OWNER, fields)))

    def list_checkpoints(self) -> list[str]:
        """The paths of the checkpoints of this folder, the newest first."""
        rows = self._call(self._of(self._core.checkpoints, _OWNER))
        return [row["path"] for row in rows]

    def delete_checkpoint(self, path: str) -> None:
        self._call(self._of(self._core.delete_checkpoint, _OWNER, path))

    def _next_sampler(self) -> int:
        self._num_samplers += 1
        return self._num_samplers - 1

    def close(self) -> None:
        """Stop; the folder keeps everything."""
        if self._thread.is_alive():
            self._call(self._core.close())
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TrainingClient:
    """One model that is trained. Calls return futures at once, and are done in their order."""

    def __init__(self, service: Service, model_id: str, last_seq: int = 0) -> None:
        self._service, self.model_id, self._seq = service, model_id, last_seq

    def _command(
        self, kind: str, read: Callable[[bytes], Any] = json.loads, **fields: Any
    ) -> Future:
        self._seq += 1
        body = json.dumps(fields).encode()
        return self._service._submit(read, kind, self.model_id, self._seq, body)

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
        self._seq += 1
        body = wire.encode("ForwardBackwardRequest", values)
        submit = self._service._submit
        return submit(_read_output, "forward_backward", self.model_id, self._seq, body)

    def forward(self, data: Sequence[Any], loss_fn: str) -> Future:
        """The log-probs and the loss, without gradients."""
        return self.forward_backward(data, loss_fn, forward_only=True)

    def forward_backward_custom(
        self, data: Sequence[Any], loss_fn: Callable[[Any, Any], tuple[Any, dict[str, float]]]
    ) -> Future:
        """Add the gradients of your own loss: loss_fn(data, log-probs as torch tensors) -> (loss, metrics)."""
        import torch

        plain = [Datum(_ids(d.model_input), {**d.loss_fn_inputs}) for d in data]
        zeros = [np.zeros(len(datum.model_input), np.float32) for datum in plain]
        for datum, nothing in zip(plain, zeros, strict=True):
            datum.loss_fn_inputs = {"weights": nothing, **datum.loss_fn_inputs}
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
        read = functools.partial(_with_metrics, added._read, own)
        return Future(added._waiting, read)

    def optim_step(self, adam_params: Any) -> Future:
        """One step of AdamW with the gradients so far."""
        params = adam_params if isinstance(adam_params, dict) else _fields(adam_params)
        return self._command("optim_step", _read_metrics, adam_params=params)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        from penstock.config.demo import resolve_model_path
        from penstock.data.chat import load_tokenizer

        config = self._service._core.config.model
        source = config.tokenizer or resolve_model_path(config.path)
        return load_tokenizer(source, trust_remote_code=config.trust_remote_code)

    def save_state(self, name: str) -> Future:
        """Save weights and moments; the path of the checkpoint."""
        return self._command("save_weights", _read_path, path=name)

    def save_weights_for_sampler(self, name: str) -> Future:
        """Save weights to sample from; the path of the checkpoint."""
        return self._command("save_weights_for_sampler", _read_path, path=name)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """A client that samples from the weights of this moment."""
        number = self._service._next_sampler()
        kind = "save_weights_for_sampler"
        made = self._command(kind, sampling_session_seq_id=number).result()
        return SamplingClient(self._service, made["sampling_session_id"])

    def load_state(self, path: str) -> Future:
        """Load weights; the optimizer begins anew."""
        return self._command("load_weights", _read_path, path=path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> Future:
        """Load weights and moments."""
        return self._command("load_weights", _read_path, path=path, optimizer=True)


class SamplingClient:
    """Samples from one set of weights."""

    def __init__(self, service: Service, sampler_id: str) -> None:
        self._service, self.sampler_id, self._seq = service, sampler_id, 0

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
    ) -> Future:
        """Responses to a prompt."""
        chunk = {"type": "encoded_text", "tokens": _ids(prompt)}
        fields = {
            "prompt": {"chunks": [chunk]},
            "num_samples": num_samples,
            "sampling_params": _fields(sampling_params),
            "prompt_logprobs": include_prompt_logprobs,
        }
        self._seq += 1
        body = json.dumps(fields).encode()
        return self._service._submit(_read_samples, "asample", self.sampler_id, self._seq, body)

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


def _with_metrics(
    read: Callable[[bytes], ForwardBackwardOutput], metrics: dict[str, float], octets: bytes
) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(read(octets).loss_fn_outputs, metrics)


def _read_metrics(octets: bytes) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(octets)["metrics"]
    return metrics


def _read_path(octets: bytes) -> str:
    return str(json.loads(octets)["path"])


def _read_samples(octets: bytes) -> SampleResponse:
    message = wire.decode("SampleResponse", octets)
    sequences = [
        SampledSequence(
            np.frombuffer(sequence.get("tokens", b""), "<i4").tolist(),
            np.frombuffer(sequence.get("logprobs", b""), "<f4").tolist(),
            "length" if sequence.get("stop_reason") else "stop",
        )
        for sequence in message.get("sequences", [])
    ]
    prompt = None
    if "prompt_logprobs" in message:
        numbers = np.frombuffer(message["prompt_logprobs"], "<f4")
        prompt = [None if np.isnan(number) else float(number) for number in numbers]
    return SampleResponse(sequences, prompt)
