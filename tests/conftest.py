"""The environment of every test, and runs that several test files compare with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.run_folder import RunFolder
    from stages.tiny_run import CrashServer

# read when torch and Triton are imported, here and in every process that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One undisturbed run, sync and in this process, that disturbed ones are compared with."""
    from stages.disturbed_run import config_of, run

    folder = tmp_path_factory.mktemp("quiet")
    return run(config_of(folder, "quiet", "produce.strategy=sync", "launch.kind=inline"))[0]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    """One crash server for all tests: imports are paid once."""
    from stages.tiny_run import CrashServer

    server = CrashServer(tmp_path_factory.mktemp("runs"))
    yield server
    server.close()
