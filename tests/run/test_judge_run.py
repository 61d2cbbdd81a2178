"""A run whose reward is a judge, from the command to the journal, and a check whose judge does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages.command_runs import penstock
from stages.judge_server import JudgeServer
from stages.tiny_run import TINY


@contextmanager
def served_judge() -> Iterator[JudgeServer]:
    """A judge in a thread of its own, which prefers responses with an even number of characters."""

    def answer(word: str, material: dict[str, Any]) -> str:
        return f"I counted.\n{word} {(len(material['response']) + 1) % 2}"

    server, loop = JudgeServer(answer), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def rewards(url: str, more: str = "") -> str:
    options = f"url='{url}', model='m', rubric='Even is good.'{more}"
    return f"tasks.train.rewards=[{{type='judge', options={{{options}}}}}]"


def test_the_words_of_the_judge_are_journalled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = [f"run.dir={tmp_path}", "run.name=judged", "train.steps=2"]
    with served_judge() as server:
        assert penstock("train", *TINY, *where, rewards(server.url)) == 0
        assert len(server.bodies) >= 8
    capfd.readouterr()
    assert penstock("rollouts", str(tmp_path / "judged")) == 0
    assert "I counted." in capfd.readouterr().out


def test_a_check_says_in_one_line_that_the_judge_does_not_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    dead = rewards("http://127.0.0.1:9", ", retries=0")
    assert penstock("check", *TINY, dead) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "judge" in line]
    assert len(lines) == 1
    assert "reward judge: no judge answered after 1 attempts" in lines[0]
