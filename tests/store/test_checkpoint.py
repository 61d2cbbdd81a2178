"""A checkpoint is complete or absent, and training does not wait for the disk."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import CheckpointConfig
from penstock.errors import RunError, WorkerDied
from penstock.store.checkpoint import MAX_FAILURES, CheckpointStore


class FakeTrainer:
    """Writes one file per snapshot, as a trainer would; a write ends once `disk` is set."""

    def __init__(self, size: int = 100, disk: asyncio.Event | None = None) -> None:
        self.step = 0
        self.size = size
        self.disk = disk
        self.fault: OSError | None = None
        self._copy = (Path(), 0)

    async def identity(self) -> tuple[int, str]:
        return self.step, f"digest-{self.step}"

    async def snapshot(self, folder: str) -> tuple[int, str]:
        self._copy = (Path(folder), self.step)
        return await self.identity()

    async def write_snapshot(self) -> None:
        folder, step = self._copy
        if self.disk is not None:
            await self.disk.wait()
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(b"w" * self.size + bytes([step]))
        if self.fault is not None:
            raise self.fault


def store_in(folder: Path, keep: int = 2, notes: list[str] | None = None) -> CheckpointStore:
    report = (notes if notes is not None else []).append
    return CheckpointStore(folder, CheckpointConfig(keep=keep), report=report)


def save(store: CheckpointStore, trainer: FakeTrainer, step: int) -> None:
    trainer.step = step
    asyncio.run(store.save(trainer))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store, trainer = store_in(tmp_path), FakeTrainer()
    for step in (1, 2, 10):
        save(store, trainer, step)
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.digest) == (10, "digest-10")
    assert names(tmp_path) == ["step-10", "step-2"]
    assert [store.set_aside(path) for path in store.after(9)] == [tmp_path / "lost-step-10"]
    older = store.newest()
    assert older is not None
    assert older.step == 2


def test_steps_make_one_due(tmp_path: Path) -> None:
    by_steps = CheckpointStore(tmp_path, CheckpointConfig(every_steps=3))
    assert [step for step in range(1, 8) if by_steps.due(step)] == [3, 6]


def test_pruning_and_sweeping_touch_only_names_that_they_give(tmp_path: Path) -> None:
    kept = ["step-1-best", "step-01", "step-best", ".draft-notes", "lost-step-4"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".draft-77-1").mkdir()  # of a dead process
    store, trainer = store_in(tmp_path, keep=1), FakeTrainer()
    for step in (2, 3, 4):
        save(store, trainer, step)
    assert names(tmp_path) == sorted([*kept, "step-4"])
    assert [store.set_aside(path) for path in store.after(3)] == [tmp_path / "lost-step-4-2"]
    assert names(tmp_path) == sorted([*kept, "lost-step-4-2"])


def test_by_default_one_is_due_every_ten_minutes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    begun = time.monotonic()
    clock = iter([begun + 9 * 60, begun + 11 * 60])
    store._clock = lambda: next(clock)
    assert [store.due(step) for step in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("flip", "model/weights is not what was written"),
        ("truncate", "model/weights is not what was written"),
        ("delete", "model/weights: No such file"),
        ("manifest", "manifest.json is missing or damaged"),
        ("step", "manifest.json is missing or damaged"),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage: str, words: str) -> None:
    store, trainer = store_in(tmp_path), FakeTrainer()
    save(store, trainer, 1)
    save(store, trainer, 2)
    weights, manifest = (tmp_path / "step-2" / name for name in ("model/weights", "manifest.json"))
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[50] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(content[:-1])
    elif damage == "delete":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    damaged: list[str] = []
    newest = store.newest(damaged)
    assert newest is not None
    assert newest.step == 1
    assert len(damaged) == 1
    assert words in damaged[0]


def test_the_trainer_goes_on_while_the_disk_is_slow(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = asyncio.Event()
        store, trainer = store_in(tmp_path), FakeTrainer(disk=disk)
        trainer.step = 1
        await store.begin(trainer)  # returns although the disk takes nothing yet
        trainer.step = 2
        second = asyncio.create_task(store.begin(trainer))
        await asyncio.sleep(0)
        assert not second.done()  # at most one is under way
        assert names(tmp_path)[0].startswith(".draft")
        disk.set()
        await second
        await store.settle()
        assert names(tmp_path) == ["step-1", "step-2"]

    asyncio.run(scenario())


def test_a_cancelled_run_still_ends_its_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = asyncio.Event()
        store, trainer = store_in(tmp_path), FakeTrainer(disk=disk)
        await store.begin(trainer)
        waiting = asyncio.create_task(store.settle())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        disk.set()
        await store.save(trainer)
        assert names(tmp_path) == ["step-0"]

    asyncio.run(scenario())


def test_what_is_on_disk_already_is_not_written_again(tmp_path: Path) -> None:
    store, trainer = store_in(tmp_path, keep=1), FakeTrainer()
    save(store, trainer, 1)
    written = (tmp_path / "step-1" / "manifest.json").stat().st_ino
    again = store_in(tmp_path, keep=1)
    assert again.newest() is not None
    save(again, trainer, 1)
    assert (tmp_path / "step-1" / "manifest.json").stat().st_ino == written


def test_a_failure_is_told_and_the_third_in_a_row_stops(tmp_path: Path) -> None:
    notes: list[str] = []

    async def scenario() -> None:
        store, trainer = store_in(tmp_path, notes=notes), FakeTrainer()
        await store.save(trainer)
        trainer.fault = OSError(28, "No space left on device")
        for step in range(1, MAX_FAILURES + 1):
            trainer.step = step
            await store.begin(trainer)
        await store.settle()
        assert names(tmp_path) == ["step-0"]
        with pytest.raises(RunError, match=r"3 checkpoints in a row failed.*No space left"):
            await store.begin(trainer)

    asyncio.run(scenario())
    assert len(notes) == MAX_FAILURES
    assert all("No space left" in note and "step 0 stays valid" in note for note in notes)


def test_one_success_forgets_the_failures(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, trainer = store_in(tmp_path), FakeTrainer()
        for step in range(1, 3 * MAX_FAILURES):
            trainer.step = step
            trainer.fault = None if step % MAX_FAILURES == 0 else OSError(5, "I/O error")
            await store.begin(trainer)
            await store.settle()

    asyncio.run(scenario())
    assert names(tmp_path) == ["step-3", "step-6"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_previous_one(small_disk: Path) -> None:
    store, trainer = store_in(small_disk), FakeTrainer(size=150_000)
    save(store, trainer, 1)
    with pytest.raises(RunError, match=r"No space left on device.*step 1 stays valid"):
        save(store, trainer, 2)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 1
    assert names(small_disk) == ["step-1"]


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert store_in(tmp_path / "absent").newest() is None


def test_a_fault_that_no_disk_explains_is_raised_by_whoever_waits_next(tmp_path: Path) -> None:
    class Broken(FakeTrainer):
        async def write_snapshot(self) -> None:
            raise KeyError("a fault of ours")

    async def main() -> None:
        store = store_in(tmp_path)
        await store.begin(Broken())
        with pytest.raises(KeyError, match="a fault of ours"):
            await store.settle()
        await store.settle()  # told once

    asyncio.run(main())


def test_a_restore_meanwhile_keeps_the_draft_and_a_death_begins_the_last_one_again(
    tmp_path: Path,
) -> None:
    """The trainer dies twice: before it has copied its state, which sweeps, and while it writes."""
    store = store_in(tmp_path)

    class Dying(FakeTrainer):
        writes = 0

        async def snapshot(self, folder: str) -> tuple[int, str]:
            store.sweep()  # the restored trainer's checkpoint is searched for
            return await super().snapshot(folder)

        async def write_snapshot(self) -> None:
            self.writes += 1
            if self.writes == 1:
                raise WorkerDied("trainer: gone")
            await super().write_snapshot()

    trainer = Dying()
    save(store, trainer, 1)
    assert (trainer.writes, names(tmp_path)) == (2, ["step-1"])
