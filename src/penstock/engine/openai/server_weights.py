"""How servers get new weights: a folder and a reload call, or vLLM's own calls for RL.

Both take weights whose digest was checked. A server with a reload call cannot say which weights it holds.
In a vLLM server, our backend checks the digest in every worker before it loads, and the server reports the
label that came with the weights.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from penstock.engine.openai.http_client import HttpError
from penstock.engine.openai.servers import Server
from penstock.engine.protocol import Fetch
from penstock.errors import RunError
from penstock.files import ScratchFolder, memory_folder
from penstock.types import WeightHandle
from penstock.weights.mapped_files import FOLDER, share_weights
from penstock.weights.model_weights import checked_weights

Weights = dict[str, torch.Tensor]


class WeightLoader(Protocol):
    """Consumes checked weights; after `load`, one server holds them. Raises HttpError otherwise."""

    native_pause: bool  # the server's own pause holds running requests during a load

    async def prepare(
        self, version: int, source: WeightHandle, weights: Weights
    ) -> PreparedWeights:
        """Do, once for all servers, what can be done while requests run."""

    async def load(self, server: Server, prepared: PreparedWeights) -> None:
        """Load the weights into a server that is generating nothing."""

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        """Return whether the server reports that it holds these weights; False if it cannot tell."""


@dataclass(slots=True, kw_only=True)
class PreparedWeights:
    """Weights ready to be loaded; `weights` stay alive until every server has loaded them."""

    version: int
    digest: str
    weights: Weights
    info: dict[str, object]  # tells a server where the weights are
    temporary: ScratchFolder | None = None

    def release(self) -> None:
        if self.temporary is not None:
            self.temporary.remove()


class WeightsFolder:
    """Writes `version-N` folders of safetensors and keeps the newest two."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._written: list[Path] = []

    async def write(self, version: int, source: WeightHandle, weights: Weights) -> Path:
        """Return the folder of the weights; write it unless `source` is a folder already."""
        if source.kind == FOLDER:
            return Path(source.location)
        folder = self._folder / f"version-{version}"
        if folder in self._written:  # written before, for a server that was lost
            return folder
        await asyncio.to_thread(_write, folder, weights)
        self._written.append(folder)
        for old in self._written[:-2]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        del self._written[:-2]
        return folder


class ReloadCall:
    """Loads weights by a POST that names the folder, e.g. SGLang's /update_weights_from_disk."""

    native_pause = False

    def __init__(self, folder: str, path: str) -> None:
        self._folder, self._path = WeightsFolder(folder), path

    async def prepare(
        self, version: int, source: WeightHandle, weights: Weights
    ) -> PreparedWeights:
        written = await self._folder.write(version, source, weights)
        info: dict[str, object] = {"model_path": str(written)}
        return PreparedWeights(version=version, digest=source.digest, weights=weights, info=info)

    async def load(self, server: Server, prepared: PreparedWeights) -> None:
        named = {"version": prepared.version, "digest": prepared.digest}
        await server.client.post(self._path, {**prepared.info, **named})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        return False


class VllmCalls:
    """Loads weights by the start, update and finish calls of vLLM servers that run our backend."""

    native_pause = True

    def __init__(self, folder: str) -> None:
        self._folder = WeightsFolder(folder) if folder else None

    async def prepare(
        self, version: int, source: WeightHandle, weights: Weights
    ) -> PreparedWeights:
        info: dict[str, object] = {"digest": source.digest}
        made = PreparedWeights(version=version, digest=source.digest, weights=weights, info=info)
        if self._folder is not None:
            info["folder"] = str(await self._folder.write(version, source, weights))
        elif source.kind == FOLDER:
            info["folder"] = str(source.location)
        else:
            made.temporary = ScratchFolder.new("transfer", memory_folder())
            file = made.temporary.path / "weights"
            found = await asyncio.to_thread(share_weights, weights, file, copy=False)
            info["places"] = [list(place) for place in found]
        return made

    async def load(self, server: Server, prepared: PreparedWeights) -> None:
        label = _label(prepared.version, prepared.digest)
        await server.client.post("/start_weight_update", {})
        await server.client.post("/update_weights", {"update_info": prepared.info})
        await server.client.post("/finish_weight_update", {"weight_version": label})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        try:
            told = await server.client.get("/weight_info")
        except HttpError as error:
            if error.retryable:
                raise
            return False  # an older server has no such call
        return isinstance(told, dict) and told.get("weight_version") == _label(version, digest)


def _label(version: int, digest: str) -> str:
    """Return the label that a server keeps with its weights; a fresh process has another."""
    return f"{version}-{digest}"


async def restore_weights(
    loader: WeightLoader, server: Server, fetch: Fetch, newest: tuple[int, WeightHandle]
) -> bool:
    """Load the newest weights into a lost server unless it reports them; return whether it is paused."""
    version, source = newest
    if await loader.holds(server, version, source.digest):
        return False
    try:
        weights = await asyncio.to_thread(checked_weights, fetch, source)
    except RunError as error:  # newer weights may follow
        raise HttpError(f"{server.url}: {error}") from error
    prepared = await loader.prepare(version, source, weights)
    try:
        if loader.native_pause:
            await server.set_paused(True)
        await loader.load(server, prepared)
    finally:
        prepared.release()
    return loader.native_pause


def on_this_machine(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _write(folder: Path, weights: Weights) -> None:
    """Write the folder's file atomically."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
