"""Settings of the transformers engine, and how its model and tokenizer are loaded.

The settings are a plain dataclass: benchmarks and workers build an engine without the config tree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.demo import resolve_model_path
from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.errors import UserError
from penstock.models.loading import choose_device, compute_dtype, load_causal_lm

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.engine.transformers.sequences import TextOf


@dataclass(slots=True, frozen=True, kw_only=True)
class TransformersOptions:
    """What the engine is told; the last block is [engine.options]."""

    path: str = ""
    tokenizer: str = ""
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    trust_remote_code: bool = False
    max_slots: int = 64
    max_tokens_in_flight: int = 0  # 0: what the slots and the memory can hold
    threads: int = 1
    # [engine.options]
    prefill_rows: int = 0  # most prompt tokens prefilled within one step; 0: by the device
    fuse: bool = True  # q, k, v and gate, up as one matrix product each
    pack: bool = True  # on a CPU: a second copy of the weights, laid out for the matrix library
    cuda_graphs: bool = True
    kv_memory_share: float = 0.6  # of the free device memory, for keys and values

    OPTION_NAMES = ("prefill_rows", "fuse", "pack", "cuda_graphs", "kv_memory_share")

    @property
    def prefill_limit(self) -> int:
        return self.prefill_rows or (16384 if self.device.startswith("cuda") else 2048)

    @classmethod
    def from_config(cls, config: Config, index: int) -> Self:
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
            max_slots=config.engine.max_slots,
            max_tokens_in_flight=config.engine.max_tokens_in_flight,
            threads=config.engine.threads,
            **check_options(cls, cls.OPTION_NAMES, config.engine.options),
        )


def check_options(settings: type, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """[engine.options] with unknown keys and wrong types refused."""
    defaults = {f.name: f.default for f in fields(settings)}
    for key, value in given.items():
        if key not in names:
            raise UserError(f"engine.options: got {key!r}, allowed: {', '.join(names)}")
        kind = type(defaults[key])
        if not isinstance(value, (int, float) if kind is float else kind):
            raise UserError(f"engine.options.{key}: got {value!r}, allowed: {kind.__name__}")
    return given


def load_model(options: TransformersOptions) -> torch.nn.Module:
    """Load the engine's model with the KV-cache attention in its layers."""
    model: torch.nn.Module = load_causal_lm(
        options.path,
        dtype=options.dtype,
        device=torch.device(options.device),
        trust_remote_code=options.trust_remote_code,
        attention=IMPLEMENTATION,
    )
    return model


def text_decoder(options: TransformersOptions) -> TextOf:
    """ids -> text, for stop strings; the tokenizer is loaded when the first one is asked for."""
    loaded: list[Any] = []

    def text_of(ids: list[int]) -> str:
        if not loaded:
            from transformers import AutoTokenizer

            try:
                loaded.append(AutoTokenizer.from_pretrained(options.tokenizer))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"model.tokenizer: got {options.tokenizer!r}, which cannot be loaded; "
                    "allowed: a tokenizer, as sampling.stop has strings"
                ) from error
        return loaded[0].decode(ids, skip_special_tokens=False)

    return text_of
