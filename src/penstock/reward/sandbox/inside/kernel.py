"""Linux calls that Python does not wrap, by ctypes. Inside the sandbox: standard library only.

Each function is one system call and raises OSError if it fails. Policy lives in the callers. x86_64 and aarch64 are known; on another machine `ARCH` is None and seccomp is off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_THREAD = 0x00010000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 32, 1024, 2048, 4096, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME = 1, 4, 15, 16
PR_SET_SECCOMP, PR_CAPBSET_DROP = 22, 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER = 2
CAP_SYS_ADMIN = 1 << 21

ARCH = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(platform.machine())
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CLONE = {"x86_64": 56, "aarch64": 220}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_python = ctypes.PyDLL(None, use_errno=True)  # calls that keep the interpreter's lock
_python.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a raw system call with integers and ctypes objects as arguments; return its result."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), f"system call {number}")


def fork_into(flags: int) -> int:
    """Fork; the child is the first process in new namespaces. Return its pid, or 0 in the child.

    For a process with one thread: Python's own handlers of a fork are left out, which cost as much as the fork
    itself. The child's own forks run them.
    """
    assert ARCH is not None
    words = [ctypes.c_ulong(word) for word in (flags | signal.SIGCHLD, 0, 0, 0, 0)]
    return _check(_python.syscall(ctypes.c_long(_CLONE[ARCH]), *words), "clone")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount {target}")


def umount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    assert ARCH is not None
    syscall(
        _PIVOT_ROOT[ARCH],
        ctypes.c_char_p(new_root.encode()),
        ctypes.c_char_p(put_old.encode()),
    )


def prctl(option: int, *arguments: int) -> int:
    words = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(ctypes.c_int(option), *words), f"prctl {option}")


def set_seccomp_filter(program: bytes) -> None:
    """Install a BPF program (8 bytes per instruction) for this thread and all it starts."""
    header = struct.pack("HxxxxxxP", len(program) // 8, _address(program))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _address(header))


def _address(data: bytes) -> int:
    """Where the bytes lie, for a call that only reads them and while the caller holds them.

    A string buffer of ctypes would make a new class for each length.
    """
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def drop_capabilities(keep: int = 0) -> None:
    """Give up every capability for good, in every set; `keep` is a mask of those to hold on to."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            continue  # past the last one the kernel knows, or never held
    with contextlib.suppress(OSError):  # older kernels have no ambient set
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    hold_capabilities(keep)


def hold_capabilities(mask: int) -> None:
    """Hold these capabilities (of the first 32) and no others."""
    if ARCH is not None:
        header = ctypes.c_char_p(struct.pack("Ii", 0x20080522, 0))
        sets = ctypes.c_char_p(struct.pack("6I", mask, mask, 0, 0, 0, 0))
        syscall(_CAPSET[ARCH], header, sets)
