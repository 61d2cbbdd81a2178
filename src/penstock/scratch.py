"""Temporary folders that end with their process: removed at its end, or, if it was killed, at the next start.

Every process that uses a folder locks it. Making a folder removes those of ours that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Self

_NAME = re.compile(r"penstock-[a-z]+-[0-9a-f]{12}")


class ScratchFolder:
    """A folder that is locked while this object lives; other processes may lock it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)

    @classmethod
    def new(cls, kind: str, root: str | Path | None = None) -> Self:
        """Make a folder named after its kind in `root` (default: the system's temporary folder)."""
        root = Path(root or tempfile.gettempdir())
        sweep(root)
        return cls(root / f"penstock-{kind}-{uuid.uuid4().hex[:12]}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()


def memory_folder() -> str:
    """Return the folder whose files are kept in memory, or the temporary folder if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def weight_folder() -> ScratchFolder:
    """Make a folder for the weight buffers of a run, in memory if the system has such a folder."""
    return ScratchFolder.new("weights", memory_folder())


def _locked(path: Path) -> int:
    """Create and lock a folder; return its descriptor. Repeat if it is swept before it is locked."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(folder, fcntl.LOCK_SH)
            if path.exists():
                return folder
            os.close(folder)


def sweep(root: Path) -> None:
    """Remove the scratch folders that no process has locked: a killed process cannot clean up."""
    for path in root.glob("penstock-*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # the folder belongs to another user, or was just removed
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(folder)
