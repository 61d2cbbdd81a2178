"""One undisturbed run that the disturbed ones are compared with."""

from __future__ import annotations

import pytest

from penstock.run_folder import RunFolder
from stages.disturbed_run import config_of, run


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """In this process, sync, nobody dies."""
    folder = tmp_path_factory.mktemp("quiet")
    return run(config_of(folder, "quiet", "produce.strategy=sync", "launch.kind=inline"))[0]
