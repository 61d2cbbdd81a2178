"""Measures how many rows a forward pass needs so that a row's bits do not depend on the others.

Matrix libraries pick kernels by shape. With one thread, row counts that are multiples of some small
number give each row the same bits in any batch; this finds that number on the model's own shapes.
"""

from __future__ import annotations

import logging
from math import gcd

import torch
from torch import nn

from penstock.engine.transformers.cpu.buckets import KVShape
from penstock.engine.transformers.cpu.mkl import Product

log = logging.getLogger(__name__)

QUANTA = (2, 4, 8, 16, 32, 64)
_MOST_ROWS = 208
_VECTOR = (
    32  # numbers that one step of the widest vector loops takes; what is left over goes another way
)
_MOST_OUTPUTS = 65536  # of a product that is probed; larger vocabularies only cost time


def find_row_quantum(
    model: nn.Module,
    fused: list[tuple[int, int]],
    shape: KVShape,
    threads: int,
    kind: type[Product] = Product,
) -> tuple[int, bool]:
    """The row multiple to pad to, and whether rows are then independent of their neighbours.

    `fused` are the (inputs, outputs) of products that stand for several layers of the model.
    """
    if threads == 1 and _attention_holds(shape):
        sizes = _linear_sizes(model) | set(fused)
        least = max((_VECTOR // gcd(_VECTOR, inputs) for inputs, _ in sizes), default=1)
        for quantum in QUANTA:
            if quantum >= least and all(
                _linear_holds(*size, shape.dtype, quantum, kind) for size in sizes
            ):
                return quantum, True
    log.warning(
        "rollouts are correct, but their last bits depend on the batch: "
        "engine.threads got %d, bitwise equality was found at: 1 with MKL on x86",
        threads,
    )
    return 1, False


def _linear_sizes(model: nn.Module) -> set[tuple[int, int]]:
    return {
        (module.in_features, module.out_features)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    }


def _linear_holds(
    inputs: int, outputs: int, dtype: torch.dtype, quantum: int, kind: type[Product]
) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(min(outputs, _MOST_OUTPUTS), inputs, generator=generator).to(dtype)
    rows = torch.randn(_MOST_ROWS, inputs, generator=generator).to(dtype)
    product = kind(weight, None)
    whole = product(rows)
    for count in (quantum * times for times in (1, 2, 3, 5, 7, 8, 12, 17)):
        for first in (0, 5):
            part = slice(first, first + count)
            if part.stop <= _MOST_ROWS and not torch.equal(product(rows[part]), whole[part]):
                return False
    return True


def _attention_holds(shape: KVShape) -> bool:
    """Padding with masked keys and neighbours must not change a row's attention."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(shape.dtype)

    query = draw(4, shape.heads, 2, shape.key_size)
    key = draw(4, 640, shape.heads, shape.key_size).transpose(1, 2)
    value = draw(4, 640, shape.heads, shape.value_size).transpose(1, 2)
    seen_N = torch.tensor([7, 41, 30, 18])

    def attend(rows: slice, length: int) -> torch.Tensor:
        hidden = torch.arange(length)[None, :] >= seen_N[rows, None]
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(hidden, -torch.inf)
        return nn.functional.scaled_dot_product_attention(
            query[rows], key[rows, :, :length], value[rows, :, :length], mask[:, None, None, :]
        )

    whole = attend(slice(0, 4), 48)
    return all(
        torch.equal(attend(rows, length), whole[rows])
        for rows in (slice(0, 4), slice(1, 3), slice(2, 3))
        for length in (48, 64, 128, 272, 640)
    )
