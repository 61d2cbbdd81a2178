"""Find the row multiple at which a row's bits do not depend on the rest of its batch.

Matrix libraries pick kernels by shape. With one thread, row counts that are multiples of some small
number give each row the same bits in any batch; this file measures that number on the model's own shapes.
"""

from __future__ import annotations

import functools
import logging
from math import gcd

import torch
from torch import nn

from penstock.engine.transformers.cpu.cpu_steps import attend_rows
from penstock.engine.transformers.kv_attention import KVShape
from penstock.model.attention import AttentionCall
from penstock.model.joint_weights import PlainLinear

log = logging.getLogger(__name__)

QUANTA = (2, 4, 8, 16, 32, 64)
_MOST_ROWS = 208
_VECTOR = 32  # numbers per step of the widest vector loop; a remainder takes another code path
_MOST_OUTPUTS = 65536  # most outputs of a probed product; more would only cost time
_DRAWN_OUTPUTS = 4096  # outputs with weights of their own; further ones repeat them


def find_row_quantum(
    sizes: set[tuple[int, int]],
    shape: KVShape,
    threads: int,
    kind: type[PlainLinear] = PlainLinear,
    plain: bool = False,
) -> tuple[int, bool]:
    """The row multiple to pad to, and whether it makes rows independent of each other.

    `sizes` are the (inputs, outputs) of the model's products; `plain`: its attention is not fused.
    """
    if threads == 1 and _attention_is_invariant(shape, plain):
        least = max((_VECTOR // gcd(_VECTOR, inputs) for inputs, _ in sizes), default=1)
        for quantum in QUANTA:
            if quantum >= least and all(
                _linear_is_invariant(*size, shape.dtype, quantum, kind)  # type: ignore[arg-type]  # mypy: classes have no hash
                for size in sizes
            ):
                return quantum, True
    log.warning(
        "rollouts are correct, but their last bits depend on the batch: engine.threads: got %d, "
        "allowed for equal bits: 1, on x86 with MKL",
        threads,
    )
    return 1, False


def linear_sizes(model: nn.Module) -> set[tuple[int, int]]:
    """The inputs and outputs of the linear layers of a model."""
    return {
        (module.in_features, module.out_features)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    }


@functools.cache
def _linear_is_invariant(
    inputs: int, outputs: int, dtype: torch.dtype, quantum: int, kind: type[PlainLinear]
) -> bool:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(min(outputs, _DRAWN_OUTPUTS), inputs, generator=generator).to(dtype)
    probed = min(outputs, _MOST_OUTPUTS)
    weight = sample.repeat(-(-probed // len(sample)), 1)[:probed].contiguous()
    rows = torch.randn(_MOST_ROWS, inputs, generator=generator).to(dtype)
    linear = kind(weight, None)
    whole = linear(rows)
    for count in (quantum * times for times in (1, 2, 3, 5, 7, 8, 12, 17)):
        for first in (0, 5):
            part = slice(first, first + count)
            if part.stop <= _MOST_ROWS and not torch.equal(linear(rows[part]), whole[part]):
                return False
    return True


@functools.cache
def _attention_is_invariant(shape: KVShape, plain: bool) -> bool:
    """Whether masked keys and other rows leave a row's attention unchanged."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(shape.dtype)

    query = draw(4, 2 * shape.heads, shape.key_size)
    key = draw(4, 640, shape.heads, shape.key_size).transpose(1, 2)
    value = draw(4, 640, shape.heads, shape.value_size).transpose(1, 2)
    seen_N = torch.tensor([7, 41, 30, 18])

    def attend(rows: slice, length: int) -> torch.Tensor:
        hidden = torch.arange(length)[None, :] >= seen_N[rows, None]
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
        softcap = 1.0 if plain else None
        call = AttentionCall(query, key, value, shape.key_size**-0.5, None, softcap, None)
        output = query.new_empty(len(query[rows]), 2 * shape.heads, shape.value_size)
        stored = key[rows, :, :length], value[rows, :, :length]
        attend_rows(query[rows], *stored, mask[:, None, None, :], call, output)
        return output

    whole = attend(slice(0, 4), 48)
    return all(
        torch.equal(attend(rows, length), whole[rows])
        for rows in (slice(0, 4), slice(1, 3), slice(2, 3))
        for length in (48, 64, 128, 272, 640)
    )
