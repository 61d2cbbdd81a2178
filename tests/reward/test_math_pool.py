"""Symbolic comparisons never hang, and their workers come and go as needed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.config import RewardConfig
from penstock.errors import RunError
from penstock.reward import build_reward
from penstock.reward.line_process import LineProcess, ProcessGone, ProcessPool, ProcessSlow
from penstock.reward.math_answer import MathPool
from stages.own_children import own_children
from stages.reward_samples import prompt, rollout, tagged

TOWER = "9^{9^{9^{9^{9}}}}"


def workers() -> list[int]:
    """The processes that compare."""
    return [
        pid
        for pid in own_children()
        if b"penstock.reward.math_answer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_hostile_answers_cost_one_time_out_and_the_pool_goes_on() -> None:
    async def run() -> None:
        pool = MathPool(1, timeout_s=1.0)
        try:
            assert (await pool.compare("x+1", "1+x")).equal
            (first,) = workers()
            slow = await pool.compare("42", TOWER)
            assert (slow.equal, slow.note) == (False, "comparison took more than 1 s")
            assert workers() == []
            assert (await pool.compare("2x", "x+x")).equal
            (second,) = workers()
            assert second != first
            os.kill(second, signal.SIGKILL)  # as the kernel does when memory is short
            assert (await pool.compare("3x", "x+2x")).equal
            assert len(workers()) == 1
        finally:
            await pool.close()
        assert workers() == []

    asyncio.run(run())


@pytest.mark.slow
def test_a_comparison_is_remembered() -> None:
    async def run() -> None:
        pool = MathPool(1, timeout_s=20)
        first = await pool.compare("x+1", "1+x")
        await pool.close()  # a second comparison would need a worker
        assert await pool.compare("x+1", "1+x") is first

    asyncio.run(run())


def test_plain_numbers_start_no_worker() -> None:
    async def run() -> None:
        reward = build_reward([RewardConfig()], max_tokens=10)
        texts = ["41", "42", "x", "", "forty", "4 2", "$42", "42 apples", "1,000", "0.5", "--", "?"]
        for text in texts:
            await reward.score(rollout(tagged(text)), prompt("42"))
        assert workers() == []
        await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("input(); raise SystemExit('no more')", ProcessGone, "the worker ended: no more"),
        ("input()\nwhile True: pass", ProcessSlow, "the worker: no answer after 0.1 s"),
        ("input(); print('x')", ProcessGone, "the worker wrote no answer: Expecting value"),
    ],
)
def test_a_process_that_fails_says_how_and_is_killed(
    program: str, error: type[Exception], words: str
) -> None:
    async def run() -> None:
        process = await LineProcess.start([sys.executable, "-c", program], "the worker")
        with pytest.raises(error, match=words):
            await process.ask("x", 0.1, processor_time=True)
        assert not process.is_alive

    asyncio.run(run())


def test_a_process_that_does_not_start_says_why() -> None:
    async def run() -> None:
        command = [sys.executable, "-c", "1/0"]
        pool = ProcessPool(command, 1, name="it", start_timeout_s=60)
        async with pool.lend():
            pass

    with pytest.raises(RunError, match="it does not start: ZeroDivisionError: division by zero"):
        asyncio.run(run())
