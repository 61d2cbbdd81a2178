"""What a consumer writes to a checkpoint folder and reads back. Exact: training goes on bitwise.

    model/           transformers safetensors of the policy (adapters merged) and its tokenizer
    consumer.pt      counters, random state; one rank: masters and optimizer moments by name
    shards/          several ranks: masters and moments, each rank its part
    config.toml      the config that was in force

Either form loads at any number of ranks. Atomic renames and manifests are the checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.config import Config
from penstock.config.source import to_toml
from penstock.errors import RunError
from penstock.models.loading import quiet_transformers
from penstock.train.parallel import Ranks
from penstock.train.policy import Policy
from penstock.train.policy_weights import Masters, copy_tokenizer
from penstock.train.ptx import TextStream
from penstock.train.shards import file_of, fill, host_copy, pieces_of, read_shards
from penstock.weights.offload import Parking

FORMAT = 2
Tensors = dict[str, Tensor]


class Trained(Protocol):
    """What of a consumer goes into a checkpoint, and what that needs."""

    config: Config
    ranks: Ranks
    policy: Policy
    masters: Masters
    optimizer: torch.optim.Optimizer
    parking: Parking
    texts: TextStream | None
    step: int
    policy_version: int
    bad_updates_in_a_row: int

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...


def save(consumer: Trained, folder: Path) -> None:
    """Write the whole state; with several ranks every rank must call it on a shared folder."""
    take_snapshot(consumer, folder)()
    consumer.ranks.barrier()


def take_snapshot(consumer: Trained, folder: Path) -> Callable[[], None]:
    """Copy the state to host memory; the returned call writes it, in any thread, beside training.

    Every rank takes part in the copy, since the model is gathered; each writes without the others.
    What is parked is copied where it lies.
    """
    first, ranks = consumer.ranks.is_first, consumer.ranks
    weights: Tensors = {}
    for name, tensor in consumer.weights():  # gathered by all ranks, kept by the first
        if first:
            weights[name] = host_copy(tensor)
    pieces = pieces_of(_tensors(consumer), ranks, consumer.parking.held)
    random_state = _random_state(consumer)
    content: dict[str, Any] = {
        "format": FORMAT,
        "world": ranks.world,
        "step": consumer.step,
        "policy_version": consumer.policy_version,
        "bad_updates_in_a_row": consumer.bad_updates_in_a_row,
        "ptx_cursor": consumer.texts.cursor if consumer.texts is not None else 0,
        "random": random_state,
    }

    def write() -> None:
        try:
            if ranks.world == 1:
                content["pieces"] = pieces
            else:
                path = file_of(folder, ranks.rank, ranks.world)
                _write_tensors(path, {"pieces": pieces, "random": random_state})
            if first:
                _save_model(consumer, weights, folder / "model")
                _write_tensors(folder / "consumer.pt", content)
                (folder / "config.toml").write_text(to_toml(consumer.config), encoding="utf-8")
        except (RuntimeError, SafetensorError) as error:  # how the two formats tell of a full disk
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(f"{folder}: {cause}") from error

    return write


def _write_tensors(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save(content, file)


def load(consumer: Trained, folder: Path) -> None:
    """Restore what `save` wrote into a consumer made from the same config."""
    content = torch.load(folder / "consumer.pt", map_location="cpu", weights_only=True)
    if content["format"] != FORMAT:
        raise RunError(f"checkpoint {folder}: got format {content['format']}, allowed: {FORMAT}")
    world, ranks = content["world"], consumer.ranks
    shards = [content] if world == 1 else read_shards(folder, world)
    _make_moments(consumer)
    fill(_tensors(consumer), [shard["pieces"] for shard in shards], ranks, folder)
    consumer.masters.publish()
    consumer.step = content["step"]
    consumer.policy_version = content["policy_version"]
    consumer.bad_updates_in_a_row = content["bad_updates_in_a_row"]
    if consumer.texts is not None:
        consumer.texts.cursor = content["ptx_cursor"]
    _set_random_state(consumer, shards[ranks.rank if ranks.world == world else 0]["random"])


def _random_state(consumer: Trained) -> Tensors:
    state = {"cpu": torch.get_rng_state()}
    if consumer.policy.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(consumer.policy.device)
    return state


def _set_random_state(consumer: Trained, state: Tensors) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and consumer.policy.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], consumer.policy.device)


def _tensors(consumer: Trained) -> Tensors:
    """The live masters and optimizer moments by name; shards where the model is sharded."""
    tensors: Tensors = {}
    for name, parameter in consumer.masters.parameters.items():
        tensors[f"master/{name}"] = parameter.detach()
        for key, value in consumer.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value
    return tensors


def _make_moments(consumer: Trained) -> None:
    """Give a fresh optimizer the moments that its first step would make, as targets to load into."""
    for parameter in consumer.masters.parameters.values():
        if not consumer.optimizer.state.get(parameter):
            consumer.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }


def _save_model(consumer: Trained, weights: Tensors, folder: Path) -> None:
    """A folder that transformers' `from_pretrained` loads."""
    model: Any = consumer.policy.model
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
    copy_tokenizer(consumer.config, folder)
