# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A Triton kernel that copies evenly spaced numbers of many tensors in one launch.

`arrival.py` does the same in plain torch, with some operations for each tensor: with hundreds of tensors the
GPU waits for them longer than the copies take. Imported only if Triton is installed and the model is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _copy(Address, Shape, Out, KIND: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    count, columns = tl.load(Shape + tensor * 5), tl.load(Shape + tensor * 5 + 1)
    row_step, column_step = tl.load(Shape + tensor * 5 + 2), tl.load(Shape + tensor * 5 + 3)
    first = tl.load(Shape + tensor * 5 + 4)
    source = tl.load(Address + tensor).to(tl.pointer_type(KIND))
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = (at // columns) * row_step + (at % columns) * column_step
    value = tl.load(source + place, mask=at < count, other=0.0)
    tl.store(Out + first + at, value.to(tl.float32), mask=at < count)


class EvenSamples:
    """Copies the same sample of each tensor as `matrix[rows, columns]` does, in float32, end to end."""

    def __init__(self, spacings: Sequence[tuple[tuple[int, int], slice, slice]]) -> None:
        """Each spacing holds the shape of a tensor as a matrix, and its sampled rows and columns."""
        shapes, first, most = [], 0, 1
        for (height, width), rows, columns in spacings:
            assert rows.start == columns.start == 0
            number = len(range(*columns.indices(width)))
            count = len(range(*rows.indices(height))) * number
            shapes.append((count, max(number, 1), width * rows.step, columns.step, first))
            first, most = first + count, max(most, count)
        self._shapes, self._total, self._most = shapes, first, most
        self._on_device: Tensor | None = None
        self._addresses: dict[tuple[int, ...], Tensor] = {}  # offloading moves tensors

    def copy(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sample of contiguous tensors of one number format."""
        device, dtype = tensors[0].device, tensors[0].dtype
        assert all(one.is_contiguous() and one.dtype == dtype for one in tensors)
        if self._on_device is None:
            self._on_device = torch.tensor(self._shapes, dtype=torch.int64, device=device)
        output = torch.empty(self._total, dtype=torch.float32, device=device)
        address = self._address_of(tuple(one.data_ptr() for one in tensors), device)
        kernel: Any = _copy
        kernel[(len(tensors), triton.cdiv(self._most, _BLOCK))](
            address, self._on_device, output, KIND=_KINDS[dtype], BLOCK=_BLOCK, num_warps=4
        )
        return output

    def _address_of(self, places: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the addresses on the device; a copy to the device would wait for its work."""
        if places not in self._addresses:
            if len(self._addresses) > 3:
                self._addresses.clear()
            self._addresses[places] = torch.tensor(places, dtype=torch.int64, device=device)
        return self._addresses[places]
