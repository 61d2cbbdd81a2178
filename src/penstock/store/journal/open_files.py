"""The files of an open journal: synced to the disk, and compared with what has their names now.

A cleaner, a restore or `mv` can take away the files under a live run. SQLite goes on with those that it has
open, and every record since then would be gone with the process.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import RunError


class OpenFiles:
    """The journal's file and its log.

    Closing any descriptor of a file drops all locks that the process has on it, those of SQLite too; so
    what this opens stays open until the connections are closed.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path, path.with_name(f"{path.name}-wal"))
        self._descriptors: dict[Path, int] = {}
        self._is_closed = False
        self._open()

    def _open(self) -> None:
        for path in self._paths:
            if not self._is_closed and path not in self._descriptors and path.exists():
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def sync(self) -> None:
        """Make what was written survive the death of the machine."""
        self._open()
        for path, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:  # the kernel may have dropped what it could not write
                raise RunError(
                    f"journal {path}: the disk did not take it ({error.strerror}), so what it holds is "
                    "not certain; check the disk before the run goes on"
                ) from error

    def taken_away(self) -> str:
        """What happened to the files (removed | replaced | moved); empty while they are where they were."""
        self._open()
        for path, descriptor in self._descriptors.items():
            ours = os.fstat(descriptor)
            try:
                there = os.stat(path)
            except OSError:
                return "moved" if ours.st_nlink else "removed"
            if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                return "moved" if ours.st_nlink else "replaced"
        return ""

    def place(self) -> Path | None:
        """Where the journal's file is now; None if the system does not say."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptors[self._paths[0]]}"))
        except OSError:
            return None
        return place if place.exists() else None

    def close(self) -> None:
        self._is_closed = True
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
