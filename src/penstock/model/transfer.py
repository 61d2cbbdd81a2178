"""Copies between host and device: into the device without a wait for the work queued there, out of it at full speed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64  # bytes
_STAGE_BYTES = 64 << 20
_COPIERS = 4  # threads
_LEAST_BYTES = 1 << 20  # for each of them
_FORMATS = {np.int64: torch.int64, np.int32: torch.int32}


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, behind the work that waits there: the host goes on at once."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays as `to_device` does, in one copy: a small copy costs the host as much as a large one."""
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


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory that shares nothing with the tensor.

    From a GPU by way of pinned memory, which is kept: straight into new memory the driver copies several times more slowly.
    """
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True)
    return copy_through(_stage(), tensor)


@functools.cache
def _stage() -> Tensor:
    return torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)


def copy_through(stage: Tensor, tensor: Tensor) -> Tensor:
    """A copy in host memory, made piece by piece through the bytes of `stage`."""
    source = tensor.detach().contiguous().view(-1).view(torch.uint8)
    copy = torch.empty(len(source), dtype=torch.uint8)
    for start in range(0, len(source), len(stage)):
        part = stage[: len(source) - start]
        part.copy_(source[start : start + len(part)])  # waits until it is there
        _copy_bytes(copy[start : start + len(part)], part)
    return copy.view(tensor.dtype).view(tensor.shape)


def _copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of bytes, with several threads: the system needs most of the time to make pages of new memory."""
    step = max(-(-len(source) // _COPIERS), _LEAST_BYTES)
    if len(source) <= step:
        target.copy_(source)
        return
    list(_copiers().map(Tensor.copy_, target.split(step), source.split(step)))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPIERS, thread_name_prefix="copy")


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
        """The values, once the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
