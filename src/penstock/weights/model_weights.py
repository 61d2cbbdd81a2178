"""The weights of a model by name, their digest, and a load that is complete or does not happen.

A tied weight counts once, under its first name; buffers do not count. Trainer and engine use the same
order and the same bits, so that their digests agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from penstock.errors import DigestMismatch, EngineError, WeightsGone
from penstock.types import WeightHandle
from penstock.weights.digest import digest_of
from penstock.weights.mapped_files import FOLDER, read_folder


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight once, in the model's order."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        yield name, parameter.detach()


def model_digest(model: torch.nn.Module) -> str:
    """The digest of the model's current weights."""
    return digest_of(named_weights(model))


def folder_digest(folder: str) -> str:
    """The digest of a safetensors folder; empty if it has none, as a model name on a hub."""
    if not any(Path(folder).glob("*.safetensors")):
        return ""
    return digest_of(read_folder(folder).items())


def checked_weights(
    fetch: Callable[[WeightHandle], Iterable[tuple[str, torch.Tensor]]],
    source: WeightHandle,
    model: torch.nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of `source`; raise unless they have its digest and fit `model`.

    Tensors are hashed as they arrive, on the model's GPU if it is on one. A folder is read as it is,
    without `fetch`.
    """
    weights: dict[str, torch.Tensor] = {}
    device = torch.device("cpu") if model is None else next(model.parameters()).device

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        named = read_folder(source.location).items() if source.kind == FOLDER else fetch(source)
        for name, tensor in named:
            weights[name] = tensor.detach()
            moves = device.type == "cuda" and not tensor.is_cuda
            yield name, weights[name].to(device) if moves else weights[name]

    try:
        digest = digest_of(arriving())
    except (WeightsGone, torch.AcceleratorError):
        raise  # the caller has them published again; a device that failed ends the engine
    except Exception as error:  # foreign code at a seam: the engine keeps its old weights
        raise EngineError(f"weights {source.version} could not be fetched: {error}") from error
    if model is not None:
        _refuse_others(model, weights)
    if digest != source.digest:
        raise DigestMismatch(
            f"weights refused, the old ones stay: got digest {digest}, announced was {source.digest}"
        )
    return weights


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy checked weights into the model; when this returns, `weights` may change."""
    parameters = dict(named_weights(model))
    new = [weights[name] for name in parameters]
    torch._foreach_copy_(
        list(parameters.values()), new
    )  # on one GPU a few launches, not one for each
    for device in {tensor.device for tensor in (*parameters.values(), *new) if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # a GPU copies asynchronously


def _refuse_others(model: torch.nn.Module, new: dict[str, torch.Tensor]) -> None:
    parameters = dict(named_weights(model))
    missing = sorted(parameters.keys() - new.keys())
    unknown = sorted(new.keys() - parameters.keys())
    if missing or unknown:
        raise EngineError(
            f"weights refused: missing {missing[:3]} ({len(missing)}), "
            f"unknown {unknown[:3]} ({len(unknown)}), allowed: exactly the model's own"
        )
    for name, tensor in parameters.items():
        if new[name].shape != tensor.shape or new[name].dtype != tensor.dtype:
            raise EngineError(
                f"weight {name} refused: got {new[name].dtype} {tuple(new[name].shape)}, "
                f"allowed: {tensor.dtype} {tuple(tensor.shape)}"
            )
