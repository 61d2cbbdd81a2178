"""The weights of a model by name, their digest, a load that is complete or does not happen, and sharing.

A tied weight counts once, under its first name; buffers do not count. Trainer and engine use the same
order and the same bits, so that their digests agree. Processes of other programs on this machine read
weights from files (published ones lie in a file already, `shared_memory.py`) or in a GPU's memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from penstock.errors import DigestMismatch, EngineError, WeightsGone
from penstock.types import WeightHandle
from penstock.weights.device_memory import DeviceHandle, DeviceMemory, OpenedMemory
from penstock.weights.digest import digest_of
from penstock.weights.shared_memory import HEADER_BYTES, SHARED_MEMORY, Entry, layout_of, views

FOLDER = "folder"  # the kind of a WeightHandle whose location is a folder of safetensors files
# the kind of one whose location is the weights themselves, as safetensors bytes
CONTENT = "content"
Fetch = Callable[[WeightHandle], Iterable[tuple[str, torch.Tensor]]]


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
    fetch: Fetch,
    source: WeightHandle,
    model: torch.nn.Module | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of `source`; raise unless they have its digest and fit `model`.

    Tensors are hashed as they arrive, on the model's GPU if it is on one. A folder, or what the handle holds
    itself, is read as it is, without `fetch`.
    """
    weights: dict[str, torch.Tensor] = {}
    device = torch.device("cpu") if model is None else next(model.parameters()).device

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _named(source, fetch):
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
        parameters = dict(named_weights(model))
        missing = sorted(parameters.keys() - weights.keys())
        unknown = sorted(weights.keys() - parameters.keys())
        if missing or unknown:
            raise EngineError(
                f"weights refused: missing {missing[:3]} ({len(missing)}), "
                f"unknown {unknown[:3]} ({len(unknown)}), allowed: exactly the model's own"
            )
        for name, tensor in parameters.items():
            if weights[name].shape != tensor.shape or weights[name].dtype != tensor.dtype:
                raise EngineError(
                    f"weight {name} refused: got {weights[name].dtype} {tuple(weights[name].shape)}, "
                    f"allowed: {tensor.dtype} {tuple(tensor.shape)}"
                )
    if digest != source.digest:
        raise DigestMismatch(
            f"weights refused, the old ones stay: got digest {digest}, announced was {source.digest}"
        )
    return weights


def _named(source: WeightHandle, fetch: Fetch) -> Iterable[tuple[str, torch.Tensor]]:
    if source.kind == FOLDER:
        return read_folder(source.location).items()
    if source.kind == CONTENT:
        from safetensors.torch import load

        return load(source.location).items()
    return fetch(source)


def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy checked weights into the model; when this returns, `weights` may change."""
    parameters = dict(named_weights(model))
    new = [weights[name] for name in parameters]
    # on one GPU a few launches, not one for each
    torch._foreach_copy_(list(parameters.values()), new)
    for device in {tensor.device for tensor in (*parameters.values(), *new) if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # a GPU copies asynchronously


# -- sharing with other programs ---------------------------------------------------------------


def share_weights(
    source: WeightHandle, weights: dict[str, torch.Tensor], file: Path, *, copy: bool
) -> tuple[str, list[Entry]]:
    """The file that holds the weights of `source`, and their entries; written to `file` if none does.

    `copy` always writes `file`, for readers that see only its folder.
    """
    if source.kind == SHARED_MEMORY and source.location["device"] is None and not copy:
        published = source.location["tensors"]
        return source.location["path"], [
            (name, dtype, shape, HEADER_BYTES + offset) for name, dtype, shape, offset in published
        ]
    entries, size = layout_of(weights.items())
    with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as opened:
        opened.truncate(size)
        octets = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
    for name, view in views(octets, entries):
        view.copy_(weights[name])
    return str(file), entries


def read_shared(file: str, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as views of a private mapping: no copy, and a write does not reach the file."""
    with open(file, "rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return views(torch.frombuffer(mapping, dtype=torch.uint8), entries)


def read_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """All weights of a safetensors folder, mapped."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def share_on_device(
    weights: dict[str, torch.Tensor],
) -> tuple[DeviceMemory, list[str], list[Entry]]:
    """Copy weights of one GPU into memory that others can open; return it, its handle and the entries.

    Handle and entries are plain values, so that any message can carry them.
    """
    entries, size = layout_of(weights.items())
    device = next(iter(weights.values())).device
    memory = DeviceMemory(size, device)
    for name, view in views(memory.tensor(size)[0], entries):
        view.copy_(weights[name])
    torch.cuda.current_stream(device).synchronize()
    handle = memory.export()
    return memory, [handle.uuid, handle.octets.hex(), str(size)], entries


def read_device(handle: list[str], entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that another process shared with `share_on_device`, as views with no copy."""
    uuid, octets, size = handle
    opened, _ = OpenedMemory(DeviceHandle(uuid, bytes.fromhex(octets))).tensor(int(size))
    return views(opened, entries)
