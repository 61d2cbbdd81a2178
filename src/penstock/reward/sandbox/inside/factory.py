"""A small trusted process that makes sandboxes by forking, and ends them. Inside the sandbox.

Consumes `spawn` and `end` requests of the host, produces the pid of each new sandbox. Woken only by
the host's socket; ends when the host hangs up. It stays a bare interpreter with one thread, so that
a fork costs milliseconds and copies no secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import signal
import socket
from typing import Any, NoReturn

from penstock.reward.sandbox.inside import kernel, landlock, namespaces, wire, zygote

_TIOCNOTTY = 0x5422


def main(descriptor: int) -> None:
    """Serve the host on this descriptor."""
    host = socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):  # no sandbox has the terminal, if the session has one
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, _TIOCNOTTY)
        finally:
            os.close(terminal)
    os.environ.clear()
    zygote.warm()
    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    try:
        wire.send(host, {"ready": {"uid": os.geteuid()}})
        while True:
            request, descriptors = wire.receive(host)
            if request["op"] == "spawn":
                reply = _spawn(host, request, descriptors[0])
                alive.update([reply["pid"]] if "pid" in reply else [])
            else:
                reply = {"killed": _kill(int(request["pid"]))}
            wire.send(host, reply)
            # no spawn waits for the kernel to take down a sandbox that was large
            alive = {pid for pid in alive if not _has_ended(pid, os.WNOHANG)}
    except wire.Closed:
        for pid in alive:
            _kill(pid)
            _has_ended(pid)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _has_ended(pid: int, how: int = 0) -> bool:
    """Reap a sandbox: once its first process is reaped, every other process in it has ended."""
    try:
        return os.waitpid(pid, how)[0] == pid
    except ChildProcessError:
        return True


def _spawn(host: socket.socket, request: dict[str, Any], descriptor: int) -> dict[str, Any]:
    plan, outside = namespaces.Plan.from_json(request["plan"]), request["outside"]
    uid, gid = int(request["uid"]), int(request["gid"])
    if not plan.namespaces:
        _shared_ruleset(plan)
    down_read, down_write = os.pipe()
    pid = -1
    try:
        pid = namespaces.fork_into(plan) if plan.namespaces else os.fork()
        if pid == 0:
            host.close()
            os.close(down_write)
            _become_sandbox(plan, uid, gid, descriptor, down_read, outside)
        if plan.namespaces and plan.user_namespace:
            namespaces.write_maps(pid, uid, gid)
        os.write(down_write, b"m")
        return {"pid": pid}
    except OSError as error:
        if pid > 0:
            _kill(pid)
            os.waitpid(pid, 0)
        return {"error": str(error)}
    finally:
        for unused in (descriptor, down_read, down_write):
            os.close(unused)


def _become_sandbox(
    plan: namespaces.Plan, uid: int, gid: int, descriptor: int, down: int, outside: dict[str, str]
) -> NoReturn:
    link = socket.socket(fileno=descriptor)
    try:
        os.setpgid(0, 0)  # signals to its group do not reach the factory
        if os.read(down, 1) != b"m":  # the factory has ended
            os._exit(1)
        os.close(down)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        inside = namespaces.identities()
        scratch = plan.scratch
        if plan.namespaces:
            namespaces.build_root(plan, uid, gid)
            scratch = namespaces.SCRATCH
            ruleset = landlock.prepare(namespaces.readable_paths(plan))
            landlock.allow_writing(ruleset, "/dev/null")
            landlock.allow_writing(ruleset, scratch)
        else:
            ruleset = _shared_ruleset(plan)
        namespaces.become_nobody(plan, uid, gid)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
        facts = {
            "namespaces": [name for name in outside if inside[name] != outside[name]],
            "landlock": ruleset is not None,
            "uid": uid if plan.user_namespace else os.geteuid(),
            "arch": kernel.ARCH,
        }
        zygote.Zygote(link, plan, scratch, ruleset).serve(facts)
    except BaseException as error:  # reported to the host, which then refuses this sandbox
        with contextlib.suppress(wire.Closed):
            wire.send(link, {"error": f"{type(error).__name__}: {error}"})
    os._exit(1)


@functools.cache
def _shared_ruleset(plan: namespaces.Plan) -> int | None:
    """The rules of sandboxes that see the host's paths; made once, inherited by each of them."""
    return landlock.prepare((*namespaces.readable_paths(plan), plan.scratch), plan.hidden)
