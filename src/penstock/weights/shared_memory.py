"""Weights that processes of one machine hand over through memory they share.

The memory is the host's (memory-mapped files) or, on a GPU, the device's (CUDA IPC). Publishing fills a
weight buffer (`buffer.py`) that nobody reads; two buffers alternate, and a slow reader costs a third.
Fetching yields tensors that are views of the buffer, with no copy. `announce` gives the handle out before
the bytes are written, so that engines read the first bytes while the last are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from penstock.types import WeightHandle
from penstock.weights.buffer import CAN_WAIT_FOR_BYTES, BufferReader, BufferWriter, ReaderCache
from penstock.weights.layout import Entry, dtype_name, end_of, layout_of, views

WAKE_BYTES = 8 * 2**20  # wake waiting readers after every so many bytes
DEVICE_WAKE_BYTES = 256 * 2**20  # the same on a GPU, where each wake-up first waits for the device
SHARED_MEMORY = "shared_memory"  # the kind of the handles


class SharedMemorySync:
    """One end of the path: the consumer publishes into the folder, an engine fetches."""

    def __init__(self, folder: str | Path = "", *, node: str = "", on_device: bool = False) -> None:
        """`node` names the folder's machine, for the distributors that send weights to other machines.

        `on_device`: publish in the memory of the GPU that holds the weights.
        """
        self._folder, self._node, self._on_device = Path(folder), node, on_device
        self._device = torch.device("cpu")  # where buffers are published
        self._buffers: list[BufferWriter] = []
        self._layout: tuple[list[Entry], int] | None = None
        self._announced: tuple[WeightHandle, BufferWriter] | None = None
        self._cache = ReaderCache()

    # ---- the consumer's end

    def announce(self, version: int, digest: str) -> WeightHandle | None:
        """The handle of the next publication; None if its layout is not known yet."""
        if self._layout is None or not CAN_WAIT_FOR_BYTES:
            return None
        self._abandon_announced()
        entries, size = self._layout
        buffer = self.begin_buffer(size)
        handle = self._handle(version, digest, buffer, entries, size)
        self._announced = (handle, buffer)
        return handle

    def publish(
        self, version: int, digest: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightHandle:
        if self._announced is not None:
            handle, buffer = self._announced
            if (handle.version, handle.digest) == (version, digest):
                try:
                    self._write(buffer, handle.location["tensors"], weights)
                finally:
                    self._abandon_announced()
                return handle
            self._abandon_announced()
        tensors = [(name, tensor.detach()) for name, tensor in weights]
        entries, size = self._layout = layout_of(tensors)
        if self._on_device and tensors:
            self._device = tensors[0][1].device
        buffer = self.begin_buffer(size)
        try:
            self._write(buffer, entries, tensors)
        finally:
            buffer.abandon()
        return self._handle(version, digest, buffer, entries, size)

    def _write(
        self,
        buffer: BufferWriter,
        entries: list[Entry],
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        marked = 0
        wake_bytes = DEVICE_WAKE_BYTES if buffer.bytes.is_cuda else WAKE_BYTES
        targets = zip(entries, views(buffer.bytes, entries), strict=True)
        for (entry, (_, target)), (name, tensor) in zip(targets, weights, strict=True):
            got, announced = (name, dtype_name(tensor), tuple(tensor.shape)), tuple(entry[:3])
            assert got == announced, f"got {got}, announced was {announced}"
            target.copy_(tensor.detach())
            if (end := end_of(entry)) - marked >= wake_bytes:
                buffer.mark_written(marked := end)
        buffer.mark_written(len(buffer.bytes))

    def begin_buffer(self, size: int) -> BufferWriter:
        """Begin a buffer that nobody reads, never the newest complete one; remove spare buffers."""
        if not self._buffers:
            self._buffers = [BufferWriter(path) for path in sorted(self._folder.glob("buffer-*"))]
        buffers = self._buffers
        number = max((buffer.number for buffer in buffers), default=0) + 1
        newest = max((buffer.number for buffer in buffers if buffer.is_complete), default=0)
        older = [buffer for buffer in buffers if buffer.number != newest]
        begun = next((buffer for buffer in older if buffer.begin(number, size, self._device)), None)
        spare = [buffer for buffer in older if buffer is not begun]
        self._buffers = [buffer for buffer in buffers if buffer not in spare or not buffer.remove()]
        if begun is None:
            names = (self._folder / f"buffer-{n}" for n in itertools.count())
            begun = BufferWriter(next(name for name in names if not name.exists()))
            is_begun = begun.begin(number, size, self._device)
            assert is_begun, "a new file has no reader"
            self._buffers.append(begun)
        return begun

    def _handle(
        self, version: int, digest: str, buffer: BufferWriter, entries: list[Entry], size: int
    ) -> WeightHandle:
        location = location_of(buffer, entries, size, self._node)
        return WeightHandle(version=version, digest=digest, kind=SHARED_MEMORY, location=location)

    def _abandon_announced(self) -> None:
        if self._announced is not None:
            self._announced[1].abandon()
            self._announced = None

    # ---- an engine's end

    def fetch(self, handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
        buffer, entries = self.open_buffer(handle), handle.location["tensors"]
        for entry, weight in zip(entries, views(buffer.bytes, entries), strict=True):
            buffer.wait_until_written(end_of(entry))
            yield weight

    def open_buffer(self, handle: WeightHandle) -> BufferReader:
        where = handle.location
        return BufferReader(
            Path(where["path"]), where["number"], where["size"], self._cache, where["device"]
        )

    def close(self) -> None:
        self._abandon_announced()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        self._cache.clear()  # views that are still alive keep their own reference


def location_of(buffer: BufferWriter, entries: list[Entry], size: int, node: str) -> dict:
    return {
        "node": node,
        "path": str(buffer.path),
        "number": buffer.number,
        "size": size,
        "device": buffer.device_handle,
        "tensors": entries,
    }
