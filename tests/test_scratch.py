"""Temporary folders of killed processes are removed, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.files import ScratchFolder, sweep

MAKE_ONE = """
import sys
from penstock.files import ScratchFolder
folder = ScratchFolder.new("test", sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("penstock-notes", "penstock-test-0123", "other")]
    for path in others:
        path.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE_ONE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    made = Path(process.stdout.readline().strip())
    sweep(tmp_path)
    assert made.is_dir()
    process.kill()
    process.wait()
    assert made.is_dir()
    with ScratchFolder.new("test", tmp_path) as mine:
        assert mine.is_dir()
        assert mine.stat().st_mode & 0o077 == 0
        assert not made.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)
