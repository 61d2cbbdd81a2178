"""Fetched tensors never change while they are held; an incomplete publication is never read."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from penstock.errors import RunError, WeightsGone
from penstock.weights.buffer import BufferReader, ReaderCache
from penstock.weights.shared_memory import SharedMemorySync
from stages.publications import Publications, holds, weights

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


WRITER = """
import sys, torch
from penstock.weights.shared_memory import SharedMemorySync
import pickle
trainer = SharedMemorySync(sys.argv[1])
weights = [(f"w{n}", torch.full((5, 7), 1.0 + n)) for n in range(3)]
first = trainer.publish(1, "d", weights)
handle = trainer.announce(2, "e")
sys.stdout.buffer.write(pickle.dumps((first, handle)))
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_writer_that_is_killed_leaves_nobody_waiting(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    first, handle = pickle.load(process.stdout)
    engine, refused = SharedMemorySync(), []

    def read() -> None:
        with pytest.raises(WeightsGone) as gone:
            list(engine.fetch(handle))
        refused.append(str(gone.value))

    reader = threading.Thread(target=read)
    reader.start()
    os.kill(process.pid, signal.SIGKILL)
    reader.join(60)
    process.wait()
    assert "are not whole" in refused[0]
    kept = list(engine.fetch(first))
    assert holds(kept, 1)
    back = SharedMemorySync(tmp_path)  # the next trainer goes on in the same folder
    assert holds(list(engine.fetch(back.publish(2, "e", weights(2)))), 2)
    assert holds(list(engine.fetch(back.publish(3, "f", weights(3)))), 3)
    assert holds(kept, 1)


MARKER = """
import sys
from pathlib import Path
from penstock.weights.buffer import BufferWriter
writer, count = BufferWriter(Path(sys.argv[1])), int(sys.argv[2])
assert writer.begin(1, count)
print("begun", flush=True)
sys.stdin.read()
for written in range(1, count + 1):
    writer.mark_written(written)
"""


def test_a_reader_that_keeps_up_with_its_writer_is_never_told_that_it_ended(tmp_path: Path) -> None:
    """The reader looks at the number of written bytes while the writer changes it, 50,000 times."""
    path, count = tmp_path / "buffer", 50_000
    process = subprocess.Popen(
        [sys.executable, "-c", MARKER, str(path), str(count)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"begun\n"
    reader = BufferReader(path, 1, count, ReaderCache())
    process.stdin.close()
    for end in range(1, count + 1):
        reader.wait_until_written(end)
    assert process.wait() == 0


READER = """
import pickle, sys
from penstock.weights.shared_memory import SharedMemorySync
held = list(SharedMemorySync().fetch(pickle.load(sys.stdin.buffer)))
print("held", flush=True)
sys.stdin.buffer.read()
"""


def test_a_reader_that_is_killed_frees_its_buffer(tmp_path: Path) -> None:
    trainer = SharedMemorySync(tmp_path)
    handle = trainer.publish(1, "d", weights(1))
    process = subprocess.Popen(
        [sys.executable, "-c", READER], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(handle))
    process.stdin.flush()
    assert process.stdout.readline() == b"held\n"
    for version in (2, 3, 4):
        trainer.publish(version, "d", weights(version))
    assert len(list(tmp_path.glob("buffer-*"))) == 3  # one is the reader's
    process.kill()
    process.wait()
    trainer.publish(5, "d", weights(5))
    assert len(list(tmp_path.glob("buffer-*"))) == 2


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
