"""Files and the terminal: files that are replaced whole, scratch folders, and text that a person reads.

Files are written so that a crash leaves the old one or the new one. Scratch folders end with their process:
they are removed at its end, or, if it was killed, at the next start; every process that uses one locks it.
An escape sequence in a response could rewrite the screen, so commands print through `console` (rich) or
`say` (plain lines), which show control characters as U+FFFD. Knows paths and bytes, nothing of runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment

from penstock.errors import UserError

_PIECE = 32 << 20  # bytes of a large file that go to disk at a time
_START, _FINISH = 2, 7  # of sync_file_range: begin to write; wait before, write, wait after
MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how the table writes a space in a path
_NETWORK = """nfs nfs4 cifs smb smb3 smbfs 9p afs ncpfs coda davfs lustre gpfs beegfs beegfs_nodev ceph
    glusterfs orangefs pvfs2 panfs wekafs ocfs2 gfs2 sshfs s3fs gcsfuse goofys rclone juicefs blobfuse
    blobfuse2 mfs moosefs quobyte"""


@contextlib.contextmanager
def whole_folder(target: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield a draft beside `target` that takes its name at the end, synced; an error leaves nothing behind."""
    draft = target.with_name(f".{target.name}.draft-{os.getpid()}")
    try:
        draft.mkdir(mode, parents=True)
        yield draft
        for path in (*draft.rglob("*"), draft):
            sync(path)
        draft.rename(target)  # an empty folder of that name is replaced
        sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file by a text, or by pieces of one, so that a crash or a power failure leaves the old or the new file."""
    if str(path.parent) in ("/dev", "/dev/fd"):  # what /dev/stdout names is open, never replaced
        path.write_text("".join(text), encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # a new file: never written through a link
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o666), "w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def write_for(command: str, path: Path, text: str) -> None:
    """Write the file that a command was asked for; a UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise UserError(
            f"{command}: cannot write {path}: {error.strerror}, allowed: a file that can be written"
        ) from None


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects in a file of JSON lines, and the numbers of the lines that are damaged or cut off."""
    rows, damaged = [], []
    for number, (_, row) in enumerate(each_row(path), start=1):
        if row is None:
            damaged.append(number)
        else:
            rows.append(row)
    return rows, damaged


def each_row(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield where each line of a file of JSON lines begins, and its object; None for a damaged or torn line."""
    if path.exists() and not path.is_file():  # a pipe or a device has no end
        raise OSError(errno.EINVAL, "not a file", str(path))
    start = 0
    with path.open("rb") as file:  # as text, a file's lines would end at U+2028 too
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield start, row if isinstance(row, dict) else None
            start += len(line)


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
    """Whether files can be made in the folder: permissions and a read-only mount both count."""
    return os.access(folder, os.W_OK)


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return path if path.exists() else existing(path.parent)


def free_name(path: Path) -> Path:
    """The path, or with a number behind its name the first that nothing has."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def network_file_system(path: Path) -> str:
    """The type of the network file system that holds the path; empty for a local disk."""
    kind = _file_system(existing(path.absolute()).resolve())
    return kind if kind.removeprefix("fuse.") in _NETWORK.split() else ""


def _file_system(path: Path) -> str:
    """The type of the last mount among those nearest to the path; empty if none is listed."""
    kind, depth = "", -1
    lines = MOUNTS.read_text(encoding="utf-8", errors="replace") if MOUNTS.is_file() else ""
    for line in lines.splitlines():
        place, _, source = line.partition(" - ")
        mounted = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), place.split(" ")[4]))
        if path.is_relative_to(mounted) and len(mounted.parts) >= depth:
            kind, depth = source.split(" ")[0], len(mounted.parts)
    return kind


_NAME = re.compile(r"penstock-[a-z]+-[0-9a-f]{12}")


class ScratchFolder:
    """A folder that is locked while this object lives; other processes may lock it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:  # again if it is swept before it is locked
            path.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if path.exists():
                    return
                os.close(self._lock)

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
    """The folder whose files are kept in memory, or the temporary folder if there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def weight_folder() -> ScratchFolder:
    """Make a folder for the weight buffers of a run, in memory if the system has such a folder."""
    return ScratchFolder.new("weights", memory_folder())


def sweep_scratch() -> None:
    """Remove what killed processes left in the folders for scratch."""
    for root in {tempfile.gettempdir(), memory_folder()}:
        sweep(Path(root))


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


_HIDDEN, _KEPT = "\ufffd", "\n\t\u200c\u200d"  # the last two join letters and emoji


def visible(text: str) -> str:
    """The text with every character that cannot be seen, but line feeds and tabs, replaced."""
    if text.isprintable():
        return text
    hidden = {
        ord(character): _HIDDEN
        for character in set(text).difference(_KEPT)
        if not character.isprintable() and unicodedata.category(character) != "Zs"
    }
    return text.translate(hidden)


def console(**options: Any) -> Console:
    """A rich console that reads no markup in text and makes it visible; options as rich's."""
    visible_console = Console(**{"markup": False, **options})
    visible_console.push_render_hook(_MakeVisible())
    return visible_console


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 engine, 2 engines."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def pasted(path: Path | str) -> str:
    """The path as a word of a shell, for commands that a user pastes."""
    return shlex.quote(str(path))


def say(text: object, *, error: bool = False) -> None:
    """Print one plain line, to stderr if it is an error."""
    print(visible(str(text)), file=sys.stderr if error else sys.stdout, flush=True)


@contextlib.contextmanager
def progress_bar(name: str, terminal: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar that goes away, if the console is a terminal; yield what takes (done, of how many)."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(visible(name), markup=False), BarColumn(), MofNCompleteColumn())
    off = not terminal.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=terminal, disable=off, transient=True
    ) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Visible:
    """A renderable with visible text; a live display needs it, which draws behind the console's hook."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class _MakeVisible(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [item if isinstance(item, Control) else Visible(item) for item in renderables]
