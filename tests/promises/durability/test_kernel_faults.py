"""Faults by the kernel: a disk that it makes read-only, and workers that it kills for want of memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages import disturbed_run
from stages.tiny_run import CrashServer, assert_sound, digests

SYNC = "produce.strategy=sync"
IMAGE_BYTES = 96 << 20
LIMIT_BYTES = 4 << 20  # less than any step allocates
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of its own, which the kernel can make read-only as after an error of the device."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(place)],
    ):
        if (
            shutil.which(command[0]) is None
            or subprocess.run(command, capture_output=True).returncode
        ):
            pytest.skip("cannot mount an ext4 file system here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_ends_the_run_in_one_line_and_loses_nothing(
    server: CrashServer, disk: Path
) -> None:
    undisturbed, code = server.train("writable", SYNC)
    assert code == 0, server.output()
    fault = {"point": "before step", "number": 3, "fault": f"sh mount -o remount,abort {disk}"}
    _, code = server.train("read-only", SYNC, f"run.dir={disk}", **fault)
    run = RunFolder(disk / "read-only")
    assert code == 1, server.output()
    output = server.output()
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    # a write or a sync of the journal fails, whichever comes first
    assert line.startswith(f"error: journal {run.journal}")
    assert "cannot write" in line or "the disk did not take it" in line
    image = disk.with_name("image")
    subprocess.run(["umount", str(disk)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)
    assert digests(run) == digests(undisturbed)
    assert server.run("audit", str(run.path)) == 0, server.output()


@pytest.fixture
def starve(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """What puts a process into a cgroup with hardly any memory: the kernel kills it at its next allocation."""
    first = (CGROUPS / "memory", "memory.limit_in_bytes")  # version 1
    root, limit = first if first[0].is_dir() else (CGROUPS, "memory.max")
    group = root / f"penstock-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"cannot limit the memory of a process by a cgroup here: {error}")
    yield lambda pid: (group / "cgroup.procs").write_text(str(pid)) and None
    group.rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("name", ["trainer", "engine-0"])
def test_a_worker_that_the_kernel_kills_for_want_of_memory_leaves_no_trace_in_the_weights(
    name: str, quiet: RunFolder, tmp_path: Path, starve: Callable[[int], None]
) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            worker = job.workers.supervised[name].worker
            (process,) = getattr(worker, "_ranks", [worker])
            starve(process.pid)

    folder, notes = disturbed_run.run(disturbed_run.config_of(tmp_path, "starved", SYNC), disturb)
    assert disturbed_run.digests(folder) == disturbed_run.digests(quiet)
    disturbed_run.assert_balanced(folder)
    text = "\n".join(notes)
    assert f"{name}: the worker ended unexpectedly" in text
    assert f"{name}: serves again" in text
