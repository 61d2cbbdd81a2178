"""Faults by the kernel: a disk that it makes read-only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.store.run_folder import RunFolder
from stages.tiny_run import CrashServer, assert_sound, digests

SYNC = "produce.strategy=sync"
IMAGE_BYTES = 96 << 20


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
