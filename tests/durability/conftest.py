"""One crash server for all tests of this folder: imports are paid once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.tiny_run import CrashServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    server = CrashServer(tmp_path_factory.mktemp("runs"))
    yield server
    server.close()
