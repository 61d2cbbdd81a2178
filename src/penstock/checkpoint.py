"""Checkpoints of the trainer: whole or not there at all. Layer 4.

    checkpoints/step-N/ model/ (HF safetensors)  trainer state  manifest.json (written last)

A checkpoint is written into a hidden folder and renamed into place after its manifest is on disk.
What was produced but not yet trained is not here: the journal holds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import RunError

MANIFEST = "manifest.json"


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """One valid checkpoint on disk."""

    path: Path
    step: int
    digest: str  # of the weights, as the trainer computed it


class CheckpointStore:
    """Consumes the trainer's `save`, produces checkpoints; keeps the newest `keep`."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, save: Callable[[str], Awaitable[tuple[int, str]]]) -> Checkpoint:
        """Write a new checkpoint by `save(folder) -> (step, digest)` and prune old ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".draft-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            step, digest = await save(str(draft))
            _write_manifest(draft, step, digest)
            final = self._folder / f"step-{step}"
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
            _sync_folder(self._folder)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunError(f"checkpoint not written: {error}; the previous one is valid") from error
        self._prune()
        return Checkpoint(final, step, digest)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose every file is as its manifest says; broken ones are passed over."""
        for path in sorted(self._folder.glob("step-*"), key=_step_of, reverse=True):
            checkpoint = read_checkpoint(path)
            if checkpoint is not None:
                return checkpoint
        return None

    def _prune(self) -> None:
        paths = sorted(self._folder.glob("step-*"), key=_step_of, reverse=True)
        for path in paths[self._keep :]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(".draft-*"):
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, or None where a file is missing or not what the manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if _file_digest(path / name) != expected:
                return None
        return Checkpoint(path, manifest["step"], manifest["digest"])
    except (OSError, KeyError, ValueError):
        return None


def _write_manifest(folder: Path, step: int, digest: str) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync_file(path)
    listing = {str(path.relative_to(folder)): _file_digest(path) for path in files}
    manifest = {"step": step, "digest": digest, "files": listing}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync_file(folder / MANIFEST)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1
