"""What a consumer writes to a checkpoint folder and reads back. Exact: training goes on bitwise.

    model/           transformers safetensors of the policy (adapters merged) and its tokenizer
    consumer.pt      masters where model/ cannot hold them, optimizer moments by name, RNG, counters

Atomic renames and manifests are the checkpoint's business, not ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import RunError
from penstock.train.weights import copy_tokenizer, published_weights, quiet_transformers

if TYPE_CHECKING:
    from penstock.train.consumer import Consumer

FORMAT = 1


def save(consumer: Consumer, folder: Path) -> None:
    """Write `folder`/model and `folder`/consumer.pt."""
    folder = Path(folder)
    save_model(consumer, folder / "model")
    names = _parameter_names(consumer)
    moments = consumer.optimizer.state_dict()["state"]
    content = {
        "format": FORMAT,
        "step": consumer.step,
        "policy_version": consumer.policy_version,
        "bad_updates_in_a_row": consumer.bad_updates_in_a_row,
        "masters": {name: consumer.masters.parameters[name].detach() for name in names},
        "moments": {names[index]: value for index, value in moments.items()},
        "rng": torch.get_rng_state(),
    }
    if consumer.policy.device.type == "cuda":
        content["cuda_rng"] = torch.cuda.get_rng_state(consumer.policy.device)
    torch.save(content, folder / "consumer.pt")


def load(consumer: Consumer, folder: Path) -> None:
    """Restore what `save` wrote into a consumer made from the same config."""
    content = torch.load(Path(folder) / "consumer.pt", map_location="cpu", weights_only=True)
    missing = set(consumer.masters.parameters) ^ set(content["masters"])
    if content["format"] != FORMAT or missing:
        raise RunError(
            f"checkpoint {folder}: its parameters are not those of the model: {sorted(missing)[:3]}"
        )
    consumer.masters.load(content["masters"])
    groups = consumer.optimizer.state_dict()["param_groups"]
    by_name = content["moments"]
    indexed = {
        index: by_name[name]
        for index, name in enumerate(_parameter_names(consumer))
        if name in by_name
    }
    consumer.optimizer.load_state_dict({"state": indexed, "param_groups": groups})
    consumer.step = content["step"]
    consumer.policy_version = content["policy_version"]
    consumer.bad_updates_in_a_row = content["bad_updates_in_a_row"]
    torch.set_rng_state(content["rng"])
    if "cuda_rng" in content and consumer.policy.device.type == "cuda":
        torch.cuda.set_rng_state(content["cuda_rng"], consumer.policy.device)


def save_model(consumer: Consumer, folder: Path) -> None:
    """A folder that transformers' `from_pretrained` loads."""
    model: Any = consumer.policy.model
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(published_weights(model, consumer.engine_dtype))
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
    copy_tokenizer(consumer.config, folder)


def _parameter_names(consumer: Consumer) -> list[str]:
    """Names of the parameters in the optimizer's own order."""
    names = {id(parameter): name for name, parameter in consumer.masters.parameters.items()}
    return [
        names[id(parameter)]
        for group in consumer.optimizer.param_groups
        for parameter in group["params"]
    ]
