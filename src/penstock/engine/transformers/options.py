"""Settings of the transformers engine.

A plain dataclass, so that benchmarks and workers can build an engine without the config tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch

from penstock.config.demo import resolve_model_path
from penstock.engine.protocol import check_options
from penstock.engine.transformers.sizes import CPU_SLOTS, Load
from penstock.model.loading import choose_device, compute_dtype

if TYPE_CHECKING:
    from penstock.config import Config


@dataclass(slots=True, frozen=True, kw_only=True)
class TransformersOptions:
    """Settings that the engine reads from the config; the last block is [engine.options]."""

    path: str = ""
    tokenizer: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    trust_remote_code: bool = False
    max_slots: int = CPU_SLOTS  # 0: chosen from the GPU's memory and `load`
    load: Load = field(default_factory=Load)
    threads: int = 1
    # [engine.options]
    max_tokens_in_flight: int = (
        0  # of prompts and responses; 0: as many as slots and memory can hold
    )
    prefill_rows: int = 0  # most prompt tokens to prefill in one step; 0: chosen by the device
    fuse: bool = True  # one matrix product for q, k, v and one for gate, up
    pack: bool = True  # on a CPU: keep a second copy of the weights in its library's layout
    cuda_graphs: bool = True
    kv_memory_share: float = 0.6  # share of the free device memory for the KV cache

    OPTION_NAMES = (
        "max_tokens_in_flight",
        "prefill_rows",
        "fuse",
        "pack",
        "cuda_graphs",
        "kv_memory_share",
    )

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
            trust_remote_code=config.model.trust_remote_code,
            max_slots=config.engine.max_slots or (0 if device.type == "cuda" else CPU_SLOTS),
            load=Load.of(config, index, torch.cuda.device_count()),
            threads=config.engine.threads,
            **check_options(cls, cls.OPTION_NAMES, config.engine.options),
        )
