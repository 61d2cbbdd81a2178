"""Settings of the transformers engine, and the sizes that are chosen where they name none.

On a GPU: how many requests are decoded together, and how many tokens the KV cache holds, from the memory
and from what the run will ask. On a CPU the KV cache grows on demand. Plain dataclasses, so that benchmarks
and workers can build an engine without the config tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.config.demo import resolve_model_path
from penstock.engine.protocol import check_options
from penstock.errors import UserError
from penstock.model.families import Family
from penstock.model.loading import choose_device, compute_dtype

if TYPE_CHECKING:
    from penstock.config import Config

CPU_SLOTS = 64
UNKNOWN_LOAD = 256  # requests in flight if no config says how many there will be
_SHORTER = 4  # the longest request against the usual one
LEAST_SLOTS, MOST_SLOTS = 16, 1024  # more slots make steps longer and hardly more tokens


@dataclass(slots=True, frozen=True, kw_only=True)
class Load:
    """What a run asks of one engine and its device."""

    requests: int = UNKNOWN_LOAD  # most requests in flight at this engine
    longest: int = 0  # most tokens of one request, prompt and response; 0: the model's positions
    engines: int = 1  # engines on the same device, this one included
    beside_trainer: bool = False  # a trainer works on the same device at the same time
    sessions: bool = False  # requests go on from earlier ones

    @classmethod
    def of(cls, config: Config, index: int, gpus: int) -> Load:
        """The load of engine `index` on a machine with so many visible GPUs."""
        launch, tasks = config.launch, config.tasks
        samplings = [config.task_sampling(task) for task in tasks]
        groups = config.train.groups_per_step * max(_steps_ahead(config, task) for task in tasks)
        requests = groups * max(sampling.num_generations for sampling in samplings)
        engines, beside = 1 if gpus or launch.kind == "ray" else launch.num_producers, False
        if launch.kind != "ray" and gpus:  # Ray reserves GPUs for each actor
            before = 0 if launch.colocate else launch.num_consumers
            one_device = config.model.device not in ("auto", "cuda")
            places = [0 if one_device else (before + n) % gpus for n in range(launch.num_producers)]
            engines = places.count(places[index % len(places)])
            trainers = {0} if one_device else {rank % gpus for rank in range(launch.num_consumers)}
            beside = not launch.colocate and places[index % len(places)] in trainers
        share = launch.engine_ray_options(index).num_gpus
        if launch.kind == "ray" and 0 < share < 1:
            engines = round(1 / share)
        return cls(
            requests=math.ceil(requests / launch.num_producers),
            longest=config.longest_sequence,
            engines=engines,
            beside_trainer=beside,
            sessions=any(
                task.agent not in ("single_turn", "demonstration") for task in tasks.values()
            ),
        )


def _steps_ahead(config: Config, task: str) -> float:
    """How many steps' groups a task has in flight at most."""
    produce = config.task_produce(task)
    if produce.strategy == "sync":
        return 1
    return (produce.max_staleness + 1) * config.sync.every_steps + produce.over_sample_threshold


@dataclass(slots=True, frozen=True, kw_only=True)
class UserOptions:
    """[engine.options] of the transformers engine."""

    max_tokens_in_flight: int = 0  # prompts and responses; 0: as slots and memory can hold
    prefill_rows: int = 0  # most prompt tokens to prefill in one step; 0: chosen by the device
    fuse: bool = True  # run the decoder of the model's family, not the model's own code
    pack: bool = True  # on a CPU: keep a second copy of the weights in its library's layout
    cuda_graphs: bool = True
    kv_memory_share: float = 0.6  # share of the device's free memory for keys and values
    router_replay: bool = False  # record the experts of each token, which the trainer then takes


@dataclass(slots=True, frozen=True, kw_only=True)
class TransformersOptions(UserOptions):
    """Settings that the engine reads from the config."""

    path: str = ""
    tokenizer: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    arithmetic: str = "deterministic"
    trust_remote_code: bool = False
    max_slots: int = CPU_SLOTS  # 0: chosen from the GPU's memory and `load`
    load: Load = field(default_factory=Load)
    threads: int = 1
    keep_sessions: bool = (
        False  # sessions go on over new weights with the keys and values they have
    )
    adapters: bool = False  # hold adapters beside the model, which requests name

    OPTION_NAMES = tuple(field.name for field in fields(UserOptions))

    @property
    def prefill_limit(self) -> int:
        return self.prefill_rows or (16384 if self.device.startswith("cuda") else 2048)

    @classmethod
    def from_config(cls, config: Config, index: int) -> Self:
        """Read the settings of engine number `index` of a run."""
        # Trainer ranks take the first GPUs, unless they share them with the engines.
        before = 0 if config.launch.colocate else config.launch.num_consumers
        device = choose_device(config.model.device, before + index)
        path = resolve_model_path(config.model.path)
        return cls(
            path=path,
            tokenizer=config.model.tokenizer or path,
            dtype=compute_dtype(config.model, device),
            device=str(device),
            arithmetic=config.model.arithmetic,
            trust_remote_code=config.model.trust_remote_code,
            max_slots=config.engine.max_slots or (0 if device.type == "cuda" else CPU_SLOTS),
            load=Load.of(config, index, torch.cuda.device_count()),
            threads=config.engine.threads,
            keep_sessions=config.sync.on_update == "keep",
            **check_options(UserOptions, config.engine.options),
        )


def check_router_replay(model: Any, family: Family | None) -> None:
    """Refuse to record the experts of a model whose routers are not those of the decoder."""
    if family is None or family.experts is None:
        kind = model.config.get_text_config().model_type
        lacks = "no experts" if family is not None else "no row in the table of families"
        raise UserError(
            f"engine.options.router_replay: got true with a model of type {kind}, which has {lacks}, allowed: "
            "false, or a family with experts (gpt_oss, mixtral, qwen3_moe)"
        )


def longest_request(model: torch.nn.Module, options: TransformersOptions) -> int:
    """The most tokens of one request, by the model's positions and the token budget."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    return min(positions, options.max_tokens_in_flight or positions)


@dataclass(slots=True, frozen=True, kw_only=True)
class Sizes:
    """The sizes of an engine on a GPU."""

    slots: int  # requests that are decoded together
    tokens: int  # tokens of the KV cache


def choose_sizes(
    load: Load,
    *,
    free: int,
    total: int,
    bytes_per_token: int,
    positions: int,
    max_slots: int = 0,
    max_tokens_in_flight: int = 0,
    kv_memory_share: float = 0.6,
) -> Sizes:
    """The sizes for a device with `free` of `total` bytes free after the weights are loaded.

    Slots: as many as there are requests, if the KV cache can hold a quarter of the longest request in each:
    prompts are rarely as long as they may be. KV cache: what the longest request in each slot needs, at most
    `kv_memory_share` of the free memory; engines on one device share it evenly, and a trainer that works
    beside them keeps half of the device. Requests that do not fit wait for others to end. Sessions get twice
    as many tokens: what a turn computes is kept for the next one.
    """
    for_engines = total // 2 if load.beside_trainer else total
    usable = min(free, for_engines // load.engines)
    fits = int(usable * kv_memory_share) // bytes_per_token
    longest = min(load.longest or positions, positions)
    most = min(load.requests, MOST_SLOTS, _SHORTER * fits // (longest + 2))
    slots = max_slots or max(LEAST_SLOTS, most)
    ceiling = slots * (min(positions, max_tokens_in_flight or longest) + 2)
    if not max_tokens_in_flight:
        return Sizes(slots=slots, tokens=min(fits, (1 + load.sessions) * ceiling))
    needed = max_tokens_in_flight + 2 * slots
    room = int(free * kv_memory_share) // bytes_per_token
    if needed > room:
        raise UserError(
            f"engine.options.max_tokens_in_flight: got {max_tokens_in_flight}, "
            f"allowed: about {room} with the free device memory"
        )
    return Sizes(slots=slots, tokens=min(needed, ceiling))


def describe(sizes: Sizes, load: Load, *, free: int, bytes_per_token: int) -> str:
    """One line for the log: the sizes, and what they were chosen from."""
    size = sizes.tokens * bytes_per_token / 2**30
    others = f", {load.engines} engines on this device" if load.engines > 1 else ""
    beside = ", beside a trainer" if load.beside_trainer else ""
    return (
        f"{sizes.slots} slots, KV cache of {sizes.tokens:,} tokens ({size:.1f} GiB of "
        f"{free / 2**30:.1f} GiB free{others}{beside}) for {load.requests} requests of at most "
        f"{load.longest or 'any number of'} tokens"
    )
