"""Load a transformers causal LM, and choose its device and number format from the config.

Trainer and engine both load through this file, so one config means one model to both. Attention,
adapters and master weights are set by the caller; tokenizers are loaded in `data/chat.py`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from penstock.config import ModelConfig
from penstock.errors import UserError
from penstock.model.families import family_of
from penstock.waits import tell_stage

log = logging.getLogger(__name__)

# what libraries raise for files that are no model of theirs
WRONG_FILES = (
    OSError,
    ValueError,
    TypeError,
    ImportError,  # of a package for quantised weights, or for the attention that a config.json names
    LookupError,  # among others: a model that knows its own kinds of attention only
    ArithmeticError,
    AttributeError,
    RuntimeError,  # experts that are not all there
    UnpicklingError,  # a pickle with more than tensors
    SafetensorError,
    StrictDataclassError,
)
_LONGEST_REASON = 300  # characters
_LAYER = re.compile(r".*?\.layers\.\d+(?=\.)")


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
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    except WRONG_FILES as error:
        raise UserError(
            f"model.path: got {path!r}, which cannot be loaded ({_reason(path, error)}); "
            "allowed: a folder or hub name of a transformers causal LM"
        ) from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise UserError(
            f"model.path: got {path!r}, whose {name} is {list(stored)} in its files and {list(expected)} by its "
            f"config.json ({len(mismatched)} such weights), allowed: a config.json of this checkpoint"
        )
    _check_report(model, path, report["missing_keys"], report["unexpected_keys"])
    _refuse_integers(model, path, report["unexpected_keys"])
    return model.to(device).eval()


def _reason(path: str, error: Exception) -> str:
    """What is wrong, in one line; with the file of weights, which safetensors does not name."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_REASON]
    if not isinstance(error, SafetensorError):
        return words
    for file in _files_of(path, "*.safetensors"):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as reason:
            return f"{file}: {reason}"
    return words


def _files_of(path: str, pattern: str) -> list[Path]:
    from transformers.utils import cached_file

    config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return sorted(Path(config).parent.glob(pattern)) if config else []


def _refuse_integers(model: Any, path: str, unexpected: Iterable[str]) -> None:
    """Refuse weights that are stored as whole numbers: quantised ones, whose scales nobody would apply."""
    if getattr(model.config, "quantization_config", None) is not None:
        return
    prefix = f"{model.base_model_prefix}."
    others = {*unexpected, *(name.removeprefix(prefix) for name in unexpected)}
    buffers = {
        name.rpartition(".")[2] for name, _ in model.named_buffers()
    }  # files have other folders
    for file in _files_of(path, "model*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in set(stored.keys()) - others:
                dtype = stored.get_slice(name).get_dtype()
                is_buffer = name.rpartition(".")[2] in buffers
                if dtype.startswith(("I", "U", "BOOL")) and not is_buffer:
                    raise UserError(
                        f"model.path: got {path!r}, whose {name} has the format {dtype} and whose config.json has no "
                        "quantization_config, allowed: weights that are floating-point numbers"
                    )


def _check_report(model: Any, path: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Refuse a checkpoint that lacks weights, which would be random, or has some that change a family's layers.

    Weights elsewhere (heads for more tokens, an image encoder) are told and left out.
    """
    parameters = {name for name, _ in model.named_parameters()}
    lacking = sorted(parameters.intersection(missing))
    if lacking:
        raise UserError(
            f"model.path: got {path!r}, whose files lack {len(lacking)} weights of {type(model).__name__} "
            f"({_some(lacking)}), allowed: a checkpoint with all of them"
        )
    modules = {name for name, _ in model.named_modules()}
    unused = sorted(name for name in unexpected if not name.endswith("inv_freq"))
    layers = [name for name in unused if (found := _LAYER.match(name)) and found[0] in modules]
    if layers and family_of(model.config) is not None:
        raise UserError(
            f"model.path: got {path!r}, whose files have {len(layers)} weights in layers of {type(model).__name__} "
            f"that its config.json knows nothing of ({_some(layers)}), allowed: a config.json of this checkpoint"
        )
    if unused:
        log.warning("model.path: %s: %d weights are not used: %s", path, len(unused), _some(unused))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def add_end_ids(model: Any, ids: Iterable[int]) -> None:
    """Let responses of this model end at these ids too; a saved model keeps them."""
    own = end_ids(model)
    ends = tuple(dict.fromkeys((*own, *_in_vocabulary(model, ids))))
    if ends and (ends != own or model.generation_config.eos_token_id is None):
        model.generation_config.eos_token_id = list(ends)


def exact_attention(model: Any) -> str:
    """The attention of an unchanged model: eager, where the fused one would drop a soft cap in silence."""
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    implementation: str = model.config._attn_implementation
    return implementation if cap is None else "eager"


def end_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a response of this model; the engine bans them up to min_tokens."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return _in_vocabulary(model, ids if isinstance(ids, (list, tuple)) else [int(ids)])
    return ()


def _in_vocabulary(model: Any, ids: Iterable[int]) -> tuple[int, ...]:
    """Without ids beyond it, of a tokenizer that has grown: they cannot be sampled."""
    vocabulary = model.config.get_text_config().vocab_size
    return tuple(token for token in ids if token < vocabulary)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and its table of weights: the run reports loading and saving itself."""
    from transformers.utils import logging as their_logging

    was_enabled = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    loader = logging.getLogger("transformers.modeling_utils")
    loader.addFilter(_is_no_report)
    try:
        yield
    finally:
        loader.removeFilter(_is_no_report)
        if was_enabled:
            their_logging.enable_progress_bar()


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
