"""What a worker is to those who call it: a process, a Ray actor, or several trainer ranks as one."""

from __future__ import annotations

from typing import Any, Protocol


class Worker(Protocol):
    """A part that lives elsewhere. Calls raise WorkerDied once it is gone."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Where it sits: a process id, a node."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    async def ended(self) -> str:
        """Returns, with the reason, when the worker is gone."""

    async def stack(self) -> str:
        """What its threads are doing."""

    async def effort(self) -> float | None:
        """Seconds of work that it has spent (`activity.py`), whatever it does; None: it cannot be told."""

    async def kill(self) -> None:
        """End it now, whatever it does."""

    async def close(self) -> None:
        """End it in peace, and make sure of it."""
