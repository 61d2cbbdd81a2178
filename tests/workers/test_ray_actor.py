"""A Ray actor that does not answer still shows its stack and its activity."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import WorkerDied
from stages.echo import ECHO

ray = pytest.importorskip("ray")
from penstock.workers.ray.actor import ActorWorker  # noqa: E402

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def own_cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=2**27,
        include_dashboard=False,
        **quiet,
    )
    yield
    ray.shutdown()


def test_an_actor_whose_event_loop_is_blocked_shows_its_stack(tmp_path: Path) -> None:
    async def run() -> str:
        remote = await ActorWorker.create("echo", tmp_path / "echo.log", 1, 60, num_cpus=0)
        await remote.build(ECHO, "hello", timeout_s=60)
        os.mkfifo(pipe := tmp_path / "pipe")
        blocked = asyncio.ensure_future(remote.call("block_the_loop", pipe))
        assert await asyncio.to_thread(pipe.read_text) == "blocked"
        text = await remote.stack()
        assert (await remote.activity() or 0) > 0
        await remote.kill()
        with pytest.raises(WorkerDied):
            await blocked
        await remote.close()
        return text

    assert "in block_the_loop" in asyncio.run(run())
