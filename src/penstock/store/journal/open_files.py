"""The files of an open journal: synced to the disk, and compared with what has their names now.

A cleaner, a restore or `mv` can take away the files under a live run. SQLite goes on with those that it has
open, and every record since then would be gone with the process.
"""

from __future__ import annotations

import os
import weakref
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
        weakref.finalize(self, _close_all, self._descriptors)  # of a journal that nobody closed
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

    def way_on(self, what: str, saved: Path) -> str:
        """What happened, in a line that names the way on; `saved`: the file for the records."""
        path, run = self._paths[0], self._paths[0].parent
        if what == "moved":
            now = self._place() or "the place where it is now"
            return (
                f"journal {path}: its run folder was moved from {run} to {now} while the run wrote it; "
                f"nothing is lost; continue with: penstock resume {now}"
            )
        return (
            f"journal {path}: it was {what} while the run wrote it; all records are saved in {saved}; put "
            f"them back with: mkdir -p {run} && rm -f {path}* && mv {saved} {path}; then continue with: "
            f"penstock resume {run}"
        )

    def _place(self) -> Path | None:
        """The folder that holds the journal's file now; None if the system does not say."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptors[self._paths[0]]}"))
        except OSError:
            return None
        return place.parent if place.exists() else None

    def close(self) -> None:
        self._is_closed = True
        _close_all(self._descriptors)


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
