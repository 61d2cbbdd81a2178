"""Landlock: the process may open only the paths named here, whatever its uid. Inside the sandbox.

Works without any privilege and without namespaces (Linux 5.13 and later). Where the kernel knows how,
it also forbids TCP and signals or abstract sockets that leave the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Iterable

from penstock.reward.sandbox.inside import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ, _READ_DIR = 0b1100, 0b1000  # READ_FILE | READ_DIR
_FILE_ONLY = 0b0110 | 1 << 14 | 1 << 15  # WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights, by ABI


def version() -> int:
    """The kernel's Landlock ABI; 0 if it has none."""
    try:
        return kernel.syscall(_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def prepare(readable: Iterable[str], hidden: Collection[str] = ()) -> int | None:
    """A rule set that allows to read these paths, without the files of hidden folders in them.

    Call it while the paths can still be reached. Return None if the kernel has no Landlock.
    """
    abi = version()
    if not abi:
        return None
    every = _every_right(abi)
    network = 0b11 if abi >= 4 else 0
    scoped = 0b11 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = ctypes.c_char_p(struct.pack("QQQ", every, network, scoped))
    ruleset = kernel.syscall(_CREATE_RULESET, attributes, size, 0)
    for path in readable:
        _allow_around(ruleset, path, hidden)
    return ruleset


def allow_writing(ruleset: int | None, path: str) -> None:
    """Add a file or folder to write in to the rules."""
    if ruleset is not None:
        _allow(ruleset, path, _every_right(version()) & ~1)  # all but EXECUTE


def _every_right(abi: int) -> int:
    return (1 << _RIGHTS_BY_VERSION.get(min(abi, 5), 16)) - 1


def _allow_around(ruleset: int, path: str, hidden: Collection[str]) -> None:
    """Allow to read a path; where something below it is hidden, allow everything beside that."""
    if path in hidden:
        return
    if not any(folder.startswith(f"{path}/") for folder in hidden):
        _allow(ruleset, path, _READ)
        return
    _allow(ruleset, path, _READ_DIR)
    for entry in os.scandir(path):
        _allow_around(ruleset, entry.path, hidden)


def restrict(ruleset: int | None) -> None:
    """Apply the rules for good, to this process and its children."""
    if ruleset is not None:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, descriptor))
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
