"""An error in an actor is one line with its own type and message; the traceback goes to the log."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PartFailed, UserError, WorkerDied

ray = pytest.importorskip("ray")
from penstock.workers.ray.actor import ActorWorker  # noqa: E402

pytestmark = pytest.mark.ray
PART = f"{__file__}:Clumsy"
LONGEST_S = 120.0


class Clumsy:
    """A part whose methods all fail."""

    def __init__(self, needs: str = "") -> None:
        if needs:
            __import__(needs)

    def fail(self) -> None:
        raise KeyError("missing")

    def fail_in_lines(self) -> None:
        raise ImportError("\nthis part needs two packages:\n  - one\n  - another")

    def fail_on_purpose(self) -> None:
        raise UserError("size: got 3, allowed: 4")

    async def fail_in_a_group(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(self.fail))

    def lock(self) -> Any:
        return threading.Lock()  # which no process can send to another

    async def generate_many(self, requests: list[str]) -> list[Any]:
        """Fail in a call whose arguments and result are pickled by us."""
        if "odd" in requests:
            raise ValueError("an odd request")
        return [threading.Lock() if request == "lock" else request for request in requests]

    async def wait_for_ever(self) -> None:
        await asyncio.Event().wait()

    def exit_now(self) -> None:
        os._exit(3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_cluster()
    yield
    ray.shutdown()


def start_cluster(**fields: Any) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    size = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
    ray.init(address="local", **size, **quiet, **fields)


async def created(log: Path, **options: Any) -> ActorWorker:
    return await ActorWorker.create("echo", log, 1, LONGEST_S, num_cpus=0, **options)


def test_an_exception_of_a_part_is_told_in_one_line_and_its_traceback_is_in_the_log(
    cluster: None, tmp_path: Path
) -> None:
    log = tmp_path / "echo.log"
    told: dict[str, str] = {}

    async def run() -> None:
        remote = await created(log)
        await remote.build(PART, timeout_s=LONGEST_S)
        for method in ("fail", "fail_in_lines", "fail_in_a_group", "lock"):
            with pytest.raises(PartFailed) as raised:
                await remote.call(method)
            told[method] = str(raised.value)
        for request in ("odd", "lock"):
            with pytest.raises(PartFailed) as raised:
                await remote.call("generate_many", [request])
            told[f"generate {request}"] = str(raised.value)
        assert await remote.call("generate_many", ["fine"]) == ["fine"]
        with pytest.raises(UserError, match=r"^size: got 3, allowed: 4$"):
            await remote.call("fail_on_purpose")
        await remote.close()

    asyncio.run(run())
    end = f" (traceback: {log})"
    assert told == {
        "fail": "echo: KeyError: 'missing'" + end,
        "fail_in_lines": "echo: ImportError: this part needs two packages: - one - another" + end,
        "fail_in_a_group": "echo: KeyError: 'missing'" + end,
        "lock": "echo: TypeError: cannot pickle '_thread.lock' object" + end,
        "generate odd": "echo: ValueError: an odd request" + end,
        "generate lock": "echo: TypeError: cannot pickle '_thread.lock' object" + end,
    }
    text = log.read_text()
    for place in ("in fail", "in fail_in_lines", "in generate_many"):
        assert place in text
    assert "size: got 3" not in text


def test_a_package_that_a_part_needs_and_a_node_lacks_is_named(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        remote = await created(tmp_path / "echo.log")
        try:
            await remote.build(PART, "a_package_that_is_not_here", timeout_s=LONGEST_S)
        finally:
            await remote.close()

    with pytest.raises(
        PartFailed, match=r"^echo: ModuleNotFoundError: No module named 'a_package_that_is_not_here"
    ):
        asyncio.run(run())


def test_a_node_without_our_package_is_told_when_the_actor_is_created(
    cluster: None, tmp_path: Path
) -> None:
    """A package of that name on the node needs another one that is missing."""
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").write_text("import a_package_that_is_not_here")
    log = tmp_path / "echo.log"
    bare = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(WorkerDied) as raised:
        asyncio.run(created(log, runtime_env=bare))
    line = "ModuleNotFoundError: No module named 'a_package_that_is_not_here'"
    assert str(raised.value) == f"echo: the actor could not be started: {line} (log: {log})"
    assert "Traceback" in log.read_text() or "penstock/__init__.py" in log.read_text()


def test_an_actor_that_is_gone_without_a_word_says_so(cluster: None, tmp_path: Path) -> None:
    log = tmp_path / "echo.log"

    async def run() -> tuple[str, str]:
        remote = await created(log)
        await remote.build(PART, timeout_s=LONGEST_S)
        with pytest.raises(WorkerDied) as raised:
            await remote.call("exit_now")
        async with asyncio.timeout(LONGEST_S):
            ended = await remote.ended()
        await remote.close()
        return str(raised.value), ended

    told, ended = asyncio.run(run())
    line = (
        "its process has ended (SYSTEM_ERROR: Worker unexpectedly exits with a connection error "
        "code 2. End of file), by a crash, a signal or the kernel for want of memory"
    )
    assert told == f"echo: {line}"
    assert ended == f"echo: the actor ended unexpectedly: {line} (log: {log})"


def test_what_no_node_can_hold_any_more_is_told_at_once(cluster: None, tmp_path: Path) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gone = NodeAffinitySchedulingStrategy("0" * 56, soft=False)
    with pytest.raises(WorkerDied, match=r"could not be started: The actor is not schedulable: "):
        asyncio.run(created(tmp_path / "echo.log", scheduling_strategy=gone))


def test_an_actor_that_ray_ended_for_want_of_memory_has_died_and_says_why(tmp_path: Path) -> None:
    """Every node counts as short of memory, so Ray always ends the actor."""
    if ray.is_initialized():
        ray.shutdown()
    short = {"memory_usage_threshold": 0.0001, "memory_monitor_refresh_ms": 2000}
    start_cluster(_system_config=short)

    async def run() -> None:
        async with asyncio.timeout(LONGEST_S):
            remote = await created(tmp_path / "echo.log")
            await remote.build(PART, timeout_s=LONGEST_S)
            await remote.call("wait_for_ever")

    try:
        with pytest.raises(
            WorkerDied, match="killed due to the node running low on memory"
        ) as died:
            asyncio.run(run())
    finally:
        ray.shutdown()
    assert "Object store" not in str(died.value)
