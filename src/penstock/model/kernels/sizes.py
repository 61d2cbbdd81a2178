"""Sizes of launches in plain Python: Triton's own functions of these names take 10 us a call, more than a launch."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Into how many blocks of a size a count is cut."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
