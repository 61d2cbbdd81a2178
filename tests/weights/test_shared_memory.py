"""Fetched tensors never change while they are held; an incomplete publication is never read."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from penstock.errors import RunError, WeightsGone
from penstock.types import WeightHandle
from penstock.weights.shared_memory import BufferReader, ReaderCache, SharedMemorySync
from stages.publications import Publications, holds, weights
from stages.weight_holder import start_holder

TestPublications = Publications.TestCase
TestPublications.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_reader_that_begins_early_sees_each_tensor_when_it_is_written(tmp_path: Path) -> None:
    trainer, engine = SharedMemorySync(tmp_path), SharedMemorySync()
    large = [(f"w{n}", torch.full((3 * 2**20,), float(n))) for n in range(4)]  # 12 MiB each
    trainer.publish(1, "d", large)
    handle = trainer.announce(2, "e")
    seen, may_write = [], [threading.Event() for _ in large]

    def read() -> None:
        for name, tensor in engine.fetch(handle):
            seen.append((name, float(tensor[-1])))
            number = len(seen)
            if number < len(large):
                may_write[number].set()

    def written():
        for number, (name, tensor) in enumerate(large):
            if number:
                assert may_write[number].wait(60)  # the reader has the one before
            yield name, tensor + 10

    reader = threading.Thread(target=read)
    reader.start()
    assert trainer.publish(2, "e", written()) == handle
    reader.join(60)
    assert seen == [("w0", 10.0), ("w1", 11.0), ("w2", 12.0), ("w3", 13.0)]


def test_a_publication_that_fails_wakes_its_readers_with_an_error(tmp_path: Path) -> None:
    trainer, engine = SharedMemorySync(tmp_path), SharedMemorySync()
    first = trainer.publish(1, "d", weights(1))
    handle = trainer.announce(2, "e")
    refused: list[str] = []

    def read() -> None:
        with pytest.raises(WeightsGone) as gone:
            list(engine.fetch(handle))
        refused.append(str(gone.value))

    def broken():
        yield weights(2)[0]
        raise MemoryError

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(MemoryError):
        trainer.publish(2, "e", broken())
    reader.join(60)
    assert "their writer ended while it wrote them" in refused[0]
    assert holds(list(engine.fetch(first)), 1)


@pytest.mark.usefixtures("warm_workers")
def test_a_writer_that_is_killed_leaves_nobody_waiting(tmp_path: Path) -> None:
    engine, refused = SharedMemorySync(), []
    folder = tmp_path / "weights"
    folder.mkdir()

    def read(handle: WeightHandle) -> None:
        with pytest.raises(WeightsGone) as gone:
            list(engine.fetch(handle))
        refused.append(str(gone.value))

    async def kill_the_writer() -> WeightHandle:
        writer = await start_holder(tmp_path)
        first, handle = await writer.call("publish", folder)
        reader = threading.Thread(target=read, args=(handle,))
        reader.start()
        os.kill(writer.pid, signal.SIGKILL)
        await asyncio.to_thread(reader.join, 60)
        await writer.close()
        return first

    first = asyncio.run(kill_the_writer())
    assert "are not whole" in refused[0]
    kept = list(engine.fetch(first))
    assert holds(kept, 1)
    back = SharedMemorySync(folder)  # the next trainer goes on in the same folder
    assert holds(list(engine.fetch(back.publish(2, "e", weights(2)))), 2)
    assert holds(list(engine.fetch(back.publish(3, "f", weights(3)))), 3)
    assert holds(kept, 1)


@pytest.mark.usefixtures("warm_workers")
def test_a_reader_that_keeps_up_with_its_writer_is_never_told_that_it_ended(tmp_path: Path) -> None:
    """The reader looks at the number of written bytes while the writer changes it, 50,000 times."""
    path, count = tmp_path / "buffer", 50_000

    def read() -> None:
        reader = BufferReader(path, 1, count, ReaderCache())
        for end in range(1, count + 1):
            reader.wait_until_written(end)

    async def read_while_it_is_written() -> None:
        writer = await start_holder(tmp_path)
        assert await writer.call("begin", path, count)
        writing = asyncio.create_task(writer.call("mark", count))
        await asyncio.to_thread(read)
        await writing
        await writer.close()

    asyncio.run(read_while_it_is_written())


@pytest.mark.usefixtures("warm_workers")
def test_a_reader_that_is_killed_frees_its_buffer(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    trainer = SharedMemorySync(folder)
    handle = trainer.publish(1, "d", weights(1))

    async def kill_the_reader() -> None:
        reader = await start_holder(tmp_path)
        await reader.call("hold", handle)
        for version in (2, 3, 4):
            trainer.publish(version, "d", weights(version))
        assert len(list(folder.glob("buffer-*"))) == 3  # one is the reader's
        os.kill(reader.pid, signal.SIGKILL)
        await asyncio.to_thread(reader._process.wait)
        await reader.close()

    asyncio.run(kill_the_reader())
    trainer.publish(5, "d", weights(5))
    assert len(list(folder.glob("buffer-*"))) == 2


def test_the_lock_lives_as_long_as_the_last_tensor(tmp_path: Path) -> None:
    trainer, engine = SharedMemorySync(tmp_path), SharedMemorySync()
    row = next(engine.fetch(trainer.publish(1, "d", weights(1))))[1][2]  # a view of a view
    gc.collect()
    for version in (2, 3, 4):
        trainer.publish(version, "d", weights(version))
    assert bool((row == 1).all())


def test_weights_of_another_size_replace_the_old_ones(tmp_path: Path) -> None:
    trainer, engine = SharedMemorySync(tmp_path), SharedMemorySync()
    for version, count in enumerate((3, 50, 2, 3), 1):
        handle = trainer.publish(version, "d", weights(version, count))
        tensors = list(engine.fetch(handle))
        assert len(tensors) == count
        assert holds(tensors, version)


def test_memory_that_is_not_there_is_one_line_and_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = SharedMemorySync(tmp_path), SharedMemorySync()
    first = trainer.publish(1, "d", weights(1))

    def full(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "posix_fallocate", full)
        with pytest.raises(RunError, match=r"weights: no room for .* GB in .*: No space left"):
            trainer.publish(2, "e", weights(2))
    assert holds(list(engine.fetch(first)), 1)
    assert holds(list(engine.fetch(trainer.publish(2, "e", weights(2)))), 2)


def test_an_announced_layout_is_kept_to(tmp_path: Path) -> None:
    trainer = SharedMemorySync(tmp_path)
    assert trainer.announce(1, "d") is None  # nothing was published yet
    trainer.publish(1, "d", weights(1))
    assert trainer.announce(2, "e") is not None
    with pytest.raises(AssertionError, match="announced was"):
        trainer.publish(2, "e", [(f"other{n}", tensor) for n, (_, tensor) in enumerate(weights(2))])
