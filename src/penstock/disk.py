"""The disk under a folder: files that are replaced whole, and what kind of file system it is.

Knows paths and bytes, nothing of runs.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_PIECE = 32 << 20  # bytes of a large file that go to disk at a time
_START, _FINISH = 2, 7  # of sync_file_range: begin to write; wait before, write, wait after
MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the table writes a space in a path
_NETWORK = """nfs nfs4 cifs smb smb3 smbfs 9p afs ncpfs coda davfs lustre gpfs beegfs beegfs_nodev ceph
    glusterfs orangefs pvfs2 panfs wekafs ocfs2 gfs2 sshfs s3fs gcsfuse goofys rclone juicefs blobfuse
    blobfuse2 mfs moosefs quobyte"""


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a crash or a power failure leaves the old one or the new one, whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # a new file: never written through a link
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_file():
            _write_back(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_back(descriptor: int) -> None:
    """Write a large file's content to disk piece by piece, where the system can.

    An fsync of gigabytes makes the small fsyncs of others wait for all of it: those of the journal, and with them the run.
    """
    size = os.fstat(descriptor).st_size
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if size <= _PIECE or sync_file_range is None:  # macOS has no such call
        return

    def write(start: int, how: int) -> bool:
        offset, count = ctypes.c_int64(start), ctypes.c_int64(_PIECE)
        return bool(sync_file_range(descriptor, offset, count, how) == 0)

    for start in range(0, size, _PIECE):  # the disk has the next piece when it is done with one
        if not (write(start + _PIECE, _START) and write(start, _FINISH)):
            return  # the fsync reports what is wrong


def can_write(folder: Path) -> bool:
    """Return whether files can be made in the folder: permissions and a read-only mount both count."""
    return os.access(folder, os.W_OK)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return path if path.exists() else existing(path.parent)


def network_file_system(path: Path) -> str:
    """Return the type of the network file system that holds the path; empty for a local disk."""
    kind = _file_system(existing(path.absolute()).resolve())
    return kind if kind.removeprefix("fuse.") in _NETWORK.split() else ""


def _file_system(path: Path) -> str:
    """Return the type of the last mount among those nearest to the path; empty if none is listed."""
    found, depth = "", -1
    lines = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.is_file() else ""
    for line in lines.splitlines():
        place, _, source = line.partition(" - ")
        mounted = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), place.split(" ")[4]))
        if path.is_relative_to(mounted) and len(mounted.parts) >= depth:
            found, depth = source.split(" ")[0], len(mounted.parts)
    return found
