"""Which products of a decode step run as kernels of `row_kernels.py`, and how they and attention are cut.

The rule follows measurements on one H200. Weights are read once for every 16 rows, and the programs of a large weight
run one after another: there the library's products win. Also sizes in plain Python: Triton's own functions of these
names take 10 us a call, more than a launch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Product = Literal["heads", "out", "gate", "down"]


class Norm(NamedTuple):
    """An RMS norm: x over its root mean square, times weight + offset; rounded once."""

    weight: torch.Tensor
    epsilon: float
    offset: float = 0.0


class Tiles(NamedTuple):
    """A program computes `columns` outputs and reads `split` parts of `block` inputs at once."""

    columns: int = 16
    split: int = 8
    block: int = 128
    warps: int = 4


MOST_ROWS = 32  # more rows: the library's products
_SMALL = 1 << 21  # elements of a weight that a device holds at once
_PART = 1024  # inputs of one part; a norm needs the whole row, and a program has registers for five parts


def choose(product: Product, x_BK: torch.Tensor, weight_NK: torch.Tensor) -> Tiles | None:
    """How to cut a product; None: use the library's."""
    rows, inputs = x_BK.shape
    if rows > MOST_ROWS or (x_BK.dtype.itemsize > 2 and inputs > 256):  # no tensor cores
        return None
    if inputs <= _PART and weight_NK.numel() <= _SMALL:
        return Tiles() if rows <= 16 or product != "gate" else None
    if rows <= 16 and product == "down" and inputs <= 5 * _PART:
        return Tiles(columns=8, warps=8)
    return None


PROGRAMS = 1024  # of attention: they fill the device, and parts of long contexts end close together
MOST_SPLITS = 16  # of a context


def count_splits(contexts: int, programs: int = PROGRAMS) -> int:
    """Into how many parts contexts are split so that there are as many programs."""
    splits = 1
    while splits < MOST_SPLITS and contexts * splits < programs:
        splits *= 2
    return splits


def cdiv(count: int, size: int) -> int:
    """Into how many blocks of a size a count is cut."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
