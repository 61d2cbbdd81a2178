"""The wheel: it holds every file of the package, and works where the repository is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock import __version__
from stages.made_run import make_run

pytestmark = pytest.mark.slow  # `make test-wheel` installs the wheel and trains with it
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that nothing is left in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(folder),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(folder.glob("*.whl"))


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "penstock"
    files = {
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("penstock/")}
    assert held == {path.relative_to(package.parent).as_posix() for path in files}


def test_it_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = wheel.name.split("-py3")[0] + ".dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert re.search(r"^Requires-Python: <3\.14,>=3\.11$", text, re.MULTILINE)
    assert f"Version: {__version__}\n" in text
    assert "penstock = penstock.cli:main" in commands


def test_it_works_where_the_repository_is_not(wheel: Path, tmp_path: Path) -> None:
    """The demo's config and the report's scripts come out of the wheel."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    run = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    where = f"import penstock; assert penstock.__file__.startswith({str(site)!r}); "
    for words in (["--version"], ["config"], ["report", str(run.path)]):
        code = f"{where}import sys; sys.argv[1:] = {words!r}; from penstock.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert "<html" in (run.path / "report.html").read_text()
