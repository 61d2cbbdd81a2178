"""Files are replaced whole; a network file system is known by its mount and refused for a run."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import cli, files
from penstock.inspection.track.logs import restore_metrics
from penstock.rollout.evaluation.evaluate import SUMMARY, restore_summaries

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / {root}/home rw,relatime shared:5 - nfs4 filer:/home rw,vers=4.2
31 30 0:41 / {root}/home/my\\040dïsk rw,relatime - ext4 /dev/vdb rw
32 22 0:42 / {root}/ssh rw - fuse.sshfs me@host: rw
33 22 0:43 / {root}/twice rw - ext4 /dev/vdc rw
34 22 0:44 / {root}/twice rw - lustre 10.0.0.1@tcp:/scratch rw
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder below which a made-up table of mounts has network file systems."""
    root = (tmp_path / "root").resolve()
    (root / "home" / "my dïsk").mkdir(parents=True)
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.format(root=root))
    monkeypatch.setattr(files, "MOUNTS", table)
    return root


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("home", "nfs4"),
        ("home/me/runs", "nfs4"),
        ("home/my dïsk/runs", ""),
        ("homes", ""),
        ("ssh/runs", "fuse.sshfs"),
        ("twice", "lustre"),
    ],
)
def test_the_nearest_mount_names_the_file_system(mounts: Path, folder: str, kind: str) -> None:
    (mounts / folder).mkdir(parents=True, exist_ok=True)
    assert files.network_file_system(mounts / folder / "not yet there") == kind


def test_this_machine_has_a_table_of_mounts(tmp_path: Path) -> None:
    assert files._file_system(tmp_path.resolve())


def test_a_start_on_a_network_file_system_is_refused_in_one_line(
    mounts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["penstock", "train", f"run.dir={mounts / 'home' / 'runs'}"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "on nfs4, a network file system" in line
    assert "run.allow_network_disk=true" in line
    assert not (mounts / "home" / "runs").exists()


@pytest.mark.parametrize("name", ["metrics", SUMMARY])
def test_a_log_is_replaced_whole_before_a_run_continues(tmp_path: Path, name: str) -> None:
    path, before = tmp_path / name, '{"step": 1, "task": "t"}\n{"step": 2, "task": "t"}\n{"st'
    path.write_text(before)
    os.link(path, tmp_path / "what a reader has open")
    if name == SUMMARY:
        restore_summaries(tmp_path, 1)
    else:
        restore_metrics(path, 1, lambda step: {})
    assert path.read_text() == '{"step": 1, "task": "t"}\n'
    assert (tmp_path / "what a reader has open").read_text() == before
    assert not list(tmp_path.glob(".*"))


def test_a_descriptor_is_written_to_not_replaced() -> None:
    source, target = os.pipe()
    files.write_for("simulate", Path(f"/dev/fd/{target}"), "what --picture /dev/stdout asks for")
    os.close(target)
    with open(source) as said:
        assert said.read() == "what --picture /dev/stdout asks for"


@pytest.mark.parametrize("refused", [None, 3])
def test_a_large_file_is_synced_in_pieces_and_then_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """In one go, gigabytes of a checkpoint would hold up every commit of the journal."""
    calls: list[object] = []

    class Library:
        @staticmethod
        def sync_file_range(descriptor: int, start: Any, count: Any, how: int) -> int:
            calls.append((start.value, count.value, how))
            return -1 if len(calls) == refused else 0

    monkeypatch.setattr(files.ctypes, "CDLL", lambda _: Library)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: calls.append("whole"))
    monkeypatch.setattr(files, "_PIECE", 1000)
    (tmp_path / "large").write_bytes(bytes(2500))
    (tmp_path / "small").write_bytes(bytes(1000))
    files.sync(tmp_path / "large")
    pieces = [(1000, 1000, 2), (0, 1000, 7), (2000, 1000, 2), (1000, 1000, 7)]
    pieces += [(3000, 1000, 2), (2000, 1000, 7)]  # there is no fourth: nothing to write
    assert calls == [*pieces[:refused], "whole"]
    calls.clear()
    files.sync(tmp_path / "small")
    files.sync(tmp_path)
    assert calls == ["whole", "whole"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such call")
def test_this_system_takes_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE", 4096)
    own, answers = ctypes.CDLL(None).sync_file_range, []
    wrapped = SimpleNamespace(sync_file_range=lambda *how: answers.append(own(*how)) or answers[-1])
    monkeypatch.setattr(files.ctypes, "CDLL", lambda _: wrapped)
    (tmp_path / "file").write_bytes(bytes(10_000))
    files.sync(tmp_path / "file")
    assert answers == [0] * 6
