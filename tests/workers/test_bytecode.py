"""Workers find what an earlier one compiled, also where Python writes no bytecode beside the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.workers.processes import bytecode, process_worker
from penstock.workers.processes.bytecode import bytecode_environment, use_bytecode_cache
from stages.tiny_run import SUMS, TINY

COUNT = """
import sys
made = []
sys.addaudithook(lambda event, args: made.append(args[1]) if event == "compile" else None)
import heavy
print(sum("heavy" in str(name) for name in made))
"""


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode, in an environment in which Python writes none."""
    package = tmp_path / "site" / "heavy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def compiled(package: Path, environment: dict[str, str]) -> int:
    """Return how many files of the package a new process compiles."""
    variables = {**os.environ, "PYTHONPATH": str(package.parent), **environment}
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_second_worker_compiles_nothing(heavy: Path) -> None:
    environment = bytecode_environment("heavy")
    assert [compiled(heavy, {}), compiled(heavy, {})] == [1, 1]
    assert [compiled(heavy, environment), compiled(heavy, environment)] == [1, 0]
    assert not (heavy / "__pycache__").exists()
    assert Path(environment["PYTHONPYCACHEPREFIX"]).stat().st_mode & 0o077 == 0


def test_a_package_that_only_root_can_write_counts_too(
    heavy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not bytecode_environment("heavy")  # Python will write it beside the source
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert bytecode_environment("heavy")


def test_bytecode_that_is_there_is_used_as_it_is(heavy: Path) -> None:
    assert compiled(heavy, {"PYTHONDONTWRITEBYTECODE": ""}) == 1
    assert not bytecode_environment("heavy")
    assert not bytecode_environment("no_such_package")


def test_a_folder_of_the_users_own_choice_stays(
    heavy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "elsewhere")
    assert not bytecode_environment("heavy")


def test_workers_of_a_command_that_uses_the_cache_use_it_too(
    heavy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(bytecode, "_is_compiled_anew", lambda package: True)
    use_bytecode_cache()
    assert not sys.dont_write_bytecode
    assert sys.pycache_prefix == str(tmp_path / "cache" / "penstock" / "bytecode")
    monkeypatch.setattr(bytecode, "_is_compiled_anew", lambda package: False)  # now it is there
    assert bytecode_environment("heavy")["PYTHONPYCACHEPREFIX"] == sys.pycache_prefix


def test_a_cache_that_is_not_ours_or_cannot_be_made_is_left_alone(
    heavy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not bytecode_environment("heavy")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(heavy.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(bytecode_environment("heavy")["PYTHONPYCACHEPREFIX"])
    folder.chmod(0o770)  # others could put code there
    assert not bytecode_environment("heavy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(heavy / "__init__.py"))
    assert not bytecode_environment("heavy")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert not bytecode_environment("heavy")


def test_every_worker_gets_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process_worker, "bytecode_environment", lambda: {"PYTHONPYCACHEPREFIX": "p"}
    )
    assert process_worker._worker_environment(1)["PYTHONPYCACHEPREFIX"] == "p"


@pytest.mark.slow
def test_the_second_run_of_a_user_whose_torch_has_no_bytecode_compiles_nothing(
    tmp_path: Path,
) -> None:
    import torch

    shadow = tmp_path / "site" / "torch"  # the same torch, without bytecode
    shadow.mkdir(parents=True)
    for file in Path(torch.__file__).parent.iterdir():
        if file.name != "__pycache__":
            (shadow / file.name).symlink_to(file)
    paths = [str(shadow.parent), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def train(name: str) -> dict[Path, int]:
        words = [*TINY, "launch.kind=local", f"tasks.train.data={SUMS}", "train.steps=1"]
        words += [f"run.dir={tmp_path}", f"run.name={name}"]
        program = [sys.executable, "-m", "penstock.cli", "train", *words]
        subprocess.run(program, env=environment, check=True, capture_output=True)
        made = (tmp_path / "cache" / "penstock" / "bytecode").rglob("*.pyc")
        return {file: file.stat().st_mtime_ns for file in made}

    first = train("first")
    names = {file.name.partition(".")[0] for file in first}
    assert {"worker_main", "consumer", "modeling_utils"} <= names
    assert {"sampler", "tokenization_auto"} <= names  # of the command itself
    assert not (shadow / "__pycache__").exists()
    assert train("second") == first
