"""Low-rank adapters: which layers of a policy get them, and under which names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from penstock.config import LoraConfig
from penstock.errors import UserError

ADAPTER = "default"


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put low-rank adapters on the linear layers, and freeze everything else."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"model.lora.rank: got {config.rank}, but peft is not installed, "
            "allowed: 0, or pip install 'penstock[lora]'"
        ) from error

    # peft knows some mixtures of experts by their config and would put what is meant for dense and shared
    # layers on the experts' stacked parameters, which are not published; inside a plain module it does not.
    plain = nn.ModuleDict({"policy": model})
    names = _adapted_names(model, config.target_modules)
    settings: Any = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a float scales as well
        target_modules=[f"policy.{name}" for name in names],
    )
    peft.inject_adapter_in_model(settings, plain, adapter_name=ADAPTER)
    _draw_in_float32(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _draw_in_float32(model: Any) -> None:
    """Draw the adapters again at full precision: peft rounds them to the format of their layer."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            for name in module.adapter_layer_names:
                adapters = getattr(module, name)
                for adapter in adapters.parameters():
                    adapter.data = adapter.data.to(
                        torch.promote_types(adapter.dtype, torch.float32)
                    )
            module.reset_lora_parameters(ADAPTER, True)


def _adapted_names(model: Any, targets: list[str]) -> list[str]:
    """The full names of the linear layers that get adapters; refuse every other module.

    The head is refused because the trainer reads its weight and would pass its adapter by; an
    embedding, because a tied head would publish the embedding's adapter and train without it.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    names = {target: [n for n in linear if f".{n}".endswith(f".{target}")] for target in targets}
    unknown = [target for target, layers in names.items() if not layers]
    if unknown or not linear:
        allowed = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise UserError(
            f"model.lora.target_modules: got {unknown or targets}, allowed: linear layers of "
            f"{type(model).__name__} other than its head ({allowed})"
        )
    return sorted({name for layers in names.values() for name in layers}) or linear


def adapter_names(base_name: str) -> tuple[str, str]:
    """The names of the two adapters of the layer with this base weight: input and output side."""
    stem = base_name.removesuffix("base_layer.weight")
    return f"{stem}lora_A.{ADAPTER}.weight", f"{stem}lora_B.{ADAPTER}.weight"


def describe_adapters(model: nn.Module, adapted: Collection[str]) -> str:
    """One line: which layers have adapters, what share of the weights they hold, and the rest; none: nothing."""
    if not adapted:
        return ""
    sizes = {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }
    shares: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, size in sizes.items():
        parts = name.removesuffix(".weight").removesuffix(".base_layer").split(".")
        layer = ".".join(part for part in parts[-3:] if not part.isdigit())
        shares[name in adapted][parts[-1] if name in adapted else layer] += size
    total = sum(sizes.values())
    rest = ", ".join(
        f"{layer} {size / total:.0%}"
        for layer, size in shares[False].most_common(3)
        if size / total >= 0.005
    )
    return (
        f"adapters: on {len(adapted)} linear layers ({', '.join(sorted(shares[True]))}) with "
        f"{shares[True].total() / total:.0%} of the weights; without: {rest or 'nothing large'}"
    )
