"""How servers get new weights: a folder and a reload call, or vLLM's own calls for RL.

Both are given weights whose digest was checked. A reload call cannot say what the server holds after it;
our backend in a vLLM server's workers checks the digest of what it loads and refuses anything else, and
the server can be asked later for the label that it was given with them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch

from penstock.engine.openai.http_client import HttpError
from penstock.engine.openai.servers import Server
from penstock.errors import RunError
from penstock.types import WeightHandle
from penstock.weights.mapped_files import FOLDER, memory_folder, place_weights
from penstock.weights.model_weights import checked_weights

Fetch = Callable[[WeightHandle], Iterable[tuple[str, torch.Tensor]]]
Weights = dict[str, torch.Tensor]


class WeightLoader(Protocol):
    """Consumes checked weights; one server at a time holds them after `load`, or it raises."""

    native_pause: bool  # the server's own pause holds running requests meanwhile

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> Prepared:
        """All that can be done while requests run, once for all servers."""

    async def load(self, server: Server, prepared: Prepared) -> None:
        """With nothing running there: the switch itself."""

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        """Whether the server itself says that it holds these; False where it cannot say."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """Weights on their way to servers; `weights` are kept until the last one has them."""

    version: int
    digest: str
    weights: Weights
    info: dict[str, object]  # where a server finds them
    parked: tempfile.TemporaryDirectory[str] | None = None

    def release(self) -> None:
        if self.parked is not None:
            self.parked.cleanup()


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
        if folder in self._written:  # for a server that comes back
            return folder
        await asyncio.to_thread(_write, folder, weights)
        self._written.append(folder)
        for old in self._written[:-2]:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        del self._written[:-2]
        return folder


class ReloadCall:
    """A POST that names the folder, e.g. /update_weights_from_disk of SGLang."""

    native_pause = False

    def __init__(self, folder: str, path: str) -> None:
        self._folder, self._path = WeightsFolder(folder), path

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> Prepared:
        written = await self._folder.write(version, source, weights)
        info: dict[str, object] = {"model_path": str(written)}
        return Prepared(version=version, digest=source.digest, weights=weights, info=info)

    async def load(self, server: Server, prepared: Prepared) -> None:
        named = {"version": prepared.version, "digest": prepared.digest}
        await server.client.post(self._path, {**prepared.info, **named})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        return False


class VllmCalls:
    """Start, update, finish at vLLM servers whose weight-transfer backend is ours."""

    native_pause = True

    def __init__(self, folder: str) -> None:
        self._folder = WeightsFolder(folder) if folder else None

    async def prepare(self, version: int, source: WeightHandle, weights: Weights) -> Prepared:
        info: dict[str, object] = {"digest": source.digest}
        made = Prepared(version=version, digest=source.digest, weights=weights, info=info)
        if self._folder is not None:
            info["folder"] = str(await self._folder.write(version, source, weights))
        elif source.kind == FOLDER:
            info["folder"] = str(source.location)
        else:
            made.parked = tempfile.TemporaryDirectory(prefix="penstock-", dir=memory_folder())
            file = Path(made.parked.name) / "weights"
            found = await asyncio.to_thread(place_weights, weights, file, copy=False)
            info["places"] = [list(place) for place in found]
        return made

    async def load(self, server: Server, prepared: Prepared) -> None:
        label = _label(prepared.version, prepared.digest)
        await server.client.post("/start_weight_update", {})
        await server.client.post("/update_weights", {"update_info": prepared.info})
        await server.client.post("/finish_weight_update", {"weight_version": label})

    async def holds(self, server: Server, version: int, digest: str) -> bool:
        try:
            told = await server.client.get("/weight_info")
        except HttpError as error:
            if error.again:
                raise
            return False  # an older server has no such page
        return isinstance(told, dict) and told.get("weight_version") == _label(version, digest)


def _label(version: int, digest: str) -> str:
    """What a server is told to call weights; a fresh process has another name for its own."""
    return f"{version}-{digest}"


async def load_again(
    loader: WeightLoader, server: Server, fetch: Fetch, newest: tuple[int, WeightHandle]
) -> bool:
    """For a server that was lost, unless it says itself that it holds these. Whether it was paused for it."""
    version, source = newest
    if await loader.holds(server, version, source.digest):
        return False
    try:
        weights = await asyncio.to_thread(checked_weights, fetch, source)
    except RunError as error:  # newer ones may be on their way
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
    """Whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
