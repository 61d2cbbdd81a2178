"""A disk that loses power: replays a record of `write_recorder.c` and makes what may be left at any point.

What was synced is there. Of the rest any part may be: of a file any subset of its writes, the last of
them torn at a sector; of a folder any first part of its changes. A synced file is lost all the same if
the folder that names it was not synced: that is all that POSIX promises.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

_HEADER = struct.Struct("IIIIQQQ")
SECTOR = 512


class Kind(IntEnum):
    """The kinds of record, as in write_recorder.c."""

    OPEN = 1  # created, or truncated if `size` is 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7


@dataclass(slots=True, frozen=True)
class Change:
    """One call that changed a file or a folder, or synced it."""

    kind: Kind
    path: str
    path2: str
    inode: int
    offset: int
    size: int
    data: bytes


def read_record(log: Path) -> list[Change]:
    raw, at, found = log.read_bytes(), 0, []
    while at < len(raw):
        kind, length, length2, _, inode, offset, size = _HEADER.unpack_from(raw, at)
        at += _HEADER.size
        path, path2 = raw[at : at + length], raw[at + length : at + length + length2]
        at += length + length2
        data = raw[at : at + size] if kind == Kind.WRITE else b""
        at += len(data)
        found.append(Change(Kind(kind), path.decode(), path2.decode(), inode, offset, size, data))
    return found


@dataclass(slots=True, eq=False)
class File:
    """The bytes that are on disk for certain, and the writes after the last sync: (offset, data).

    A truncation is (size, None).
    """

    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        self.synced, self.pending = _applied(self.synced, self.pending), []

    def left(self, choice: random.Random, share: float) -> bytes:
        """Return what may be on disk: each unsynced write with that probability, some of them torn."""
        if not self.pending or not share:
            return self.synced
        kept = [write for write in self.pending if choice.random() < share]
        if kept and share < 1 and choice.random() < 0.5:
            offset, data = kept[-1]
            if data is not None and len(data) > SECTOR:
                kept[-1] = (offset, data[: SECTOR * choice.randrange(1, -(-len(data) // SECTOR))])
        return _applied(self.synced, kept)


def _applied(content: bytes, writes: list[tuple[int, bytes | None]]) -> bytes:
    result = bytearray(content)
    for offset, data in writes:
        if data is None:
            del result[offset:]
        result.extend(bytes(max(0, offset - len(result))))
        if data is not None:
            result[offset : offset + len(data)] = data
    return bytes(result)


@dataclass(slots=True, eq=False)
class Folder:
    """Its names now, those that are on disk for certain, and the changes since: (name, what or None)."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[list[tuple[str, File | Folder | None]]] = field(default_factory=list)

    def change(self, *names: tuple[str, File | Folder | None]) -> None:
        """Change names, all at once: a rename is never half done."""
        self.now = _renamed(self.now, [list(names)])
        self.pending.append(list(names))

    def sync(self) -> None:
        self.synced, self.pending = dict(self.now), []

    def left(self, choice: random.Random, share: float) -> dict[str, File | Folder]:
        count = len(self.pending) if share == 1 else choice.randint(0, len(self.pending))
        return _renamed(self.synced, self.pending[: count if share else 0])


def _renamed(
    names: dict[str, File | Folder], changes: list[list[tuple[str, File | Folder | None]]]
) -> dict[str, File | Folder]:
    result = dict(names)
    for change in changes:
        for name, what in change:
            if what is None:
                result.pop(name, None)
            else:
                result[name] = what
    return result


class Disk:
    """Consumes changes below `root`; produces the trees that a power failure may leave."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.top = Folder()
        self._files: dict[int, File] = {}  # by inode: a file may have lost its name

    def apply(self, change: Change) -> None:
        match change.kind:
            case Kind.OPEN:
                self._open(change)
            case Kind.WRITE:
                self._files[change.inode].pending.append((change.offset, change.data))
            case Kind.TRUNCATE:
                self._files[change.inode].pending.append((change.size, None))
            case Kind.SYNC:
                self._sync(change)
            case Kind.MKDIR:
                folder, name = self._place(change.path)
                folder.change((name, Folder()))
            case Kind.UNLINK:
                folder, name = self._place(change.path)
                folder.change((name, None))
            case Kind.RENAME:
                self._rename(change)

    def _open(self, change: Change) -> None:
        folder, name = self._place(change.path)
        if name not in folder.now:  # else it was there already
            self._files[change.inode] = made = File()
            folder.change((name, made))
        elif change.size:
            self._files[change.inode].pending.append((0, None))

    def _sync(self, change: Change) -> None:
        if change.path == self._root:
            self.top.sync()
            return
        folder, name = self._place(change.path)
        self._infer_rename(folder, name, change.inode)
        what = folder.now.get(name)
        (what if isinstance(what, Folder) else self._files[change.inode]).sync()

    def _infer_rename(self, folder: Folder, name: str, inode: int) -> None:
        """Note a rename that was not recorded, because it did not go through the C library."""
        file = self._files.get(inode)
        old = next((n for n, what in folder.now.items() if what is file), name)
        if file is not None and old != name:
            folder.change((old, None), (name, file))

    def _rename(self, change: Change) -> None:
        (source, old), (target, new) = self._place(change.path), self._place(change.path2)
        what = source.now[old]
        if source is target:
            source.change((old, None), (new, what))
        else:
            target.change((new, what))
            source.change((old, None))

    def _place(self, path: str) -> tuple[Folder, str]:
        *folders, name = path.removeprefix(self._root + "/").split("/")
        at = self.top
        for folder in folders:
            below = at.now[folder]
            assert isinstance(below, Folder), path
            at = below
        return at, name

    def left(self, choice: random.Random, share: float) -> Iterator[tuple[str, bytes | None]]:
        """Yield the paths and contents that are left; None for a folder. share 1: power never failed."""
        yield from self._left(self.top, "", choice, share)

    def _left(
        self, folder: Folder, path: str, choice: random.Random, share: float
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, what in folder.left(choice, share).items():
            inner = f"{path}/{name}".removeprefix("/")
            if isinstance(what, File):
                yield inner, what.left(choice, share)
            else:
                yield inner, None
                yield from self._left(what, inner, choice, share)
