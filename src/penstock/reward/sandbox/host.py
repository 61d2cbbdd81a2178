"""The host's side of sandboxes: starts the factory, asks it for sandboxes, runs jobs in them.

Blocking, for worker threads; every wait has a limit, and so has the data that is read from a sandbox.
Whether a solution is right is decided in `verify.py`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SandboxError
from penstock.files import ScratchFolder
from penstock.reward.sandbox import inside
from penstock.reward.sandbox.inside import namespaces, wire
from penstock.reward.sandbox.settings import LEVELS, Level, SandboxSettings, job_limits

START_TIMEOUT_S = 60.0
REFEREE_TIMEOUT_S = 30.0  # its work is bounded: past it the machine, not the answer, is at fault
GRACE_S = 10.0  # wait this much longer than a job's own limit, then give the sandbox up
_INSIDE = str(Path(inside.__file__).resolve().parent)
# the packages around the inside of the sandbox are empty stand-ins: their own files are not for there
_BOOTSTRAP = """import sys, types
for name, path in ("penstock", ""), ("penstock.reward.sandbox", {folder!r}):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from penstock.reward.sandbox.inside.factory import main
main({descriptor})  # factory {number} of process {host}"""
_FLAGS = ("-I", "-S", "-B", "-X", "utf8", "-c")  # of the interpreter
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


class SandboxLost(Exception):
    """The sandbox ended or hung in the middle of a job."""


@functools.cache
def library() -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The standard library and the system's shared libraries: paths, those to hide in them, links (path, target)."""
    base = {"platbase": sys.base_exec_prefix}  # not a virtual environment's
    candidates = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars=base)}
    candidates.update(map(_narrowed, _SYSTEM_PATHS))
    if sys.base_prefix != "/usr":
        candidates.add(str(Path(sys.base_prefix, "lib")))
    links = tuple((path, os.readlink(path)) for path in _SYSTEM_PATHS if os.path.islink(path))
    paths: list[str] = []
    for path in sorted(filter(os.path.exists, candidates), key=len):
        linked = any(Path(path).is_relative_to(link) for link, _ in links)
        if not linked and not any(Path(path).is_relative_to(above) for above in paths):
            paths.append(path)
    hidden = [
        str(folder)
        for path in paths
        for pattern in ("{}-packages", "*/{}-packages")
        for kind in ("site", "dist")
        for folder in Path(path).glob(pattern.format(kind))
        if folder.is_dir() and not folder.is_symlink()
    ]
    return tuple(paths), tuple(hidden), links


def _narrowed(path: str) -> str:
    """The folder of this machine's shared libraries in `path`, where there is such a folder."""
    folder = os.path.join(path, sysconfig.get_config_var("MULTIARCH") or "")
    return folder if path in ("/lib", "/usr/lib") and os.path.isdir(folder) else path


def _mount_point(paths: Sequence[str]) -> str:
    for candidate in _MOUNT_POINTS:
        if os.path.isdir(candidate) and not any(Path(p).is_relative_to(candidate) for p in paths):
            return candidate
    raise SandboxError("no folder is free to mount a sandbox on")


def bubblewrap_command(descriptor: int) -> list[str]:
    """The command that runs the factory in bubblewrap; SandboxError if it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bubblewrap is not installed")
    paths, hidden, links = library()
    binary = os.path.realpath(sys.executable)
    command = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--clearenv", "--cap-add", "ALL"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/mnt"]
    loaders = glob.glob("/usr/lib/ld-linux*.so.*")
    for path in (*paths, *loaders, binary, _INSIDE):
        command += ["--ro-bind", path, path]
    for path in hidden:
        command += ["--tmpfs", path]
    for path, target in links:
        command += ["--symlink", target, path]
    if os.geteuid() != 0:
        command.append("--unshare-user")
    return [*command, "--", binary, *_FLAGS, _bootstrap(descriptor)]


def _bootstrap(descriptor: int) -> str:
    """The factory's program; its last comment says in the process list whose factory it is."""
    return _BOOTSTRAP.format(
        folder=os.path.dirname(_INSIDE),
        descriptor=descriptor,
        number=next(_numbers),
        host=os.getpid(),
    )


class SandboxFactory:
    """The process that makes sandboxes. `SandboxPool` starts a new factory if this one has died."""

    def __init__(self, mode: Mode, settings: SandboxSettings) -> None:
        self.mode, self._settings = mode, settings
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._counter = itertools.count(1)
        self._outside = namespaces.identities()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(START_TIMEOUT_S)
        self._scratch = ScratchFolder.new("sandbox")
        self._folder = str(self._scratch.path)
        os.chmod(self._folder, 0o555)  # the working folder where none can be mounted: read only
        readable, hidden, links = library()
        settings = self._settings
        self.plan = namespaces.Plan(
            user_namespace=self.mode.user_namespace,
            namespaces=self.mode.namespaces,
            readable=readable,
            hidden=hidden,
            links=links,
            mount_on="/mnt" if self.mode.bubblewrap else _mount_point(readable),
            scratch_bytes=settings.scratch_mb << 20,
            scratch_files=settings.scratch_files,
            scratch="/mnt" if self.mode.bubblewrap else self._folder,
        )
        with theirs:
            command = [sys.executable, *_FLAGS, _bootstrap(theirs.fileno())]
            if mode.bubblewrap:
                command = bubblewrap_command(theirs.fileno())
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # it has no terminal that a program could find
            )
        try:
            wire.receive(self._link)
        except (wire.Closed, TimeoutError):
            raise SandboxError(f"the sandbox does not start: {self._last_words()}") from None

    def _last_words(self) -> str:
        self._process.kill()
        stderr = self._process.communicate()[1].decode(errors="replace").strip()
        return stderr.splitlines()[-1] if stderr else "it ended or hung without a message"

    def spawn(self) -> Sandbox:
        """Start a sandbox and return it while it is still being set up."""
        count = next(self._counter)
        if os.geteuid() != 0 or one_id_is_mapped():
            uid, gid = os.geteuid(), os.getegid()
        else:
            highest = _highest_id()
            if highest >= 2_147_000_000:
                unused = 2_000_000_000 + os.getpid() % 100_000 * 1_000 + count % 1_000
            else:
                lowest = max(1, highest - 6_000)
                unused = lowest + count % min(1_000, highest - lowest + 1)
            uid, gid = unused, unused
        request = {"op": "spawn", "plan": asdict(self.plan), "outside": self._outside}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reply = self._ask(request | {"uid": uid, "gid": gid}, [theirs.fileno()])
            except SandboxError:
                ours.close()
                raise
        if "error" in reply:
            ours.settimeout(1.0)
            reason = reply["error"]
            with contextlib.suppress(wire.Closed, OSError):  # what the sandbox itself said
                reason = wire.receive(ours)[0].get("error") or reason
            ours.close()
            raise SandboxError(f"no sandbox could be made: {reason}")
        return Sandbox(self, int(reply["pid"]), ours)

    def end(self, pid: int) -> None:
        """Kill a sandbox and every process in it; they end at once, and `close` waits for the last."""
        # the factory has ended, and all its sandboxes with it
        with contextlib.suppress(SandboxError):
            self._ask({"op": "end", "pid": pid})

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """The factory's reply. If there is none, the process has ended when SandboxError is raised."""
        with self._lock:
            try:
                wire.send(self._link, request, descriptors)
                return wire.receive(self._link)[0]
            except TimeoutError:
                self._process.kill()
            except (wire.Closed, OSError):
                pass  # it ends by itself
            self._wait_for_end()
            raise SandboxError("the sandbox factory has ended")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Close the socket: the factory ends, and every sandbox with it.

        A thread that finds it dead closes it, and so may the thread that closes the pool: once is enough.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # Wake a thread that waits for a reply, and close the socket after it has left: it would go on
            # waiting, on whatever socket gets the same descriptor next.
            self._link.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._link.close()
            self._wait_for_end()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._scratch.remove()

    def _wait_for_end(self) -> None:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def one_id_is_mapped() -> bool:
    """Whether this user is root and there is no other user to become, as in some containers."""
    return os.geteuid() == 0 and _highest_id() == 0


def _highest_id() -> int:
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return max(int(first) + int(length) - 1 for first, _, length in ranges)


class Sandbox:
    """One sandbox, for one submission. Runs jobs one after the other, then ends."""

    def __init__(self, factory: SandboxFactory, pid: int, link: socket.socket) -> None:
        self._factory, self.pid, self._link = factory, pid, link
        self._facts: dict[str, Any] | None = None
        self._busy = False  # with a job whose result nobody has taken

    @property
    def facts(self) -> dict[str, Any]:
        """The isolation of the sandbox, as seen from inside; wait until the sandbox is ready."""
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

    @property
    def renews(self) -> bool:
        """Whether every test finds a new scratch folder, so that the sandbox may run several."""
        return self._factory.plan.renewable or not self._factory.plan.namespaces

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
        own_user = "user" in facts["namespaces"] or facts["uid"] != os.geteuid()
        limits = limits | {
            "seccomp": facts["arch"] is not None,
            "scratch": self._factory.mode.namespaces,
            "tasks": limits["tasks"] if own_user else None,
        }
        self._busy = True
        self._link.settimeout(GRACE_S)
        try:
            wire.send(self._link, job | {"limits": limits}, descriptors)
        except (wire.Closed, TimeoutError):
            raise SandboxLost from None

    def result(self, wall_s: float, grace_s: float = GRACE_S) -> Outcome:
        """Wait for the started job and return its outcome."""
        self._link.settimeout(wall_s + grace_s)
        try:
            fields = wire.receive(self._link)[0]
            stdout, stderr, report = fields.pop("blobs")
            self._busy = False
            return Outcome(**fields, stdout=stdout, stderr=stderr, report=report)
        except (wire.Closed, TimeoutError, OSError):
            raise SandboxLost from None

    def stop(self) -> None:
        """Let no process of a submission run on; the sandbox itself may end later."""
        if self._busy:
            self._link.close()  # its first process ends, and all others with it

    def end(self) -> None:
        """Kill every process of the sandbox."""
        self._link.close()
        self._factory.end(self.pid)


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
        """The answer. Raises SandboxLost if there is none in time."""
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


# -- which isolation works on this machine ------------------------------------------------------


_FULL_NAMESPACES = frozenset({"mnt", "pid", "net", "ipc"})


@dataclass(slots=True, frozen=True)
class Isolation:
    """A mode that works on this machine, and the layers that it gives."""

    mode: Mode
    level: Level
    layers: tuple[str, ...]


ALL_LAYERS = (
    "bubblewrap",
    "user namespace",
    "mount namespace",
    "process namespace",
    "network namespace",
    "ipc namespace",
    "seccomp",
    "landlock",
    "unprivileged user",
    "resource limits",
    "no new privileges",
)
_NAMES = {"user": "user", "mnt": "mount", "pid": "process", "net": "network", "ipc": "ipc"}


def _candidates(bubblewrap: bool) -> Iterator[Mode]:
    root = os.geteuid() == 0
    for wrapped in (True, False) if bubblewrap else (False,):
        yield Mode(bubblewrap=wrapped, namespaces=True, user_namespace=True)
        if root:
            yield Mode(bubblewrap=wrapped, namespaces=True, user_namespace=False)
    if bubblewrap and not root:
        yield Mode(bubblewrap=True, namespaces=False, user_namespace=False)
    yield Mode(bubblewrap=False, namespaces=False, user_namespace=False)


def _describe(mode: Mode, facts: dict[str, Any]) -> Isolation:
    layers = ["bubblewrap"] if mode.bubblewrap else []
    layers += [f"{word} namespace" for key, word in _NAMES.items() if key in facts["namespaces"]]
    layers += ["seccomp"] if facts["arch"] is not None else []
    layers += ["landlock"] if facts["landlock"] else []
    own_user = facts["uid"] != os.geteuid() or "user" in facts["namespaces"]
    layers += ["unprivileged user"] if facts["uid"] != 0 and own_user else []
    layers += ["resource limits", "no new privileges"]
    level: Level = "weak"
    if "seccomp" in layers and facts["uid"] != 0:
        if facts["namespaces"] and set(facts["namespaces"]) >= _FULL_NAMESPACES and own_user:
            level = "full"
        elif facts["landlock"]:
            level = "filtered"
    return Isolation(mode, level, tuple(layers))


def try_mode(mode: Mode, settings: SandboxSettings) -> Isolation:
    """The isolation that a mode gives here; raise SandboxError with what keeps it from working."""
    factory = SandboxFactory(mode, settings)
    try:
        sandbox = factory.spawn()
        isolation = _describe(mode, sandbox.facts)
        limits = job_limits(settings, settings.timeout_s)
        outcome = sandbox.run({"job": "program", "source": ""}, limits)
        sandbox.end()
    except SandboxLost:
        raise SandboxError("the process of a sandbox ended") from None
    finally:
        factory.close()
    if outcome.status != 0:
        output = (outcome.report or outcome.stderr).decode(errors="replace")
        raise SandboxError(f"an empty program failed: {output[:200].strip()}")
    return isolation


@functools.lru_cache(maxsize=4)
def _best(bubblewrap: bool) -> tuple[Isolation | None, str]:
    """The strongest isolation that works here, and why there is no stronger one."""
    best: Isolation | None = None
    reasons = {}
    for mode in _candidates(bubblewrap):
        try:
            isolation = try_mode(mode, SandboxSettings())
        except SandboxError as error:
            reasons[mode] = str(error)
            continue
        if best is None or LEVELS.index(isolation.level) > LEVELS.index(best.level):
            best = isolation
        if best.level == "full":
            return best, ""
    why = ["only one user id is mapped, root's"] if one_id_is_mapped() else []
    for mode, reason in reasons.items():
        if (mode.namespaces and not mode.bubblewrap) or best is None:
            why.append(next((text for part, text in _EXPLAINED if part in reason), reason))
    if best is not None and "landlock" not in best.layers:
        why.append("the kernel offers no Landlock")
    return best, "; ".join(dict.fromkeys(why))


_EXPLAINED = (
    (
        "clone",
        "new namespaces are refused (a container's seccomp profile, or the sysctls "
        "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
        "kernel.apparmor_restrict_unprivileged_userns)",
    ),
    ("prctl 22", "seccomp filters are refused"),
    ("mount", "mounts in a new namespace are refused"),
)


def find_isolation(settings: SandboxSettings) -> Isolation:
    """The strongest isolation that works here; refuse one below the settings' minimum."""
    isolation, reason = strongest(settings)
    if LEVELS.index(isolation.level) < LEVELS.index(settings.minimum):
        raise SandboxError(
            f"sandbox: isolation here is {isolation.level!r} ({', '.join(isolation.layers)}), allowed: "
            f"{settings.minimum!r} or stronger; missing: {reason}; "
            f"the option minimum = {isolation.level!r} accepts what there is"
        )
    return isolation


def strongest(settings: SandboxSettings) -> tuple[Isolation, str]:
    """The strongest isolation here and why it is no stronger; raise SandboxError if none works."""
    best, reason = _best(settings.bubblewrap == "auto" and shutil.which("bwrap") is not None)
    if best is None:
        raise SandboxError(
            f"sandbox: code is refused, no level of isolation can be had here: {reason}"
        )
    return best, reason
