"""A checkpoint is whole or not there: broken and half-written ones are never chosen."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.checkpoint import CheckpointStore
from penstock.errors import RunError


class FakeTrainer:
    """Writes one file per save, like a trainer would."""

    def __init__(self) -> None:
        self.step = 0

    async def save(self, folder: str) -> tuple[int, str]:
        (Path(folder) / "model").mkdir()
        (Path(folder) / "model" / "weights").write_bytes(b"w" * 100 + bytes([self.step]))
        return self.step, f"digest-{self.step}"


def save(store: CheckpointStore, trainer: FakeTrainer, step: int) -> None:
    trainer.step = step
    asyncio.run(store.save(trainer.save))


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    store, trainer = CheckpointStore(tmp_path, keep=2), FakeTrainer()
    for step in (1, 2, 10):
        save(store, trainer, step)
    newest = store.newest()
    assert newest is not None
    assert (newest.step, newest.digest) == (10, "digest-10")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    store, trainer = CheckpointStore(tmp_path, keep=2), FakeTrainer()
    save(store, trainer, 1)
    save(store, trainer, 2)
    weights = tmp_path / "step-2" / "model" / "weights"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[50] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(content[:-1])
    elif damage == "delete":
        weights.unlink()
    else:
        (tmp_path / "step-2" / "manifest.json").write_text("{")
    newest = store.newest()
    assert newest is not None
    assert newest.step == 1


def test_a_failed_write_leaves_the_previous_one(tmp_path: Path) -> None:
    store, trainer = CheckpointStore(tmp_path, keep=2), FakeTrainer()
    save(store, trainer, 1)

    async def disk_full(folder: str) -> tuple[int, str]:
        (Path(folder) / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left"):
        asyncio.run(store.save(disk_full))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent", keep=1).newest() is None
