"""Runs a command where the kernel offers less: `python -m stages.lesser_kernel LACKS COMMAND...`.

LACKS is a list of: namespaces, landlock, seccomp (refused by a system-call filter, as containers do), one-id
(a user namespace with one mapped id, root's), no-root (such a namespace, and its only user is not root).
"""

from __future__ import annotations

import errno
import os
import sys

from penstock.reward.sandbox.inside import kernel, seccomp

_UNSHARE, _CLONE = (272, 97), (56, 220)  # numbers on x86_64, aarch64
_NEW_NAMESPACES = 0x7E020000  # flags of clone
_REFUSED = {
    "namespaces": (_UNSHARE, errno.EPERM),
    "landlock": ((444, 444), errno.ENOSYS),  # landlock_create_ruleset
}
_PRCTL = (157, 167)


def refuse(lacks: set[str]) -> None:
    """Install a filter that refuses the calls of what is lacking."""
    column = 0 if kernel.ARCH == "x86_64" else 1
    program = seccomp._op(seccomp._LOAD, seccomp._NUMBER_AT)
    for name in sorted(lacks & _REFUSED.keys()):
        numbers, error = _REFUSED[name]
        program += seccomp._op(seccomp._JUMP_EQUAL, numbers[column], 0, 1) + seccomp._fail(error)
    if "namespaces" in lacks:
        block = seccomp._masked(0, _NEW_NAMESPACES, 0, errno.EPERM)
        program += seccomp._op(seccomp._JUMP_EQUAL, _CLONE[column], 0, len(block) // 8) + block
    if "seccomp" in lacks:
        block = seccomp._argument(0) + seccomp._op(seccomp._JUMP_EQUAL, kernel.PR_SET_SECCOMP, 0, 1)
        block += seccomp._fail(errno.EINVAL) + seccomp._op(seccomp._RETURN, seccomp._ALLOW)
        program += seccomp._op(seccomp._JUMP_EQUAL, _PRCTL[column], 0, len(block) // 8) + block
    kernel.set_seccomp_filter(program + seccomp._op(seccomp._RETURN, seccomp._ALLOW))


def leave_ids(inside: int) -> None:
    """Enter a user namespace in which this user is the only one, by the number `inside`."""
    outside = os.geteuid(), os.getegid()
    kernel.syscall(_UNSHARE[0 if kernel.ARCH == "x86_64" else 1], kernel.CLONE_NEWUSER)
    for path, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside[0]} 1"),
        ("gid_map", f"{inside} {outside[1]} 1"),
    ):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


def main() -> None:
    lacks = set(sys.argv[1].split(","))
    if lacks & {"one-id", "no-root"}:
        leave_ids(0 if "one-id" in lacks else 1000)
    if "no-root" in lacks:
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    refuse(lacks)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
