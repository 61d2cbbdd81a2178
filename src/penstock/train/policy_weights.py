"""Loading a policy, its adapters and master weights, and the weights that leave for the engines.

Optimizers work on float32 masters. Where the model computes in float32 the masters are its own
parameters; where it computes in bfloat16 they are copies, gradients flow into them after every
backward pass, and `publish` writes them back. Sharded models keep their masters themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import Config, LoraConfig, ModelConfig
from penstock.data.chat import load_tokenizer
from penstock.demo import resolve_model_path
from penstock.errors import UserError
from penstock.models.loading import choose_device, load_causal_lm
from penstock.train import packed_attention as attention

ADAPTER = "default"


def trainer_device(config: ModelConfig) -> torch.device:
    """Return the device of this trainer rank."""
    return choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))


def load_policy(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Load a model that can be trained: one whose attention can be replaced by packed attention."""
    attention.register()
    model = load_causal_lm(
        resolve_model_path(path),
        dtype=dtype,
        device=trainer_device(config),
        trust_remote_code=config.trust_remote_code,
    )
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"model.path: got {path!r} ({type(model).__name__}), allowed: a model whose attention "
            "can be replaced (transformers: _supports_attention_backend)"
        )
    return model


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put low-rank adapters on the linear layers, and freeze everything else."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.lora.rank: got {config.rank}, but peft is not installed, "
            "allowed: 0, or pip install 'penstock[lora]'"
        ) from error

    settings: Any = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a float scales as well
        lora_dropout=config.dropout,
        target_modules=config.target_modules or _linear_names(model),
    )
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _linear_names(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names)


def published_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Parameter names and tensors in the engines' format; adapters merged, tied weights once.

    With a sharded model every rank must iterate, because each tensor is gathered.
    """
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if ".lora_" in name:
            continue
        whole = whole_tensor(parameter.detach())
        if name in adapted:
            whole = whole + whole_tensor(adapted[name].get_delta_weight(ADAPTER).detach())
        yield name.replace(".base_layer.", "."), whole.to(dtype)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The full tensor behind a shard; a plain tensor is returned as it is."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole


class Masters:
    """The parameters that the optimizer moves, by their names in the model."""

    def __init__(self, model: nn.Module, *, separate: bool) -> None:
        self._model_parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.separate = separate
        self.parameters: dict[str, nn.Parameter] = dict(self._model_parameters)
        if separate:
            for name, parameter in self._model_parameters.items():
                master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                self.parameters[name] = master
                parameter.register_post_accumulate_grad_hook(_GradientInto(master))

    def publish(self) -> None:
        """Bring the computing model up to the masters."""
        if self.separate:
            with torch.no_grad():
                torch._foreach_copy_(
                    list(self._model_parameters.values()),
                    [self.parameters[name] for name in self._model_parameters],
                )


class _GradientInto:
    """Adds a parameter's fresh gradient to its float32 master, so that sums keep their digits."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._master.grad is None:
            self._master.grad = parameter.grad.to(torch.float32)
        else:
            self._master.grad.add_(parameter.grad)
        parameter.grad = None


def copy_tokenizer(config: Config, folder: Path) -> None:
    """Write the tokenizer beside the saved weights; bare weights in a folder have none."""
    source = config.model.tokenizer or resolve_model_path(config.model.path)
    if Path(source).is_dir() and not (Path(source) / "tokenizer_config.json").is_file():
        return
    tokenizer = load_tokenizer(source, trust_remote_code=config.model.trust_remote_code)
    tokenizer.save_pretrained(folder)
