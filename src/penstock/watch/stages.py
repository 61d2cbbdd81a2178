"""What a part does while it starts, said by the part itself: `tell_stage("loading the model")`.

The program around the part listens: a worker process sends each stage to the driver, whose start display
shows it and whose log keeps it (`track/start_display.py`). Where nobody listens, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[str], None] | None = None


def tell_stage(text: str) -> None:
    """Say what begins now; it lasts until the next stage of this process."""
    if _listener is not None:
        _listener(text)


def listen(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with every stage of this process, in the thread that tells it."""
    global _listener
    _listener = listener
