"""How servers get new weights: a folder and a reload call, or vLLM's own calls for RL. Layer 1.

Both are given weights whose digest was checked. A reload call cannot say what the server holds after it;
our backend in a vLLM server's workers checks the digest of what it loads and refuses anything else.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from penstock.engine.servers import Servers
from penstock.engine.weight_places import FOLDER, memory_folder, place_weights
from penstock.types import WeightHandle

Weights = dict[str, torch.Tensor]


class WeightLoader(Protocol):
    """Consumes checked weights; returns when every server holds them, raises if one does not."""

    native_pause: bool  # the servers' own pause holds running requests meanwhile

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> None:
        """All that can be done while requests run."""

    async def load(self, version: int, digest: str) -> None:
        """With nothing running: the switch itself."""


class WeightsFolder:
    """`version-N` folders of safetensors; the newest two stay."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._written: list[Path] = []

    async def write(self, version: int, source: WeightHandle, weights: Weights) -> Path:
        """Where the weights lie; those that are a folder already are not written again."""
        if source.kind == FOLDER:
            return Path(source.location)
        folder = self._folder / f"version-{version}"
        await asyncio.to_thread(_write, folder, weights)
        self._written.append(folder)
        for old in self._written[:-2]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        del self._written[:-2]
        return folder


class ReloadCall:
    """A POST that names the folder, e.g. /update_weights_from_disk of SGLang."""

    native_pause = False

    def __init__(self, servers: Servers, folder: str, path: str) -> None:
        self._servers, self._folder, self._path = servers, WeightsFolder(folder), path
        self._newest = Path()

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> None:
        self._newest = await self._folder.write(version, source, weights)

    async def load(self, version: int, digest: str) -> None:
        body = {"model_path": str(self._newest), "version": version, "digest": digest}
        await self._servers.post_all(self._path, body)


class VllmCalls:
    """Start, update, finish at vLLM servers whose weight-transfer backend is ours."""

    native_pause = True

    def __init__(self, servers: Servers, folder: str) -> None:
        self._servers = servers
        self._folder = WeightsFolder(folder) if folder else None
        self._parked: tempfile.TemporaryDirectory[str] | None = None
        self._info: dict[str, object] = {}

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> None:
        self._info = {"digest": source.digest}
        if self._folder is not None:
            self._info["folder"] = str(await self._folder.write(version, source, weights))
        elif source.kind == FOLDER:
            self._info["folder"] = str(source.location)
        else:
            self._parked = tempfile.TemporaryDirectory(prefix="penstock-", dir=memory_folder())
            file = Path(self._parked.name) / "weights"
            found = await asyncio.to_thread(place_weights, weights, file, copy=False)
            self._info["places"] = [list(place) for place in found]

    async def load(self, version: int, digest: str) -> None:
        try:
            await self._servers.post_all("/start_weight_update", {})
            await self._servers.post_all("/update_weights", {"update_info": self._info})
            await self._servers.post_all("/finish_weight_update", {"weight_version": str(version)})
        finally:
            if self._parked is not None:
                self._parked.cleanup()
                self._parked = None


def on_this_machine(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _write(folder: Path, weights: Weights) -> None:
    """Whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
