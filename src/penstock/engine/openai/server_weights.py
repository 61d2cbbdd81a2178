"""How a server gets new weights: a folder and a reload call, or vLLM's own calls for RL.

Both take weights whose digest was checked. A server with a reload call cannot say which weights it holds.
In a vLLM server, our backend checks the digest in every worker before it loads, and the server reports the
label that came with the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch

from penstock.engine.openai.server import HttpError, Server
from penstock.files import ScratchFolder, memory_folder
from penstock.types import WeightHandle
from penstock.weights.model_weights import FOLDER, share_weights

Weights = dict[str, torch.Tensor]
WeightPlace = dict[str, object]  # fields of a call that tell the server where the weights are


class WeightLoader(Protocol):
    """Consumes checked weights; after `load`, the server holds them. Raises HttpError otherwise."""

    native_pause: bool  # the server's own pause holds running requests during a load

    def prepared(
        self, source: WeightHandle, weights: Weights
    ) -> AbstractAsyncContextManager[WeightPlace]:
        """Do what can be done while requests run; yield where the server finds the weights."""

    async def load(self, server: Server, source: WeightHandle, place: WeightPlace) -> None:
        """Load the weights into a server that is generating nothing."""

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        """Whether the server reports that it holds these weights; False if it cannot tell."""


class WeightsFolder:
    """Writes `version-N` folders of safetensors and keeps the newest two.

    The engines of several servers share the folder: the first writes a version, the others find it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._written: list[Path] = []

    async def write(self, source: WeightHandle, weights: Weights) -> Path:
        """The folder of the weights; write it unless `source` is a folder already."""
        if source.kind == FOLDER:
            return Path(source.location)
        folder = self._folder / f"version-{source.version}"
        await asyncio.to_thread(_write, folder, source.digest, weights)
        self._written = [path for path in self._written if path != folder] + [folder]
        for old in self._written[:-2]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        del self._written[:-2]
        return folder


class ReloadCall:
    """Loads weights by a POST that names the folder, e.g. SGLang's /update_weights_from_disk."""

    native_pause = False

    def __init__(self, folder: str, path: str) -> None:
        self._folder, self._path = WeightsFolder(folder), path

    @asynccontextmanager
    async def prepared(self, source: WeightHandle, weights: Weights) -> AsyncIterator[WeightPlace]:
        yield {"model_path": str(await self._folder.write(source, weights))}

    async def load(self, server: Server, source: WeightHandle, place: WeightPlace) -> None:
        label = {"version": source.version, "digest": source.digest}
        await server.post(self._path, {**place, **label})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        return False


class VllmCalls:
    """Loads weights by the start, update and finish calls of a vLLM server that runs our backend."""

    native_pause = True

    def __init__(self, folder: str) -> None:
        self._folder = WeightsFolder(folder) if folder else None

    @asynccontextmanager
    async def prepared(self, source: WeightHandle, weights: Weights) -> AsyncIterator[WeightPlace]:
        if self._folder is not None:
            yield {"folder": str(await self._folder.write(source, weights))}
        elif source.kind == FOLDER:
            yield {"folder": str(source.location)}
        else:
            with ScratchFolder.new("transfer", memory_folder()) as folder:
                file, entries = await asyncio.to_thread(
                    share_weights, source, weights, folder / "weights", copy=False
                )
                yield {"file": file, "entries": entries}

    async def load(self, server: Server, source: WeightHandle, place: WeightPlace) -> None:
        label = _label(source.version, source.digest)
        await server.post("/start_weight_update", {})
        await server.post("/update_weights", {"update_info": {"digest": source.digest, **place}})
        await server.post("/finish_weight_update", {"weight_version": label})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        try:
            answer = await server.get("/weight_info")
        except HttpError as error:
            if error.retryable:
                raise
            return False  # an older server has no such call
        return isinstance(answer, dict) and answer.get("weight_version") == _label(version, digest)


def _label(version: int, digest: str) -> str:
    """The label that a server keeps with its weights; a fresh process has another."""
    return f"{version}-{digest}"


def _write(folder: Path, digest: str, weights: Weights) -> None:
    """Write the folder's file atomically, unless the engine of another server has written it."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    with contextlib.suppress(OSError, SafetensorError), safe_open(file, "pt") as written:
        if (written.metadata() or {}).get("digest") == digest:
            return
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{uuid4().hex}.part"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, part, metadata={"format": "pt", "digest": digest})
    part.replace(file)
