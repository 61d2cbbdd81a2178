"""The code reward over real sandboxes and over servers that do not answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.errors import RewardError, SandboxError
from penstock.reward import VerifiableReward, build_reward
from penstock.reward.sandbox.host import find_isolation
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.types import Score
from stages.reward_samples import prompt, rollout

SUM = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}
GOOD = "print(sum(map(int, input().split())))"


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\nDone."


@pytest.fixture(autouse=True)
def needs_isolation() -> None:
    try:
        find_isolation(SandboxSettings(minimum="filtered"))
    except SandboxError as error:
        pytest.skip(str(error))


def build(**options: Any) -> VerifiableReward:
    options = {"timeout_s": 20, "sandbox": {"minimum": "filtered"}} | options
    return build_reward([RewardConfig(type="code", options=options)], max_tokens=100)


def score(text: str, tests: Any = SUM, finish_reason: str = "stop", **options: Any) -> Score:
    async def run() -> Score:
        reward = build(**options)
        try:
            made = rollout(text, finish_reason=finish_reason)
            return await reward.score(made, prompt(test_cases=tests))
        finally:
            await reward.close()

    return asyncio.run(run())


def test_all_tests_pass() -> None:
    got = score(fenced(GOOD))
    assert got == Score(1.0, {"code": 1.0, "code.share": 1.0}, True, True, "3 of 3 tests pass")


def test_all_or_nothing_and_share() -> None:
    half = fenced("print(3)")
    assert score(half).value == 0.0
    shared = score(half, credit="share", right=10.0)
    assert shared.value == pytest.approx(10 / 3)
    assert shared.answer_ok is False
    assert shared.note == "1 of 3 tests pass; test 1: printed '3'"


def test_the_last_block_or_the_whole_response() -> None:
    assert score(fenced("print(0)") + "\n" + fenced(GOOD)).value == 1.0
    assert score(GOOD, source="response").value == 1.0
    missing = score(GOOD)
    assert (missing.value, missing.format_ok, missing.note) == (
        0.0,
        False,
        "no fenced python block",
    )


def test_a_truncated_program_is_wrong_and_not_run() -> None:
    got = score(fenced(GOOD), finish_reason="length")
    assert (got.value, got.answer_ok, got.note) == (0.0, False, "truncated")


@pytest.mark.parametrize("tests", [None, {}, {"inputs": [], "outputs": []}, {"asserts": ""}])
def test_tests_that_are_not_there_are_a_failure_and_not_a_pass(tests: Any) -> None:
    for text in (fenced(GOOD), "no program"):
        with pytest.raises(RewardError, match=r"rollout task:0\.0: reward code: test_cases"):
            score(text, tests)


def test_an_unreachable_server_is_a_failure_and_not_a_zero() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        SandboxError, match=r"rollout task:0\.0: reward code: no verification server"
    ):
        score(fenced(GOOD), servers=[url], retries=0)


def test_many_at_once_and_the_same_again() -> None:
    async def run() -> list[float]:
        reward = build()
        try:
            texts = [fenced(GOOD), fenced("print(0)"), fenced("while")] * 4
            jobs = [reward.score(rollout(text), prompt(test_cases=SUM)) for text in texts]
            return [one.value for one in await asyncio.gather(*jobs)]
        finally:
            await reward.close()

    assert asyncio.run(run()) == [1.0, 0.0, 0.0] * 4


def test_closing_does_not_wait_for_a_program_that_hangs() -> None:
    async def run() -> None:
        reward = build(timeout_s=50)
        hanging = fenced("import time\ntime.sleep(60)")
        task = asyncio.create_task(reward.score(rollout(hanging), prompt(test_cases=SUM)))
        await reward.score(rollout(fenced(GOOD)), prompt(test_cases=SUM))  # by now the other runs
        await asyncio.wait_for(reward.close(), 40)
        with pytest.raises(RewardError):
            await task

    asyncio.run(run())
