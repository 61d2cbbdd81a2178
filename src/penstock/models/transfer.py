"""Copies between host and device that do not make the host wait for the work that is queued there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64  # bytes
_FORMATS = {np.int64: torch.int64, np.int32: torch.int32}


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, behind the work that waits there: the host goes on at once."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays as `to_device` does, all in one copy: each would cost the host as much as the largest."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = list(itertools.accumulate(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    for array, start in zip(arrays, [0, *ends], strict=False):
        host[start : start + array.nbytes].numpy()[:] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_FORMATS[array.dtype.type]).view(array.shape)
        for array, start in zip(arrays, [0, *ends], strict=False)
    ]


class HostCopy:
    """A tensor on its way to the host; a CPU tensor is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the values, once the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
