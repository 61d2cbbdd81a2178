"""Load a transformers causal LM, and choose its device and number format from the config.

Trainer and engine both load through this file, so one config means one model to both. Attention,
adapters and master weights are set by the caller; tokenizers are loaded in `data/chat.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pickle import UnpicklingError
from typing import Any

import torch

from penstock.config import ModelConfig
from penstock.errors import UserError
from penstock.waits import tell_stage


def choose_device(name: str, index: int) -> torch.device:
    """The device for `model.device`: `auto` and `cuda` hand out this machine's GPUs in turn.

    `index` counts the users of GPUs on this machine. Without a GPU, `auto` is the CPU.
    """
    if name not in ("auto", "cuda"):
        return torch.device(name)
    if not torch.cuda.is_available():
        return torch.device("cpu" if name == "auto" else "cuda")
    return torch.device("cuda", index % torch.cuda.device_count())


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The number format of compute and of published weights."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def format_of(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The format in which a parameter of a model loaded in `dtype` computes.

    Some models keep sensitive parameters in float32: some beside float16 only, some always.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return dtype
    float32_parts = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        float32_parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return torch.float32 if any(f".{part}." in f".{name}." for part in float32_parts) else dtype


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    attention: str | None = None,
) -> Any:
    """Load a causal LM onto `device`, in evaluation mode.

    `path` is a folder or hub name; `attention` names an implementation registered with transformers.
    """
    from transformers import AutoModelForCausalLM

    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"model.device: got {str(device)!r}, allowed: cpu (no CUDA device is visible)"
        )
    tell_stage("loading the model")
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
    except (
        OSError,
        ValueError,
        UnpicklingError,  # a pickle with more than tensors
        KeyError,  # a model that knows its own kinds of attention only
        RuntimeError,  # sizes that contradict the config, experts that are not all there
    ) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(
            f"model.path: got {path!r}, which cannot be loaded ({reason}); "
            "allowed: a folder or hub name of a transformers causal LM"
        ) from error
    return model.to(device).eval()


def add_end_ids(model: Any, ids: Iterable[int]) -> None:
    """Let responses of this model end at these ids too; a saved model keeps them.

    Ids beyond the vocabulary, of a tokenizer that has grown, cannot be sampled.
    """
    vocabulary = model.config.get_text_config().vocab_size
    own = end_ids(model)
    ends = tuple(dict.fromkeys((*own, *(token for token in ids if token < vocabulary))))
    if ends != own:
        model.generation_config.eos_token_id = list(ends)


def exact_attention(model: Any) -> str:
    """The attention of an unchanged model: eager, where the fused one would drop a soft cap in silence."""
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    implementation: str = model.config._attn_implementation
    return implementation if cap is None else "eager"


def end_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a response of this model; the engine bans them up to min_tokens."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars: the run reports loading and saving itself."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
