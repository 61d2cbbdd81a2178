"""A trainer's tensors in a checkpoint: every rank writes the rows it holds, any number of ranks reads.

    shards/rank-R-of-W.pt    {"pieces": {name: (first row, rows)}, "random": ...}

No rank needs another one to write or to read, so writing can go on beside training. One rank alone
has the same pieces in `consumer.pt`. What the tensors are is `state.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.train.parallel import Ranks

Piece = tuple[int, Tensor]  # the number of its first row in the whole tensor, and its rows
Pieces = dict[str, Piece]


def pieces_of(
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    held: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Pieces:
    """Copies in host memory of what this rank holds; what all hold alike is the first one's.

    `held` tells where rows are that have been moved away.
    """
    return {
        name: (first, host_copy(held(rows)))
        for name, tensor in tensors.items()
        for first, rows in [_local(tensor, ranks)]
        if ranks.is_first or rows is not tensor
    }


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in this machine's memory that no later step can change."""
    return tensor.detach().to("cpu", copy=True)


def file_of(folder: Path, rank: int, world: int) -> Path:
    return folder / "shards" / f"rank-{rank}-of-{world}.pt"


def read_shards(folder: Path, world: int) -> list[dict[str, Any]]:
    """What each of the ranks wrote; the rows stay on disk until they are copied."""
    paths = [file_of(folder, rank, world) for rank in range(world)]
    return [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]


def fill(own: Mapping[str, Tensor], saved: Iterable[Pieces], ranks: Ranks, folder: Path) -> None:
    """Copy the rows that this rank holds out of pieces that any number of ranks saved.

    Moments that were not saved are zero: there had been no update.
    """
    pieces: dict[str, list[Piece]] = {}
    for part in saved:
        for name, piece in part.items():
            pieces.setdefault(name, []).append(piece)
    missing = [name for name in own if name.startswith("master/") and name not in pieces]
    differing = sorted([*missing, *(pieces.keys() - own.keys())])
    if differing:
        raise RunError(f"checkpoint {folder}: its weights are not the model's: {differing[:3]}")
    with torch.no_grad():
        for name, tensor in own.items():
            first, rows = _local(tensor, ranks)
            if name not in pieces:
                rows.zero_()
            elif _copy_rows(rows, first, pieces[name]) != rows.numel():
                raise RunError(f"checkpoint {folder}: {name} is not whole")


def _local(tensor: Tensor, ranks: Ranks) -> Piece:
    """The rows that this rank holds, and where they begin; a tensor that is not split is itself."""
    if not hasattr(tensor, "device_mesh"):
        return 0, tensor
    whole: Any = tensor
    assert [placement.is_shard(0) for placement in whole.placements] == [True], "split by rows"
    rows_each = -(-len(tensor) // ranks.world)
    return min(ranks.rank * rows_each, len(tensor)), whole.to_local()


def _copy_rows(target: Tensor, first: int, pieces: Iterable[Piece]) -> int:
    """Copy those rows of the pieces that the target has; how many numbers were copied."""
    copied = 0
    for start, rows in pieces:
        if not target.ndim:
            target.copy_(rows)
            return 1
        begin, end = max(first, start), min(first + len(target), start + len(rows))
        if begin < end:
            target[begin - first : end - first].copy_(rows[begin - start : end - start])
            copied += rows[begin - start : end - start].numel()
    return copied
