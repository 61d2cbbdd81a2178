"""A run whose reward is a judge, from the command to the journal, and a check whose judge does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.run.session import model_config
from penstock.store.run_folder import RunFolder
from stages.command_runs import penstock, train
from stages.judge_server import JudgeServer
from stages.judging_engine import JUDGING_ENGINE
from stages.tiny_run import TINY, digests


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


@pytest.mark.slow
def test_the_words_of_the_judge_teach_and_forks_need_no_judge(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The policy learns from itself with `{feedback}`, which replay and forks read from the journal."""
    where = [f"run.dir={tmp_path}", "produce.strategy=sync", "train.steps=2"]
    itself = ["teachers.self.path=policy", "algorithm.teacher=self"]
    template = "tasks.train.teacher_template='{prompt} {feedback}'"
    with served_judge() as server:
        first = [*where, "run.name=judged", rewards(server.url), *itself, template]
        assert penstock("train", *TINY, *first, "algorithm.name=distill") == 0
    judged = str(tmp_path / "judged")
    assert penstock("replay", judged) == 0
    assert capfd.readouterr().out.count("  equal") == 2

    def fork(name: str, word: str) -> list[str]:
        words = [f"run.dir={tmp_path}", f"run.name={name}", word]
        assert penstock("replay", judged, *words) == 0, capfd.readouterr().out
        return digests(RunFolder(tmp_path / name))

    assert fork("again", template) == digests(RunFolder(tmp_path / "judged"))
    without = "tasks.train.teacher_template='{prompt} '"
    assert fork("without", without) != digests(RunFolder(tmp_path / "judged"))


def test_a_check_says_in_one_line_that_the_judge_does_not_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    dead = rewards("http://127.0.0.1:9", ", retries=0")
    assert penstock("check", *TINY, dead) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "judge" in line]
    assert len(lines) == 1
    assert "reward judge: no judge answered after 1 attempts" in lines[0]


def test_the_engines_of_the_run_can_judge_its_own_groups(tmp_path: Path) -> None:
    """A rank of the group by its policy: the longest response of each group has the best reward."""
    options = "model='policy', rubric='Longer is better.', mode='rank', max_tokens=16"
    run = train(
        tmp_path,
        "own",
        f"engine.name={JUDGING_ENGINE}",
        "train.steps=2",
        "sampling.num_generations=3",
        f"tasks.train.rewards=[{{type='judge', options={{{options}}}}}]",
    )
    assert run.code == 0, run.told
    with run.journal() as journal:
        groups = [group for step in (1, 2) for group in journal.batch(step).groups]
    assert len(groups) == 4
    for group in groups:
        by_reward = sorted(group.rollouts, key=lambda rollout: -rollout.reward)
        assert [rollout.reward for rollout in by_reward] == [1.0, 0.5, 0.0]
        lengths = [len(rollout.text) for rollout in by_reward]
        assert lengths == sorted(lengths, reverse=True)
        assert all("I counted." in (r.score.note if r.score else "") for r in group.rollouts)


@pytest.mark.slow
def test_a_policy_that_gives_no_verdict_fails_the_group(tmp_path: Path) -> None:
    options = "model='policy', rubric='Even is good.', max_tokens=16"
    rewards_of_policy = f"tasks.train.rewards=[{{type='judge', options={{{options}}}}}]"
    run = train(tmp_path, "mute", "train.steps=1", "produce.max_tries=1", rewards_of_policy)
    assert run.code == 1
    assert "groups failed" in run.told
    assert "reward judge: " in run.told
    assert "Traceback" not in run.told


def test_a_run_that_is_served_as_a_judge_gets_no_log_into_its_folder(tmp_path: Path) -> None:
    run = train(tmp_path, "earlier", "train.steps=1")
    config = model_config(str(run.folder.path), [])
    assert Path(config.model.path).is_relative_to(run.folder.path)
    assert config.run.name != "earlier"
    assert model_config(str(run.folder.path), ["run.name=judge"]).run.name == "judge"
