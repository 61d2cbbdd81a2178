"""A part in a worker process: calls, errors, stops and the end of the worker."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PartFailed, UserError, WorkerDied
from penstock.workers.processes import process_worker
from penstock.workers.processes.process_worker import ProcessWorker
from stages.echo import ECHO


def with_echo(tmp_path: Path, act: Any, greeting: str = "hello") -> Any:
    async def run() -> Any:
        remote = await ProcessWorker.start(
            "echo",
            ECHO,
            greeting,
            log_path=tmp_path / "echo.log",
            threads=1,
            timeout_s=60,
        )
        try:
            return await act(remote)
        finally:
            await remote.close()

    return asyncio.run(run())


def test_calls_are_answered_in_any_order(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> list[str]:
        return await asyncio.gather(remote.call("greet", "a"), remote.call("greet_async", "b"))

    assert with_echo(tmp_path, act) == ["hello a", "hello b"]


def test_an_error_there_is_an_error_here_and_the_worker_lives_on(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> str:
        with pytest.raises(PartFailed, match=r"^echo: KeyError: 'missing' \(traceback: .*echo.log"):
            await remote.call("fail")
        with pytest.raises(PartFailed, match=r"^echo: Local: cannot be pickled"):
            await remote.call("fail_strangely")
        return await remote.call("greet", "still")

    assert with_echo(tmp_path, act) == "hello still"
    assert "in fail_strangely" in (tmp_path / "echo.log").read_text()


def test_a_stop_reaches_a_busy_worker(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> str:
        waiting = asyncio.create_task(remote.call("wait_for_stop"))
        await remote.call("request_stop")
        return await waiting

    assert with_echo(tmp_path, act) == "stopped"


def test_death_fails_every_waiting_and_every_later_call(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> None:
        waiting = asyncio.create_task(remote.call("wait_for_stop"))
        await remote.call("greet_async", "is up")
        os.kill(remote.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="echo"):
            await waiting
        with pytest.raises(WorkerDied, match="has ended"):
            await remote.call("greet", "anyone")

    with_echo(tmp_path, act)


def test_a_part_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    async def never(remote: ProcessWorker) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(UserError, match="allowed: anything else"):
        with_echo(tmp_path, never, greeting="refuse")


def test_closing_leaves_no_process(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> int:
        return remote.pid

    pid = with_echo(tmp_path, act)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("method", ["block_the_loop", "block_every_thread"])
def test_a_blocked_worker_still_shows_its_stack(tmp_path: Path, method: str) -> None:
    async def act(remote: ProcessWorker) -> str:
        blocked = asyncio.create_task(remote.call(method))
        while method not in (text := await remote.stack()):
            pass  # the call has not begun yet
        assert (await remote.activity() or 0) > 0
        await remote.kill()
        await asyncio.gather(blocked, return_exceptions=True)
        return text

    text = with_echo(tmp_path, act)
    assert "Thread 0x" in text  # all of them: the last line was waited for


def test_a_stopped_worker_is_told_at_once(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> tuple[int, str]:
        os.kill(remote.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, remote.pid, os.WSTOPPED | os.WNOWAIT)
        text = await remote.stack()
        await remote.kill()
        return remote.pid, text

    pid, text = with_echo(tmp_path, act)
    assert text == f"(its process is stopped: kill -CONT {pid} lets it go on)"


def test_progress_is_told_while_a_call_runs(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> int:
        waiting = asyncio.create_task(remote.call("wait_for_stop"))
        await remote.call("until_waiting")
        told = await remote.call("progress")
        await remote.call("request_stop")
        await waiting
        return told

    assert with_echo(tmp_path, act) == 7


def test_a_death_is_told_although_the_log_is_gone(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> str:
        (tmp_path / "echo.log").unlink()
        with pytest.raises(WorkerDied, match=r"echo: .* \(log: .*echo.log: No such file"):
            await asyncio.wait_for(remote.call("die"), 60)
        return await asyncio.wait_for(remote.ended(), 60)

    assert "No such file" in with_echo(tmp_path, act)


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_call(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> str:
        with pytest.raises(PartFailed, match=r"echo: .*pickle"):
            await asyncio.wait_for(remote.call("unsendable"), 60)
        return await remote.call("greet", "still")

    assert with_echo(tmp_path, act) == "hello still"


def test_an_answer_that_cannot_be_read_ends_the_worker(tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> str:
        with pytest.raises(WorkerDied, match="its answer cannot be read: ValueError"):
            await asyncio.wait_for(remote.call("unreadable"), 60)
        return await asyncio.wait_for(remote.ended(), 60)

    assert "its answer cannot be read" in with_echo(tmp_path, act)


@pytest.mark.parametrize("end", ["close", "kill", "die"])
def test_processes_that_a_worker_started_end_with_it(end: str, tmp_path: Path) -> None:
    async def act(remote: ProcessWorker) -> int:
        started = os.pidfd_open(await remote.call("start_process"))
        if end == "die":
            with pytest.raises(WorkerDied):
                await asyncio.wait_for(remote.call("die"), 60)
        else:
            await getattr(remote, end)()
        return started

    handle = with_echo(tmp_path, act)
    try:
        assert select.select([handle], [], [], 60)[0], "it still runs"
    finally:
        os.close(handle)


def test_workers_keep_freed_memory_for_a_second_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    assert process_worker._worker_environment(2)["MIMALLOC_PURGE_DELAY"] == "1000"
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "0")
    assert process_worker._worker_environment(2)["MIMALLOC_PURGE_DELAY"] == "0"
