"""The protocol of a worker: a process, a Ray actor, a thread, or several trainer ranks as one."""

from __future__ import annotations

from typing import Any, Protocol


class Worker(Protocol):
    """A part in another process or thread. Calls raise WorkerDied once the worker has ended."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Where the worker runs: a process id, a node."""

    @property
    def can_be_killed(self) -> bool:
        """False for a part of this process."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def ended(self) -> str:
        """Wait until the worker has ended; return the reason."""

    async def stack(self) -> str:
        """What the worker's threads are doing; empty for a part of this process."""

    async def activity(self) -> float | None:
        """The seconds of work that the worker has spent (`activity.py`); None if unknown."""

    async def kill(self) -> None:
        """End the worker now, even if it is blocked."""

    async def close(self) -> None:
        """Let the worker end, and make sure that it does."""
