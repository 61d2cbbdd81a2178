"""A part that lives in a Ray actor.

The actor serves its part as a worker process does (`rpc.py`). A call that never returns reports
the actor's end at once; nothing polls. A second event loop, on its own thread, answers the watchdog, so
that an actor whose main event loop is blocked still shows its stack.

Ray wraps an error into pages of text; a person gets the exception's own type and message, or Ray's reason for
the actor's end, in one line (`why`). Large arguments of a call, such as a batch, go through Ray's object
store, which spills to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import pickle
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)

from penstock.errors import PartFailed, RunError, WorkerDied
from penstock.workers.rpc import (
    LONGEST_LINE,
    RpcServer,
    activity_of,
    append_to_log,
    one_line,
    portable_error,
    stacks,
    with_log_path,
)
from penstock.workers.supervise.trainer import port_of, reserve_port

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


_CALLS_AT_ONCE = 4096
# Calls with many small objects, several hundred times a second: pickle takes half of Ray's time.
_PACKED = ("generate", "generate_many")
_WATCH = "watch"  # a second event loop of the actor, on its own thread
_STACK_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class Where(NamedTuple):
    """Where an actor runs."""

    node: str
    address: str
    pid: int
    free_port: int
    logs_to_run: bool  # the actor's output goes to the run's own log


class ServingActor:
    """The actor itself: serves one part."""

    def __init__(self, name: str, log_path: str, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._logs_to_run = False  # unless the run's folder is on this node
        with contextlib.suppress(OSError):
            descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            self._logs_to_run = True
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self._name, self._server = name, RpcServer(name)
        # holds a port, for the case that this is rank 0 of the trainer
        self._reserved: socket.socket

    async def where(self) -> Where:
        address = ray.util.get_node_ip_address()
        self._reserved = reserve_port(address)
        node = ray.get_runtime_context().get_node_id()
        return Where(node, address, os.getpid(), port_of(self._reserved), self._logs_to_run)

    async def build(self, search_path: list[str], factory: str, args: tuple) -> Any:
        try:
            await self._server.build_named(search_path, factory, args)
            return None, None
        except Exception as error:  # the edge of the part: the driver gets its error
            return portable_error(self._name, error), None
        finally:
            self._reserved.close()

    async def call(self, method: str, args: tuple) -> Any:
        try:
            return None, await self._server.call(method, args)
        except Exception as error:  # the edge of the part: the driver gets its error
            return portable_error(self._name, error), None

    async def packed_call(self, packed: bytes) -> bytes:
        return _packed(await self.call(*pickle.loads(packed)))

    @ray.method(concurrency_group=_WATCH)
    async def stack(self) -> str:
        return stacks()

    @ray.method(concurrency_group=_WATCH)
    async def activity(self) -> float | None:
        return activity_of(os.getpid())

    async def forever(self) -> None:
        await asyncio.Event().wait()


class ActorWorker:
    """See `Worker`. Consumes method calls, produces results from the actor."""

    can_be_killed = True

    def __init__(self, name: str, actor: Any, where: Where, log_path: Path) -> None:
        self.name = name
        self._log_path, self._logs_to_run = log_path, where.logs_to_run
        self.node, self.address = where.node, where.address
        self.pid, self.free_port = where.pid, where.free_port
        self._actor = actor
        self._end: asyncio.Task[Any] = asyncio.ensure_future(actor.forever.remote())
        self._end.add_done_callback(lambda task: task.cancelled() or task.exception())

    @classmethod
    async def create(
        cls, name: str, log_path: Path, threads: int, timeout_s: float, **options: Any
    ) -> ActorWorker:
        """Create an actor that serves nothing yet; `build` gives it its part."""
        as_actor: Any = ray.remote
        watched = as_actor(concurrency_groups={_WATCH: 4})(ServingActor)
        make = watched.options(max_concurrency=_CALLS_AT_ONCE, **options)
        actor = make.remote(name, str(log_path), threads)
        try:
            async with asyncio.timeout(timeout_s):
                where = await actor.where.remote()
        except TimeoutError:
            ray.kill(actor)
            raise RunError(f"{name}: Ray gave it no place within {timeout_s:g} s") from None
        except RayError as error:
            append_to_log(log_path.parent, log_path.stem, str(error))
            line = f"{name}: the actor could not be started: {why(error)} (log: {log_path})"
            raise WorkerDied(line) from error
        except BaseException:  # a stop during the start: the actor must not outlive it
            ray.kill(actor)
            raise
        return cls(name, actor, where, log_path)

    async def build(self, factory: str, *args: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask("build", sys.path, factory, args)
        except TimeoutError:
            await self.kill()
            raise RunError(f"{self.name}: not ready after {timeout_s:g} s") from None

    @property
    def place(self) -> str:
        return f"node {self.address} pid {self.pid}"

    async def call(self, method: str, *args: Any) -> Any:
        if method in _PACKED:
            return await self._ask("packed_call", _packed((method, args)))
        return await self._ask("call", method, args)  # large arguments become objects of the store

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            answer = await getattr(self._actor, method).remote(*args)
            error, result = pickle.loads(answer) if isinstance(answer, bytes) else answer
        except RayError as fault:
            if isinstance(fault, ACTOR_IS_GONE) and not isinstance(fault, RayTaskError):
                ray.kill(self._actor)  # an actor that cannot be reached must not come back
                raise WorkerDied(f"{self.name}: {why(fault)}") from None
            self._log(str(fault))
            failed = PartFailed(f"{self.name}: {why(fault)}")
            raise with_log_path(failed, self._log_path) from None
        if error is None:
            return result
        if not self._logs_to_run:
            self._log("\n".join(getattr(error, "__notes__", [])))
        raise with_log_path(error, self._log_path)

    def _log(self, text: str) -> None:
        append_to_log(self._log_path.parent, self._log_path.stem, text)

    async def ended(self) -> str:
        await asyncio.wait([self._end])
        fault = self._end.exception()
        return f"{self.name}: the actor ended unexpectedly: {why(fault)} (log: {self._log_path})"

    async def stack(self) -> str:
        """Ask the actor's second event loop; if no thread can run, let a signal write the stack to its log."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                return str(await self._actor.stack.remote())
        if not self._is_here:
            return f"{self.name}: none of its threads can run, on another machine ({self.place})"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        return f"{self.name}: none of its threads can run; by signal: the end of {self._log_path}"

    @property
    def _is_here(self) -> bool:
        return bool(self.address == ray.util.get_node_ip_address())

    async def activity(self) -> float | None:
        if self._is_here:  # send the signal from outside: the actor may be blocked
            return await asyncio.to_thread(activity_of, self.pid)
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(_STACK_TIMEOUT_S):
                spent: float | None = await self._actor.activity.remote()
                return spent
        return None

    async def kill(self) -> None:
        ray.kill(self._actor)

    async def close(self) -> None:
        ray.kill(self._actor)
        await asyncio.wait([self._end], timeout=_CLOSE_TIMEOUT_S)
        self._end.cancel()


def as_actor(part: type, options: dict[str, Any]) -> Any:
    """A class as a Ray actor with these options of Ray."""
    return ray.remote(part).options(**options)


def _packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
