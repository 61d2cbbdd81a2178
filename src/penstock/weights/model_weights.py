"""The weights of a model by name, their digest, and a load that is whole or not at all.

A tied weight counts once, under the first of its names; buffers do not count. Trainer and engine use
the same order and the same bits, so that their digests agree (law 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from penstock.errors import DigestMismatch, EngineError, WeightsGone
from penstock.types import WeightHandle
from penstock.weights.device_digest import DeviceDigests, can_hash_on
from penstock.weights.digest import combine_digests, tensor_digests
from penstock.weights.mapped_files import FOLDER, read_folder


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight once, in the model's order."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        yield name, parameter.detach()


def weight_bits(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """The dtype's name and the values as numpy; bfloat16, which numpy lacks, as its bits."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return dtype, host.view(torch.int16).numpy().view(np.uint16)
    return dtype, host.numpy()


def digest_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The identity of named weights, wherever they are."""
    return combine_digests(digests_of(weights))


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    """The digest of each tensor by its name; those on a GPU are hashed there."""
    on_devices: dict[torch.device, DeviceDigests] = {}

    def on_host() -> Iterator[tuple[str, str, np.ndarray]]:
        for name, tensor in weights:
            if can_hash_on(tensor.device):
                if tensor.device not in on_devices:
                    on_devices[tensor.device] = DeviceDigests(tensor.device)
                on_devices[tensor.device].add(name, tensor)
            else:
                yield name, *weight_bits(tensor)

    digests = tensor_digests(on_host())
    for device in on_devices.values():
        digests |= device.finish()
    return digests


def model_digest(model: torch.nn.Module) -> str:
    """The digest of what the model holds now."""
    return digest_of(named_weights(model))


def folder_digest(folder: str) -> str:
    """Of a safetensors folder; empty where there is none, as for a model's name on a hub."""
    if not any(Path(folder).glob("*.safetensors")):
        return ""
    return digest_of(read_folder(folder).items())


def checked_weights(
    fetch: Callable[[WeightHandle], Iterable[tuple[str, torch.Tensor]]],
    source: WeightHandle,
    model: torch.nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    """What `source` names, if it is what was announced and fits `model`; hashed as it arrives.

    A folder is read as it is, without `fetch`. Where the model is on a GPU, that does the hashing.
    """
    weights: dict[str, torch.Tensor] = {}
    device = torch.device("cpu") if model is None else next(model.parameters()).device
    moves = can_hash_on(device)

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        named = read_folder(source.location).items() if source.kind == FOLDER else fetch(source)
        for name, tensor in named:
            weights[name] = tensor.detach()
            there = moves and not tensor.is_cuda
            yield name, weights[name].to(device) if there else weights[name]

    try:
        digest = digest_of(arriving())
    except WeightsGone:
        raise  # they are to be published again
    except Exception as error:  # foreign code at a seam: the engine serves on with what it has
        raise EngineError(f"weights {source.version} could not be fetched: {error}") from error
    if model is not None:
        _refuse_others(model, weights)
    if digest != source.digest:
        raise DigestMismatch(
            f"weights refused, the old ones stay: got digest {digest}, announced was {source.digest}"
        )
    return weights


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy checked weights into the model; after this nobody reads `weights` any more."""
    devices = set()
    for name, tensor in named_weights(model):
        tensor.copy_(weights[name])
        devices |= {one.device for one in (tensor, weights[name]) if one.is_cuda}
    for device in devices:  # a GPU copies later than it is told to
        torch.cuda.current_stream(device).synchronize()


def _refuse_others(model: torch.nn.Module, new: dict[str, torch.Tensor]) -> None:
    own = dict(named_weights(model))
    missing, unknown = sorted(own.keys() - new.keys()), sorted(new.keys() - own.keys())
    if missing or unknown:
        raise EngineError(
            f"weights refused: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}), allowed: exactly the model's own"
        )
    for name, tensor in own.items():
        if new[name].shape != tensor.shape or new[name].dtype != tensor.dtype:
            raise EngineError(
                f"weight {name} refused: got {new[name].dtype} {tuple(new[name].shape)}, "
                f"allowed: {tensor.dtype} {tuple(tensor.shape)}"
            )
