"""`penstock backup`: copy a run, also one that is under way, into a run folder of its own.

`cp` of a live journal is unsafe: its newest records are in a second file, and the two change while they are
copied. This copies the journal by SQLite's online backup, which sees one moment. Everything else is
copied before the journal, so the journal is never behind. The copy is complete or absent.
"""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path

from penstock.errors import RunError, UserError
from penstock.files import count, pasted, whole_folder
from penstock.store.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from penstock.store.journal import Journal
from penstock.store.run_folder import CONFIG, METRICS, ORIGIN, RESCORED, RunFolder

_COPIED = (CONFIG, "configs", ORIGIN, RESCORED, METRICS, "rollouts.jsonl", "data", "eval")
_MOST_TRIES = 10  # a live run may prune the checkpoint that is being copied


def back_up(folder: RunFolder, target: Path | None = None) -> str:
    """Copy journal, newest checkpoint, settings and logs to `target`; return what was copied."""
    target = target or folder.path.with_name(
        f"{folder.name}-backup-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if target.exists():
        raise UserError(f"backup: got {target}, which exists already, allowed: a new folder")
    try:
        with whole_folder(target, mode=0o700) as draft:
            copy = RunFolder(draft)
            for name in _COPIED:
                source = folder.path / name
                if source.is_dir():
                    shutil.copytree(source, draft / name, symlinks=True)
                elif source.is_file():
                    shutil.copyfile(source, draft / name, follow_symlinks=False)
            step, checkpoint = _copy_state(folder, copy)
            if copy.record():
                copy.write_copies()
            _remove_journal(copy, "-wal", "-shm")  # empty: left by the looks at the copy
    except OSError as error:
        raise RunError(f"backup: {target} cannot be written: {error}") from error
    state = "no checkpoint" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
    return f"{target}: {count(step, 'step')}, {state}; continue it with: penstock resume {pasted(target)}"


def _copy_state(folder: RunFolder, copy: RunFolder) -> tuple[int, Checkpoint | None]:
    """Copy a checkpoint, then the journal; repeat if the journal has removed the steps between them."""
    for _ in range(_MOST_TRIES):
        checkpoint = _copy_checkpoint(folder, copy.checkpoints)
        with closing(Journal.open(folder.journal, readonly=True)) as journal:
            journal.copy_to(copy.journal)
        with closing(Journal.open(copy.journal, readonly=True)) as journal:
            journal.check_file()
            step, removed = journal.last_committed_step(), journal.pruned_to()
        if checkpoint is None or checkpoint.step >= removed:
            return step, checkpoint
        shutil.rmtree(copy.checkpoints)
        _remove_journal(copy)
    raise _too_slow(folder)


def _remove_journal(copy: RunFolder, *ends: str) -> None:
    for end in ends or ("", "-wal", "-shm"):
        copy.journal.with_name(f"{copy.journal.name}{end}").unlink(missing_ok=True)


def _copy_checkpoint(folder: RunFolder, target: Path) -> Checkpoint | None:
    """Copy the newest good checkpoint and compare every file with its digest."""
    for _ in range(_MOST_TRIES):
        newest = CheckpointStore(folder.checkpoints).newest()
        if newest is None:
            return None
        copy = target / newest.path.name
        try:
            shutil.copytree(newest.path, copy)
            return read_checkpoint(copy)
        except (OSError, RunError):
            shutil.rmtree(copy, ignore_errors=True)
            if newest.path.exists():  # it was not pruned: the fault is another
                raise
    raise _too_slow(folder)


def _too_slow(folder: RunFolder) -> RunError:
    return RunError(
        f"backup: the checkpoints in {folder.checkpoints} are removed faster than they are copied; "
        "raise checkpoint.keep"
    )
