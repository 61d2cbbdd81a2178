"""Symbolic comparisons never hang, and their workers come and go as needed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from penstock.config import RewardConfig
from penstock.errors import RewardError
from penstock.reward import build_reward
from penstock.reward.line_process import LineProcess, ProcessGone, ProcessSlow
from penstock.reward.math_pool import MathPool
from stages.reward_samples import prompt, rollout, tagged

TOWER = "9^{9^{9^{9^{9}}}}"


def test_hostile_answers_cost_one_time_out_and_the_pool_goes_on() -> None:
    async def run() -> None:
        pool = MathPool(1, timeout_s=1.0)
        try:
            assert (await pool.compare("x+1", "1+x")).equal
            first = pool._idle[0]
            slow = await pool.compare("42", TOWER)
            assert (slow.equal, slow.note) == (False, "comparison took more than 1 s")
            assert len(pool._alive) == 0
            assert (await pool.compare("2x", "x+x")).equal
            second = pool._idle[0]
            assert second is not first
            os.kill(second._process.pid, signal.SIGKILL)  # as the kernel does when memory is short
            assert (await pool.compare("3x", "x+2x")).equal
            assert len(pool._alive) == 1
        finally:
            await pool.close()
        assert len(pool._alive) == 0

    asyncio.run(run())


def test_a_comparison_is_remembered() -> None:
    async def run() -> None:
        pool = MathPool(1, timeout_s=20)
        try:
            first = await pool.compare("x+1", "1+x")
            pool._idle[0].kill()  # a second comparison would notice
            assert await pool.compare("x+1", "1+x") is first
        finally:
            pool._alive.clear()
            await pool.close()

    asyncio.run(run())


def test_plain_numbers_start_no_worker() -> None:
    async def run() -> None:
        reward = build_reward([RewardConfig()], max_tokens=10)
        texts = ["41", "42", "x", "", "forty", "4 2", "$42", "42 apples", "1,000", "0.5", "--", "?"]
        for text in texts:
            await reward.score(rollout(tagged(text)), prompt("42"))
        assert len(reward.parts[0].reward._pool._alive) == 0  # type: ignore[attr-defined]
        await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print('ready', flush=True); input(); raise SystemExit", ProcessGone),
        ("print('ready', flush=True); input()\nwhile True: pass", ProcessSlow),
    ],
)
def test_a_process_that_ends_or_hangs_is_told_apart(program: str, error: type[Exception]) -> None:
    process = LineProcess([sys.executable, "-c", program], 60)
    try:
        with pytest.raises(error):
            process.ask("x", 0.1, processor_time=True)
    finally:
        process.kill()


def test_a_process_that_does_not_start_says_why() -> None:
    with pytest.raises(RewardError, match="does not start: ZeroDivisionError: division by zero"):
        LineProcess([sys.executable, "-c", "1/0"], 60)
