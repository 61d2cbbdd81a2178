"""The host's side of sandboxes: starts the nursery, asks it for sandboxes, runs jobs in them.

Blocking, for worker threads; every wait has a limit, and so has the data that is read from a sandbox.
Whether a solution is right is decided in `verify.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import SandboxError
from penstock.sandbox.inside import namespaces, wire
from penstock.sandbox.settings import SandboxSettings
from penstock.scratch import ScratchFolder

START_TIMEOUT_S = 60.0
REFEREE_TIMEOUT_S = 30.0  # its work is bounded: past it the machine, not the answer, is at fault
GRACE_S = 10.0  # wait this much longer than a job's own limit, then give the sandbox up
_PACKAGE_ROOT = str(Path(penstock.__file__).resolve().parent.parent)
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from penstock.sandbox.inside.nursery import main; "
    "sys.path.remove({root!r}); main({descriptor})  # nursery {number} of process {host}"
)
_numbers = itertools.count(1)
_SYSTEM_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
_MOUNT_POINTS = ("/mnt", "/srv", "/media", "/opt", "/run", "/tmp", "/home", "/var", "/proc")


@dataclass(slots=True, frozen=True)
class Mode:
    """One way to isolate: with or without bubblewrap, namespaces per sandbox, a user namespace."""

    bubblewrap: bool
    namespaces: bool
    user_namespace: bool


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result of one job."""

    status: int  # exit code, or minus the signal
    stopped: str  # why the job was stopped: wall | output; empty: it ended by itself
    stdout: bytes
    stderr: bytes
    report: bytes  # JSON lines that the child wrote
    wall_s: float
    cpu_s: float
    clean: bool  # whether the scratch folder is empty again


class SandboxLost(Exception):
    """The sandbox ended or hung in the middle of a job."""


def interpreter_paths() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the folders and files that the interpreter reads, and the symbolic links among them."""
    wanted = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_SYSTEM_PATHS]
    wanted.append(str(Path(sys.base_prefix, "lib")))
    links = [(path, os.readlink(path)) for path in _SYSTEM_PATHS if os.path.islink(path)]
    found: list[str] = []
    for path in sorted({path for path in wanted if os.path.exists(path)}, key=len):
        linked = any(path == link for link, _ in links)
        if not linked and not any(Path(path).is_relative_to(above) for above in found):
            found.append(path)
    return tuple(found), tuple(links)


def _mount_point(paths: Sequence[str]) -> str:
    for candidate in _MOUNT_POINTS:
        if os.path.isdir(candidate) and not any(Path(p).is_relative_to(candidate) for p in paths):
            return candidate
    raise SandboxError("no folder is free to mount a sandbox on")


def bubblewrap_command(descriptor: int) -> list[str] | None:
    """Return the command that runs the nursery in bubblewrap; None if it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    paths, links = interpreter_paths()
    binary = os.path.realpath(sys.executable)
    command = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--new-session", "--clearenv", "--cap-add", "ALL"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/mnt"]
    inside = str(Path(_PACKAGE_ROOT, "penstock"))
    for path in (*paths, binary, f"{inside}/__init__.py", f"{inside}/sandbox"):
        command += ["--ro-bind", path, path]
    for path, target in links:
        command += ["--symlink", target, path]
    if os.geteuid() != 0:
        command.append("--unshare-user")
    return [*command, "--", binary, *_interpreter_flags(), _bootstrap(descriptor)]


def _interpreter_flags() -> list[str]:
    return ["-I", "-S", "-B", "-X", "utf8", "-c"]


def _bootstrap(descriptor: int) -> str:
    """Return the nursery's program; its last comment says in the process list whose nursery it is."""
    return _BOOTSTRAP.format(
        root=_PACKAGE_ROOT, descriptor=descriptor, number=next(_numbers), host=os.getpid()
    )


class Nursery:
    """The process that makes sandboxes. `SandboxPool` starts a new nursery if this one has died."""

    def __init__(self, mode: Mode, settings: SandboxSettings) -> None:
        self.mode, self._settings = mode, settings
        self._lock = threading.Lock()
        self._count = 0
        self._outside = namespaces.identities()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(START_TIMEOUT_S)
        self._scratch = ScratchFolder.new("sandbox")
        self._folder = str(self._scratch.path)
        os.chmod(self._folder, 0o555)  # the working folder where none can be mounted: read only
        self._plan = self._make_plan()
        with theirs:
            command = [sys.executable, *_interpreter_flags(), _bootstrap(theirs.fileno())]
            if mode.bubblewrap:
                wrapped = bubblewrap_command(theirs.fileno())
                if wrapped is None:
                    raise SandboxError("bubblewrap is not installed")
                command = wrapped
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._receive()

    def _make_plan(self) -> namespaces.Plan:
        paths, links = interpreter_paths()
        settings = self._settings
        return namespaces.Plan(
            user_namespace=self.mode.user_namespace,
            namespaces=self.mode.namespaces,
            readable=paths,
            links=links,
            mount_on="/mnt" if self.mode.bubblewrap else _mount_point(paths),
            scratch_bytes=settings.scratch_mb << 20,
            scratch_files=settings.scratch_files,
            scratch="/mnt" if self.mode.bubblewrap else self._folder,
        )

    def _receive(self) -> dict[str, Any]:
        try:
            return wire.receive(self._link)[0]
        except (wire.Closed, TimeoutError):
            raise SandboxError(f"the sandbox does not start: {self._last_words()}") from None

    def _last_words(self) -> str:
        self._process.kill()
        said = self._process.communicate()[1].decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "it ended or hung without a message"

    def spawn(self) -> Sandbox:
        """Start a sandbox and return it while it is still being set up."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._count += 1
            uid, gid = _ids_for(self._count)
            request = {"op": "spawn", "plan": asdict(self._plan), "outside": self._outside}
            try:
                message = request | {"uid": uid, "gid": gid}
                wire.send(self._link, message, [theirs.fileno()])
                reply = self._receive()
            except (wire.Closed, SandboxError, OSError):
                ours.close()
                raise SandboxError("the sandbox's nursery has ended") from None
        if "error" in reply:
            ours.close()
            raise SandboxError(f"no sandbox could be made: {reply['error']}")
        return Sandbox(self, int(reply["pid"]), ours)

    def end(self, pid: int) -> None:
        """Kill a sandbox and every process in it; return when they have ended."""
        with self._lock:
            try:
                wire.send(self._link, {"op": "end", "pid": pid})
                self._receive()
            except (wire.Closed, SandboxError, OSError):
                return  # the nursery has ended, and all its sandboxes with it

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Close the socket: the nursery ends, and every sandbox with it."""
        self._link.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._scratch.remove()


def _ids_for(count: int) -> tuple[int, int]:
    """Return a separate user and group per sandbox if we are root, else our own."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    mapped = int(Path("/proc/self/uid_map").read_text().split()[2])
    if mapped > 2_147_000_000:
        unused = 2_000_000_000 + os.getpid() % 100_000 * 1_000 + count % 1_000
    else:
        unused = max(1, mapped - 6_000) + count % 1_000
    return unused, unused


class Sandbox:
    """One sandbox, for one submission. Runs jobs one after the other, then ends."""

    def __init__(self, nursery: Nursery, pid: int, link: socket.socket) -> None:
        self._nursery, self.pid, self._link = nursery, pid, link
        self._facts: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the isolation of the sandbox, as seen from inside; wait until the sandbox is ready."""
        if self._facts is None:
            self._link.settimeout(START_TIMEOUT_S)
            try:
                message, _ = wire.receive(self._link)
            except (wire.Closed, TimeoutError):
                raise SandboxError("a sandbox did not get ready") from None
            if "error" in message:
                raise SandboxError(f"a sandbox could not be set up: {message['error']}")
            self._facts = message["ready"]
        return self._facts

    def run(
        self, job: dict[str, Any], limits: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> Outcome:
        """Run one job. Raises SandboxLost if the sandbox itself ended or hung."""
        self.start(job, limits, descriptors)
        return self.result(limits["wall_s"])

    def start(
        self, job: dict[str, Any], limits: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> None:
        """Start a job without waiting for its result."""
        facts = self.facts
        self._link.settimeout(GRACE_S)
        try:
            wire.send(self._link, job | {"limits": self._adapt(limits, facts)}, descriptors)
        except (wire.Closed, TimeoutError):
            raise SandboxLost from None

    def result(self, wall_s: float, grace_s: float = GRACE_S) -> Outcome:
        """Wait for the started job and return its outcome."""
        self._link.settimeout(wall_s + grace_s)
        try:
            fields = wire.receive(self._link)[0]
            stdout, stderr, report = fields.pop("blobs")
            return Outcome(**fields, stdout=stdout, stderr=stderr, report=report)
        except (wire.Closed, TimeoutError, OSError):
            raise SandboxLost from None

    def _adapt(self, limits: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        own_user = "user" in facts["namespaces"] or facts["uid"] != os.geteuid()
        return limits | {
            "seccomp": facts["arch"] is not None,
            "scratch": self._nursery.mode.namespaces,
            "own_pids": self._nursery.mode.namespaces,
            "tasks": limits["tasks"] if own_user else None,
            "processes": limits["processes"] and self._nursery.mode.namespaces,
        }

    def end(self) -> None:
        """Kill every process of the sandbox and wait until they have ended."""
        self._link.close()
        self._nursery.end(self.pid)


class Referee:
    """A process that judges what solutions left, in a sandbox of its own that runs no solution.

    It serves one submission after the other; whoever waits too long for it ends it.
    """

    def __init__(self, sandbox: Sandbox, limits: dict[str, Any]) -> None:
        self._sandbox = sandbox
        self.answers = 0
        self._link, theirs = socket.socketpair()
        self._link.settimeout(REFEREE_TIMEOUT_S)
        with theirs:
            sandbox.start({"job": "referee"}, limits, [theirs.fileno()])

    def ask(self, request: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """Return the answer. Raises SandboxLost if there is none in time."""
        try:
            wire.send(self._link, request, blobs=blobs)
            reply = wire.receive(self._link)[0]
        except (wire.Closed, OSError):
            raise SandboxLost from None
        self.answers += 1
        return reply

    def end(self) -> None:
        self._link.close()
        self._sandbox.end()
