"""Settings of the transformers engine, and how its model and tokenizer are loaded.

The settings are a plain dataclass: benchmarks and workers build an engine without the config tree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.engine.transformers.sequences import TextOf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        before = 0 if config.launch.colocate else config.launch.num_consumers
        device = pick_device(config.model.device, before + index)
        dtype = config.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        path = model_path(config.model.path)
        return cls(
            path=path,
            tokenizer=config.model.tokenizer or path,
            dtype=DTYPES[dtype],
            device=device,
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


def pick_device(device: str, index: int) -> str:
    """The GPUs in turn, trainer ranks first; where there is none, or another is named, that."""
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{index % count}" if count else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"model.device: got {device!r}, allowed: cpu (no CUDA device is visible)")
    return device


def model_path(path: str) -> str:
    """Where `model.path` leads: `demo` is the policy that ships."""
    from penstock.demo import resolve_model_path

    return resolve_model_path(path)


def load_model(options: TransformersOptions) -> torch.nn.Module:
    """The policy in its dtype on its device, with our attention in its layers."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.path,
            dtype=options.dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model.path: got {options.path!r}, which cannot be loaded ({reason}); "
            "allowed: a folder or hub name of a transformers causal LM"
        ) from error
    return model.to(options.device).eval()


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
