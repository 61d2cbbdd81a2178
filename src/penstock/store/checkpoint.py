"""Checkpoints of the trainer: complete or absent, written during training.

    checkpoints/step-N/ model/ (HF safetensors)  ema/ (its average, if there is one)  trainer state  manifest.json (written last)

The trainer copies its state to memory, which is quick. The copy is written in the background into a
hidden folder, and the folder is renamed into place after its manifest is on disk. At most one write
is under way. Groups that were produced and not yet trained are in the journal, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.config import CheckpointConfig
from penstock.config.plugins import model_folder
from penstock.errors import RunError, WorkerDied
from penstock.files import existing, free_name, sync
from penstock.waits import loop_time

MANIFEST = "manifest.json"
INTERVAL_S = 600.0  # between checkpoints, unless checkpoint.every_steps says otherwise
MAX_FAILURES = 3  # failures in a row after which the run stops
# Only folders with exactly these names are ours; a user's step-8-best is never touched.
_CHECKPOINT = re.compile(r"step-(0|[1-9]\d*)")
_DRAFT = re.compile(r"\.draft-(old|\d+)-\d+")


class SnapshotSource(Protocol):
    """The methods of a trainer that a checkpoint needs."""

    async def identity(self) -> tuple[int, str]: ...
    async def snapshot(self, folder: str) -> tuple[int, str]: ...
    async def write_snapshot(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """One valid checkpoint on disk."""

    path: Path
    step: int
    digest: str  # digest of the weights, as the trainer computed it


class CheckpointStore:
    """Consumes snapshots of a trainer, produces checkpoints, and keeps the newest `keep`."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig | None = None,
        *,
        report: Callable[[str], None] = lambda text: None,
        before_rename: Callable[[], None] = lambda: None,
        after_prune: Callable[[int], None] = lambda oldest_step: None,
        also_kept: Callable[[list[int]], Collection[int]] = lambda steps: (),
    ) -> None:
        self._folder = folder
        self._settings = settings or CheckpointConfig()
        self._report = report
        self._before_rename = before_rename  # makes the journal durable up to the checkpoint's step
        self._after_prune = after_prune  # told the step of the oldest checkpoint that is kept
        self._also_kept = also_kept  # of the checkpoints' steps, those that are kept however old
        self._writing: asyncio.Task[Checkpoint | None] | None = None
        self._last: Checkpoint | None = None
        self._last_error, self._worker_died = "", False
        self._failures = 0
        self._drafts = 0
        self._draft: Path | None = None  # of the checkpoint that is being made
        self._clock = loop_time
        self._begun_at = self._clock()

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint that was written or found."""
        return None if self._last is None else self._last.step

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due: every so many steps, or else every ten minutes."""
        if every_steps := self._settings.every_steps:
            return step % every_steps == 0
        return self._clock() - self._begun_at >= INTERVAL_S

    async def begin(self, trainer: SnapshotSource) -> None:
        """Copy the trainer's state, and start writing the copy. Waits for: the previous write."""
        await self.settle()
        if self._failures >= MAX_FAILURES:
            raise RunError(
                f"{self._failures} checkpoints in a row failed; the last: {self._last_error}"
            )
        self._begun_at = self._clock()
        try:
            draft = await asyncio.to_thread(self._make_draft)
            step, digest = await trainer.snapshot(str(draft))
        except (OSError, RunError) as error:
            self._note_failure(error)
            return
        work = self._write(trainer, draft, step, digest)
        self._writing = asyncio.create_task(work, name=f"checkpoint of step {step}")

    async def settle(self) -> None:
        """Wait for the write under way; raise a fault that no disk and no trainer explains.

        Cancelling the caller does not cancel the write.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
            written, self._writing = self._writing, None
            if not written.cancelled():
                written.result()

    def abandon(self) -> None:
        """Give up the write under way; its draft is removed at the next start."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    async def save(self, trainer: SnapshotSource) -> Checkpoint:
        """Write a checkpoint of the trainer's present state; return it once it is on disk."""
        await self.settle()
        step, digest = await trainer.identity()
        if self._last is None or (self._last.step, self._last.digest) != (step, digest):
            self._failures = 0
            for _ in range(MAX_FAILURES):
                await self.begin(trainer)
                await self.settle()
                if not self._failures or not self._worker_died:
                    break  # else the copied state was lost with its worker
            if self._failures or self._last is None:
                raise RunError(self._last_error)
        return self._last

    def newest(self, damaged: list[str] | None = None) -> Checkpoint | None:
        """The newest checkpoint whose files all match its manifest, or None.

        damaged: gets a message for each newer one.
        """
        for path in self._paths():
            try:
                self._last = read_checkpoint(path)
                return self._last
            except RunError as error:
                if damaged is not None:
                    damaged.append(str(error))
        return None

    def newest_model(self) -> Path | None:
        """The model folder of the newest complete checkpoint; its files are not read."""
        models = (model_folder(path) for path in self._paths() if (path / MANIFEST).is_file())
        return next(models, None)

    def oldest(self, first_step: int) -> Checkpoint | None:
        """The oldest valid checkpoint of `first_step` or later, or None."""
        for path in reversed(self.after(first_step - 1)):
            with contextlib.suppress(RunError):
                return read_checkpoint(path)
        return None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, the newest first."""
        return [_step_of(path) for path in self._paths() if (path / MANIFEST).is_file()]

    def after(self, step: int) -> list[Path]:
        """The checkpoints of later steps."""
        return [path for path in self._paths() if _step_of(path) > step]

    def set_aside(self, path: Path) -> Path:
        """Rename a checkpoint to `lost-*`; return its new path."""
        return path.rename(free_name(self._folder / f"lost-{path.name}"))

    def _paths(self) -> list[Path]:
        """The checkpoints by name, the newest first, whole or not."""
        ours = (path for path in self._folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
        return sorted(ours, key=_step_of, reverse=True)

    async def _write(
        self, trainer: SnapshotSource, draft: Path, step: int, digest: str
    ) -> Checkpoint | None:
        try:
            await trainer.write_snapshot()
            self._last = await asyncio.to_thread(self._seal, draft, step, digest)
        except (OSError, RunError) as error:
            await asyncio.to_thread(shutil.rmtree, draft, True)
            self._note_failure(error)
            return None
        self._failures = 0
        return self._last

    def _make_draft(self) -> Path:
        if not self._folder.exists():
            self._folder.mkdir()  # a run folder that is gone is not made again
            sync(self._folder.parent)
        self._drafts += 1
        draft = self._folder / f".draft-{os.getpid()}-{self._drafts}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        self._draft = draft
        return draft

    def _seal(self, draft: Path, step: int, digest: str) -> Checkpoint:
        _write_manifest(draft, step, digest)
        self._before_rename()
        final = self._folder / f"step-{step}"
        if final.exists():  # damaged, or of a step that the journal has lost
            self._withdraw(final)
        draft.rename(final)
        sync(self._folder)
        self._prune()
        return Checkpoint(final, step, digest)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        valid = f"step {self._last.step} stays valid" if self._last else "the journal has all steps"
        words = " ".join(str(error).split())
        free = shutil.disk_usage(existing(self._folder)).free / 2**20
        self._last_error = f"checkpoint not written: {words} ({free:,.0f} MiB free there); {valid}"
        self._worker_died = isinstance(error, WorkerDied)
        if not self._worker_died:  # the worker's supervisor reports that one
            self._report(self._last_error)

    def _prune(self) -> None:
        paths = self._paths()
        kept, others = paths[: self._settings.keep], paths[self._settings.keep :]
        also_kept = self._also_kept([_step_of(path) for path in paths]) if others else ()
        for path in others:
            if _step_of(path) not in also_kept:
                with contextlib.suppress(OSError):  # one checkpoint too many does no harm
                    self._withdraw(path)
        self.sweep()
        self._after_prune(_step_of(kept[-1]))

    def _withdraw(self, path: Path) -> None:
        """Take a checkpoint's name away at once: whoever reads it sees it whole or not at all."""
        aside = self._folder / f".draft-old-{_step_of(path)}"
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def sweep(self) -> None:
        """Remove drafts of dead processes; only the process that writes the run may call this."""
        for path in self._folder.glob(".draft-*"):
            if _DRAFT.fullmatch(path.name) and path != self._draft:  # its trainer may be restored
                shutil.rmtree(path, ignore_errors=True)


def read_checkpoints(folder: Path, *, whole: bool) -> Iterator[Checkpoint | str]:
    """The complete checkpoints in a folder, or what is wrong with them; `whole`: all files are read.

    Those of a live run that are removed meanwhile are left out.
    """
    for path in CheckpointStore(folder).after(-1):
        if not (path / MANIFEST).is_file():
            continue
        try:
            yield read_checkpoint(path) if whole else _read_manifest(path)[0]
        except RunError as error:
            if path.exists():
                yield str(error)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; raise RunError if a file is missing or damaged."""
    checkpoint, files = _read_manifest(path)
    for name, expected in files.items():
        try:
            digest = _file_digest(path / name)
        except OSError as error:
            raise RunError(f"checkpoint {path}: {name}: {error.strerror}") from None
        if digest != expected:
            raise RunError(f"checkpoint {path}: {name} is not what was written")
    return checkpoint


def _read_manifest(path: Path) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint as its manifest describes it, and the hashes of its files by name."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest.pop("seal") != _seal_of(manifest):
            raise ValueError
        return Checkpoint(path, manifest["step"], manifest["digest"]), dict(manifest["files"])
    except (OSError, KeyError, TypeError, ValueError):
        raise RunError(f"checkpoint {path}: its {MANIFEST} is missing or damaged") from None


def _write_manifest(folder: Path, step: int, digest: str) -> None:
    paths = sorted(folder.rglob("*"))
    for path in reversed(paths):  # files before the folder that names them
        sync(path)
    files = {str(p.relative_to(folder)): _file_digest(p) for p in paths if p.is_file()}
    manifest = {"step": step, "digest": digest, "files": files}
    sealed = {**manifest, "seal": _seal_of(manifest)}
    (folder / MANIFEST).write_text(json.dumps(sealed, indent=1))
    sync(folder / MANIFEST)
    sync(folder)


def _seal_of(manifest: dict[str, object]) -> str:
    text = json.dumps(manifest, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
