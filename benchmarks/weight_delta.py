"""Versions of real weights for `weight_sync.py --delta`: what a delta saves, in bytes and seconds.

Versions are models in folders (`--versions`, such as the checkpoints of a run), or updates by AdamW as the trainer
makes them, on the shape of SmolLM2-135M in bfloat16: float32 masters that begin anywhere in the rounding cells of
their weights (`train.masters = dithered`), and gradients of noise beside a lasting part.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.files import weight_folder
from penstock.weights.digest import digest_of
from penstock.weights.model_weights import read_folder
from penstock.weights.shared_memory import SharedMemorySync

Weights = dict[str, torch.Tensor]
BETAS, WEIGHT_STD, NORM = (0.9, 0.95), 0.04, 1.0


def smollm2_shape() -> Weights:
    """Return bfloat16 weights of SmolLM2-135M's shape, normal around 0, norms around 1."""
    hidden, heads, inner, layers, words = 576, 192, 1536, 30, 49152
    shapes: dict[str, tuple[int, ...]] = {"embed": (words, hidden)}
    for layer in range(layers):
        for name, shape in {
            "q": (hidden, hidden),
            "k": (heads, hidden),
            "v": (heads, hidden),
            "o": (hidden, hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            shapes[f"{layer}.{name}"] = shape
        shapes[f"{layer}.norm1"] = shapes[f"{layer}.norm2"] = (hidden,)
    torch.manual_seed(0)
    return {
        name: (
            torch.randn(shape) * WEIGHT_STD
            if len(shape) > 1
            else NORM + WEIGHT_STD * torch.randn(shape)
        ).bfloat16()
        for name, shape in shapes.items()
    }


def folders(paths: list[Path]) -> Iterator[Weights]:
    for path in paths:
        yield read_folder(path)


class AdamW:
    """Updates of float32 masters, as the trainer makes them; gradients are made up."""

    def __init__(self, weights: Weights, lr: float, decay: float = 0.0) -> None:
        self._lr, self._decay, self._steps = lr, decay, 0
        self._masters = {name: dithered(weight) for name, weight in weights.items()}
        self._lasting = {name: torch.randn(w.shape).bfloat16() for name, w in weights.items()}
        self._mean = {name: torch.zeros(w.shape) for name, w in weights.items()}
        self._square = {name: torch.zeros(w.shape) for name, w in weights.items()}

    def step(self) -> Weights:
        """Do one update; return the weights."""
        self._steps += 1
        first, second = BETAS
        for name, master in self._masters.items():
            gradient = torch.randn(master.shape).add_(self._lasting[name], alpha=0.3)
            mean = self._mean[name].lerp_(gradient, 1 - first)
            square = self._square[name].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            root = (square / (1 - second**self._steps)).sqrt_().add_(1e-8)
            master.mul_(1 - self._lr * self._decay)
            master.addcdiv_(mean, root, value=-self._lr / (1 - first**self._steps))
        return {name: master.bfloat16() for name, master in self._masters.items()}


def dithered(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 master anywhere in the rounding cell of a bfloat16 weight."""
    bits = weight.float().view(torch.int32)
    return (bits + torch.randint(-(1 << 15) + 1, 1 << 15, bits.shape, dtype=torch.int32)).view(
        torch.float32
    )


def updates(lr: float, count: int) -> Iterator[Weights]:
    weights = smollm2_shape()
    yield weights
    trained = AdamW(weights, lr)
    for _ in range(count):
        yield trained.step()


def compare(title: str, versions: Iterator[Weights], make_nodes: Any) -> None:
    """Send each version whole and as a delta to another node; print bytes and seconds of both."""
    folder, sync_folders = tempfile.TemporaryDirectory(), [weight_folder(), weight_folder()]
    syncs = [SharedMemorySync(one.path, node="here") for one in sync_folders]
    kinds = ("two nodes", "two nodes, delta")
    nodes = [make_nodes(kind, 1, Path(folder.name)) for kind in kinds]
    reader, before = SharedMemorySync(), None
    try:
        for version, weights in enumerate(versions):
            digest = digest_of(weights.items())
            taken = []
            for sync, there in zip(syncs, nodes, strict=True):
                handle = sync.publish(version, digest, weights.items())
                started = time.perf_counter()
                (copy,) = there.for_each(handle, 1)
                taken.append((time.perf_counter() - started, there.received()))
                assert digest_of(reader.fetch(copy)) == digest, "the digest proves the result"
            changed = share_changed(before, weights)
            before = weights
            (whole_s, whole), (delta_s, sent) = taken
            print(
                f"{title}, version {version}: {changed:7.3%} of the weights changed; whole {whole / 1e6:.1f} MB "
                f"in {whole_s:.3f} s, delta {sent / 1e6:.2f} MB in {delta_s:.3f} s: "
                f"{whole / sent:.1f} times fewer bytes, equal digests",
                flush=True,
            )
    finally:
        for there in nodes:
            there.close()
        for sync in syncs:
            sync.close()
        for one in sync_folders:
            one.remove()
        folder.cleanup()


def share_changed(before: Weights | None, after: Weights) -> float:
    if before is None:
        return 1.0
    changed = sum(int((before[name] != weight).sum()) for name, weight in after.items())
    return changed / sum(weight.numel() for weight in after.values())
