"""What a consumer writes to a checkpoint folder and reads back. Exact: training goes on bitwise.

    model/           transformers safetensors of the policy (adapters merged) and its tokenizer
    consumer.pt      counters, random state; one rank: masters and optimizer moments by name
    sharded/         several ranks: masters and moments, each rank its part

Either form loads at any number of ranks. Atomic renames and manifests are the checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import RunError
from penstock.train.weights import copy_tokenizer, quiet_transformers

if TYPE_CHECKING:
    from penstock.train.consumer import Consumer

FORMAT = 1
Tensors = dict[str, Tensor]


def save(consumer: Consumer, folder: Path) -> None:
    """Write the whole state; with several ranks every rank must call it on a shared folder."""
    take_snapshot(consumer, folder)()
    consumer.ranks.barrier()


def take_snapshot(consumer: Consumer, folder: Path) -> Callable[[], None]:
    """Copy the state to host memory; the returned call writes it, in any thread, beside training.

    Shards of several ranks are written here, by all ranks together: that needs collectives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _host_copy(tensor) for name, tensor in consumer.weights()}
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": consumer.step,
        "policy_version": consumer.policy_version,
        "bad_updates_in_a_row": consumer.bad_updates_in_a_row,
        "ptx_cursor": consumer.texts.cursor if consumer.texts is not None else 0,
        "rng": torch.get_rng_state(),
    }
    if consumer.policy.device.type == "cuda":
        content["cuda_rng"] = torch.cuda.get_rng_state(consumer.policy.device)
    if consumer.ranks.world == 1:
        own = _tensors(consumer)
        content["tensors"] = {name: _host_copy(tensor) for name, tensor in own.items()}
    else:
        from torch.distributed import checkpoint

        checkpoint.save(_tensors(consumer), checkpoint_id=folder / "sharded")
        consumer.ranks.barrier()

    def write() -> None:
        if not consumer.ranks.is_first:
            return
        try:
            _save_model(consumer, weights, folder / "model")
            with (folder / "consumer.pt").open("wb") as file:
                torch.save(content, file)
        except (RuntimeError, SafetensorError) as error:  # how the two formats tell of a full disk
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{folder}: {cause}") from error

    return write


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in this machine's memory that no later step can change."""
    return tensor.detach().to("cpu", copy=True)


def load(consumer: Consumer, folder: Path) -> None:
    """Restore what `save` wrote into a consumer made from the same config."""
    content = torch.load(folder / "consumer.pt", map_location="cpu", weights_only=True)
    if content["format"] != FORMAT:
        raise RunError(f"checkpoint {folder}: got format {content['format']}, allowed: {FORMAT}")
    _make_moments(consumer)
    own = _tensors(consumer)
    if "tensors" in content:
        _copy_into(own, content["tensors"], folder)
    else:
        from torch.distributed import checkpoint

        checkpoint.load(own, checkpoint_id=folder / "sharded", no_dist=consumer.ranks.world == 1)
    consumer.masters.publish()
    consumer.step = content["step"]
    consumer.policy_version = content["policy_version"]
    consumer.bad_updates_in_a_row = content["bad_updates_in_a_row"]
    if consumer.texts is not None:
        consumer.texts.cursor = content["ptx_cursor"]
    torch.set_rng_state(content["rng"])
    if "cuda_rng" in content and consumer.policy.device.type == "cuda":
        torch.cuda.set_rng_state(content["cuda_rng"], consumer.policy.device)


def _tensors(consumer: Consumer) -> Tensors:
    """The live masters and optimizer moments by name; shards where the model is sharded."""
    tensors: Tensors = {}
    for name, parameter in consumer.masters.parameters.items():
        tensors[f"master/{name}"] = parameter.detach()
        for key, value in consumer.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    return tensors


def _make_moments(consumer: Consumer) -> None:
    """Give a fresh optimizer the moments that its first step would make, as targets to load into."""
    for parameter in consumer.masters.parameters.values():
        if not consumer.optimizer.state.get(parameter):
            consumer.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }


def _copy_into(own: Tensors, saved: Tensors, folder: Path) -> None:
    if not saved.keys() <= own.keys() or any(
        name.startswith("master/") and name not in saved for name in own
    ):
        differing = sorted(saved.keys() ^ own.keys())
        raise RunError(f"checkpoint {folder}: its weights are not the model's: {differing[:3]}")
    with torch.no_grad():
        for name, tensor in own.items():
            whole = saved.get(name)
            if whole is None:  # saved before the first update: moments are zero
                tensor.zero_()
            elif hasattr(tensor, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                tensor.copy_(
                    distribute_tensor(
                        whole.to(tensor.device), tensor.device_mesh, tensor.placements
                    )
                )
            else:
                tensor.copy_(whole)


def _save_model(consumer: Consumer, weights: Tensors, folder: Path) -> None:
    """A folder that transformers' `from_pretrained` loads."""
    model: Any = consumer.policy.model
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
    copy_tokenizer(consumer.config, folder)
