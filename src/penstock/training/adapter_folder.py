"""The low-rank adapters of a checkpoint as a folder that peft loads.

A checkpoint's model has the adapters merged; its trainer state has them apart, whole or in the rows of
each rank (`snapshot.py`). Names are those of peft: the model below `base_model.model`, no adapter name.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import ModelConfig
from penstock.errors import UserError
from penstock.training.policy import ADAPTER
from penstock.training.snapshot import STATE, read_state

_MASTER, _PLACE = "master/", "base_model.model."


def write_adapters(checkpoint: Path, config: ModelConfig, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json of a checkpoint into `folder`."""
    if not config.lora.rank:
        raise UserError(
            "adapter: got a run that trained all weights, allowed: model.lora.rank above 0"
        )
    import peft

    tensors = read_adapters(checkpoint)
    base = Path(config.path).name if os.path.isabs(config.path) else config.path  # no local path
    layers = sorted({name.partition(".lora_")[0].removeprefix(_PLACE) for name in tensors})
    settings = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a float scales as well
        lora_dropout=config.lora.dropout,
        target_modules=layers,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    settings.inference_mode = True
    settings.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint under peft's names, put together from all ranks."""
    rows: dict[str, list[tuple[int, Tensor]]] = {}
    shards = sorted(checkpoint.glob("shards/*"))
    for path in (checkpoint / STATE, *(one.with_suffix(".safetensors") for one in shards)):
        for name, piece in read_state(path).get("pieces", {}).items():
            if name.startswith(_MASTER) and ".lora_" in name:
                rows.setdefault(name.removeprefix(_MASTER), []).append(piece)
    return {
        _PLACE + name.replace(f".{ADAPTER}.weight", ".weight"): torch.cat(
            [part for _, part in sorted(pieces, key=lambda piece: piece[0])]
        ).contiguous()
        for name, pieces in rows.items()
    }
