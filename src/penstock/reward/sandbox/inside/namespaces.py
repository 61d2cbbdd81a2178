"""A file system, process tree, network and user of its own for one sandbox. Inside the sandbox.

`fork_into` makes the namespaces, `build_root` a root with nothing but the interpreter's library (read only),
four device files and a bounded scratch, `renew_scratch` replaces the scratch by a new one, and
`become_nobody` gives up uid, groups and capabilities for good.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reward.sandbox.inside import kernel

SCRATCH = "/tmp"
INSIDE_ID = 1000  # uid and gid as seen in a user namespace
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NAMES = ("user", "mnt", "pid", "net", "ipc", "uts")
_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_TMPFS_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_KEPT_FLAGS = (
    (os.ST_NOSUID, kernel.MS_NOSUID),
    (os.ST_NODEV, kernel.MS_NODEV),
    (os.ST_NOEXEC, kernel.MS_NOEXEC),
    (os.ST_NOATIME, kernel.MS_NOATIME),
    (os.ST_NODIRATIME, kernel.MS_NODIRATIME),
    (os.ST_RELATIME, kernel.MS_RELATIME),
)


@dataclass(slots=True, frozen=True)
class Plan:
    """The set-up of a sandbox; made on the host, sent as JSON."""

    user_namespace: bool
    namespaces: bool
    readable: tuple[str, ...]  # folders and files of the interpreter
    hidden: tuple[str, ...]  # folders among them that stay empty: installed packages
    links: tuple[tuple[str, str], ...]  # symbolic links among them: (path, target)
    mount_on: str  # an existing folder that hides nothing we need
    scratch_bytes: int
    scratch_files: int
    scratch: str  # the working folder where there are no namespaces

    @property
    def renewable(self) -> bool:
        """Whether every test gets a new scratch folder in the same sandbox."""
        return self.namespaces and self.user_namespace

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Plan:
        fields = dict(fields)
        fields["readable"] = tuple(fields["readable"])
        fields["hidden"] = tuple(fields["hidden"])
        fields["links"] = tuple((path, target) for path, target in fields["links"])
        return cls(**fields)


def identities() -> dict[str, str]:
    """The identity of each namespace of this process."""
    links = {}
    for name in NAMES:
        try:
            links[name] = os.readlink(f"/proc/self/ns/{name}")
        except OSError:
            links[name] = ""
    return links


def fork_into(plan: Plan) -> int:
    """Fork the first process of new namespaces; return its pid, or 0 in it."""
    return kernel.fork_into(_FLAGS | (kernel.CLONE_NEWUSER if plan.user_namespace else 0))


def write_maps(pid: int, uid: int, gid: int) -> None:
    """Map the only user inside `pid` to an outside user; called by the parent."""
    if os.geteuid() != 0:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"{INSIDE_ID} {uid} 1")
    _write(f"/proc/{pid}/gid_map", f"{INSIDE_ID} {gid} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(plan: Plan, uid: int, gid: int) -> None:
    """Replace the host's file system by one with only the plan's paths."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [(path, os.open(path, os.O_PATH)) for path in (*plan.readable, *DEVICES)]
    if plan.user_namespace:
        set_ids(INSIDE_ID, INSIDE_ID)  # before anything is made: files need a mapped owner
    flags = _TMPFS_FLAGS
    kernel.mount("tmpfs", plan.mount_on, "tmpfs", flags, "mode=0755,size=1m,nr_inodes=4096")
    for path, descriptor in sources:
        _bind_read_only(path, descriptor, plan.mount_on)
        os.close(descriptor)
    for path in plan.hidden:
        empty = "mode=0555,size=4k,nr_inodes=1"
        kernel.mount("tmpfs", plan.mount_on + path, "tmpfs", flags | kernel.MS_RDONLY, empty)
    for path, target in plan.links:
        os.makedirs(os.path.dirname(plan.mount_on + path), exist_ok=True)
        os.symlink(target, plan.mount_on + path)
    scratch = plan.mount_on + SCRATCH
    os.makedirs(scratch, exist_ok=True)
    _mount_scratch(plan, scratch)
    if not plan.user_namespace:
        os.chown(scratch, uid, gid)
    os.chdir(plan.mount_on)
    kernel.pivot_root(".", ".")
    kernel.umount(".")
    os.chdir("/")
    kernel.mount("none", "/", None, flags | kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)


def _mount_scratch(plan: Plan, path: str) -> None:
    size = f"mode=0700,size={plan.scratch_bytes},nr_inodes={plan.scratch_files}"
    kernel.mount("tmpfs", path, "tmpfs", _TMPFS_FLAGS | kernel.MS_NOEXEC, size)


def renew_scratch(plan: Plan) -> None:
    """Replace the scratch folder by a new file system, which knows nothing of the old one."""
    kernel.umount(SCRATCH)
    _mount_scratch(plan, SCRATCH)


def _bind_read_only(path: str, descriptor: int, root: str) -> None:
    source, target = f"/proc/self/fd/{descriptor}", root + path
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    present = os.statvfs(target).f_flag
    flags = sum(mount_flag for flag, mount_flag in _KEPT_FLAGS if present & flag)
    flags |= kernel.MS_NOSUID | kernel.MS_RDONLY  # a device can be written to, but not be marked
    if path not in DEVICES:
        flags |= kernel.MS_NODEV
    kernel.mount("none", target, None, flags | kernel.MS_REMOUNT | kernel.MS_BIND)


def set_ids(uid: int, gid: int) -> None:
    """Become this user; drop other groups if that is allowed."""
    with contextlib.suppress(PermissionError):
        os.setgroups([])  # not root outside: groups stay, and own nothing that is mounted
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def become_nobody(plan: Plan, uid: int, gid: int) -> None:
    """Give up every privilege for good; the last step of the set-up.

    A sandbox in a user namespace keeps the right to mount, for new scratch folders; the process of each
    test gives that up as well, before it runs any code.
    """
    if not plan.user_namespace and os.geteuid() == 0:
        set_ids(uid, gid)
    kernel.drop_capabilities(kernel.CAP_SYS_ADMIN if plan.renewable else 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.umask(0o077)


def readable_paths(plan: Plan) -> Sequence[str]:
    """The paths that Landlock allows to read, as seen from inside."""
    return (*plan.readable, *DEVICES)
