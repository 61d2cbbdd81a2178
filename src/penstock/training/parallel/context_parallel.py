"""Context parallel: the ranks of one copy of the model share the tokens of every pack.

Each context rank runs the whole model on its run of consecutive tokens of the pack. Only attention looks
at other tokens: keys and values are gathered over the ranks there, one layer after another, and each
rank computes the rows of its own queries. Log-probs of all tokens are added up over the ranks, so the
loss, and everything around it, is that of one rank. Activations shrink with the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.model.packed_attention import Block, PackLayout, SharedKeys
from penstock.training.pack import Pack
from penstock.training.parallel.collectives import gather_tokens, sum_partial
from penstock.training.parallel.ranks import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPack:
    """This rank's tokens of a pack, and which of the pack's trained tokens they predict."""

    pack: Pack
    own_N: Tensor  # bool, of all trained tokens of the pack
    axis: Axis

    def spread(self, own_values: Tensor) -> Tensor:
        """The values of all trained tokens of the pack, from those of each rank."""
        index = self.own_N.nonzero()[:, 0]
        values_N = own_values.new_zeros(len(self.own_N)).index_put((index,), own_values)
        return sum_partial(values_N, self.axis)


def share_pack(pack: Pack, axis: Axis) -> SharedPack:
    """Give each rank the same number of consecutive tokens; padding fills up those of the last rank."""
    total = len(pack.input_ids_T)
    each = -(-total // axis.size)
    missing = each * axis.size - total
    first = axis.index * each
    ids_T, positions_T = (pad(ids, (0, missing)) for ids in (pack.input_ids_T, pack.position_ids_T))
    own_N = (pack.predictor_N >= first) & (pack.predictor_N < first + each)
    layout = replace(
        slice_layout(pack.layout, first, first + each, missing),
        gather=functools.partial(gather_tokens, axis=axis, dim=2),
    )
    return SharedPack(
        pack=replace(
            pack,
            input_ids_T=ids_T[first : first + each],
            position_ids_T=positions_T[first : first + each],
            layout=layout,
            predictor_N=pack.predictor_N[own_N] - first,
            target_N=pack.target_N[own_N],
            experts_TN=None
            if pack.experts_TN is None
            else pad(pack.experts_TN, (0, 0, 0, missing))[first : first + each],
            kept=None if pack.kept is None else pack.kept.select(own_N.cpu().numpy()),
        ),
        own_N=own_N,
        axis=axis,
    )


def slice_layout(layout: PackLayout, first: int, last: int, missing: int = 0) -> PackLayout:
    """The layout of the tokens from `first` to before `last` of a row that has all keys.

    The row ends with a sequence of `missing` tokens of padding. What a sequence has before `first` is a
    context of its tokens in the slice.
    """
    blocks: list[Block] = []
    keys: list[np.ndarray] = []
    for start, prefix, keys_K in _segments(layout, missing):
        begin, end = max(start, first), min(start + len(keys_K) - prefix, last)
        if begin < end:
            blocks.append(Block(1, end - begin, prefix + begin - start))
            keys.append(keys_K[: prefix + end - start])

    def bounds(lengths: list[int]) -> Tensor:
        cumulative = np.cumsum([0, *lengths]).astype(np.int32)
        return torch.from_numpy(cumulative).to(layout.bounds_S1.device)

    lengths, key_counts = [block.length for block in blocks], [len(index) for index in keys]
    index_K = torch.from_numpy(np.concatenate(keys)).to(layout.bounds_S1.device)
    return PackLayout(
        blocks=tuple(blocks),
        bounds_S1=bounds(lengths),
        longest=max(lengths),
        shared=SharedKeys(index_K=index_K, bounds_S1=bounds(key_counts), longest=max(key_counts)),
    )


def _segments(layout: PackLayout, missing: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first token, tokens of the context, places of all keys) of each sequence of a row."""
    start = first_key = 0
    index_K = None if layout.shared is None else layout.shared.index_K.cpu().numpy()
    for block in (*layout.blocks, *([Block(1, missing)] if missing else [])):
        for _ in range(block.count):
            num_keys = block.prefix + block.length
            if index_K is None or first_key + num_keys > len(index_K):
                yield start, 0, np.arange(start, start + block.length)
            else:
                yield start, block.prefix, index_K[first_key : first_key + num_keys]
            start, first_key = start + block.length, first_key + num_keys
