"""A process that publishes weights, or holds those of another, until it is killed."""

from __future__ import annotations

from pathlib import Path

from penstock.types import WeightHandle
from penstock.weights.shared_memory import BufferWriter, SharedMemorySync
from penstock.workers.processes.process_worker import ProcessWorker
from stages.publications import weights


class WeightHolder:
    """What the process serves."""

    def publish(self, folder: Path) -> tuple[WeightHandle, WeightHandle | None]:
        """Publish one version and announce the next."""
        self.trainer = SharedMemorySync(folder)
        first = self.trainer.publish(1, "d", weights(1))
        return first, self.trainer.announce(2, "e")

    def hold(self, handle: WeightHandle) -> None:
        self.held = list(SharedMemorySync().fetch(handle))

    def begin(self, path: Path, count: int) -> bool:
        self.writer = BufferWriter(path)
        return self.writer.begin(1, count)

    def mark(self, count: int) -> None:
        """Write so many bytes, one after the other."""
        for written in range(1, count + 1):
            self.writer.mark_written(written)


async def start_holder(folder: Path) -> ProcessWorker:
    part = f"{__file__}:WeightHolder"
    limits = {"threads": 1, "timeout_s": 60}
    return await ProcessWorker.start("holder", part, log_path=folder / "holder.log", **limits)
