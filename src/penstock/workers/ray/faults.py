"""Ray's errors in one line: the exception that an actor raised, or Ray's reason for its end.

Ray wraps both into pages of text. A person needs the exception's own type and message; the rest belongs
in the log. Large arguments of a call, such as a batch, go through Ray's object store, which spills to disk. If
that is full too, sending is repeated for a bounded time (`retry_while_full`): other objects are freed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from penstock.errors import RunError
from penstock.workers.rpc import LONGEST_LINE, one_line

# What Ray raises for a call if the actor is gone or never started.
ACTOR_IS_GONE = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    LocalRayletDiedError,
    ActorUnschedulableError,
    ActorPlacementGroupRemoved,
    RuntimeEnvSetupError,
)
_FRAME = re.compile(r'^ *File "')
_GROUP_MARGIN = re.compile(r"^ *[|+][ -]?")  # before the lines of an exception group's traceback
_EXIT = re.compile(r"Worker exit type: (\S+) Worker exit detail: (.*)")
_IDS = re.compile(r"^\t(class_name|actor_id|pid|name|namespace|ip): ")
_ADVICE = re.compile(r"Some common causes include|Object store memory usage:")
_NO_REASON = "Worker unexpectedly exits with a connection error"
T = TypeVar("T")
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def why(error: BaseException | None) -> str:
    """The exception that was raised, if there was one, else the reason of the actor's end."""
    if error is None:
        return "no reason was given"
    if isinstance(error, RayTaskError):
        return why(error.cause)
    if not isinstance(error, RayError):
        return one_line(error)
    return _raised_last(str(error)) or _end_reason(str(error)) or type(error).__name__


def _raised_last(text: str) -> str:
    """The line under the last traceback of a text: the type without its module, the message."""
    lines = [_GROUP_MARGIN.sub("", line) for line in text.splitlines()]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return ""
    below = lines[frames[-1] + 1 :]
    while below and (not below[0].strip() or below[0].startswith(" ")):
        below.pop(0)
    kind, _, said = " ".join(" ".join(below).split()).partition(":")
    return f"{kind.rpartition('.')[2]}:{said}"[:LONGEST_LINE].removesuffix(":")


def _end_reason(text: str) -> str:
    """Ray's reason for the end, without the actor's ids and Ray's advice."""
    lines = [line.strip() for line in text.splitlines() if not _IDS.match(line)]
    if len(lines) > 1 and lines[0] == "The actor died unexpectedly before finishing this task.":
        del lines[0]
    said = _ADVICE.split(" ".join(" ".join(lines).split()))[0].strip()
    exit_ = _EXIT.search(said)
    if exit_ is not None:
        said = f"its process has ended ({exit_[1]}: {exit_[2].strip().rstrip('.')})"
        if _NO_REASON in exit_[2]:
            said += ", by a crash, a signal or the kernel for want of memory"
    return said[:LONGEST_LINE]


async def retry_while_full(what: str, send: Callable[[], T], note: Callable[[str], None]) -> T:
    """The result of `send`; repeat it after a failure to store its arguments."""
    for number, wait_s in enumerate(BACKOFF_S, 1):
        try:
            return send()
        except (ObjectStoreFullError, OutOfDiskError):
            full = f"{what}: Ray's object store and the disk under it are full"
            note(f"{full}; trying again in {wait_s:g} s ({number} of {len(BACKOFF_S)})")
        await asyncio.sleep(wait_s)  # Ray does not report free space
    try:
        return send()
    except (ObjectStoreFullError, OutOfDiskError) as error:
        waited_s = sum(BACKOFF_S)
        raise RunError(f"{what}: no room in Ray's object store for {waited_s:g} s") from error
