"""An agent is evaluated: each problem is a rollout, its tree is saved, a failure is tried again."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SamplingConfig
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import EnginesLost
from penstock.rollout.evaluation.evaluate import TRIES, EvalResult, EvalTask, evaluate
from penstock.types import Prompt
from stages.agent_parts import make_agent
from stages.chat_policy import ScriptedEngine, chat_template, user
from stages.rewards import CountingReward


async def twice(task: Any, model: Any) -> bool:
    said = await model.chat(task.messages)
    said = await model.chat([*task.messages, said, user("sure?")])
    return said["content"] == task.gt_answer


def evaluated(function: Any, folder: Path, engine: Any = None, size: int = 1) -> EvalResult:
    chat = chat_template()
    prompts = [
        Prompt(f"p:{n}", (user(str(n)),), chat.encode([user(str(n))]), gt_answer="yes" if n else "")
        for n in range(3)
    ]
    task = EvalTask(
        name="held",
        problems=prompts,
        reward=CountingReward(),
        sampling=SamplingConfig(max_tokens=20),
        num_generations=size,
        decode=chat.decode,
        seed=0,
        agent=partial(make_agent, function, timeout_s=60),
    )
    engine = engine or ScriptedEngine(lambda prompt: "yes", version=2)
    return asyncio.run(evaluate(engine, task, step=5, version=2, folder=folder))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "held-step-5.jsonl").read_text().splitlines()]


def test_every_problem_is_a_rollout_of_the_agent_and_its_tree_is_saved(tmp_path: Path) -> None:
    result = evaluated(twice, tmp_path, size=2)
    assert (result.accuracy, result.samples, result.failures) == (pytest.approx(2 / 3), 6, 0)
    assert result.turns == 2
    assert result.response_length == 2 * len("yes.")  # with the end token; no observation
    assert result.metrics()["eval/held/turns"] == 2
    for line in lines(tmp_path):
        assert [call["parent"] for call in line["calls"]] == [None, 0]
        assert line["calls"][1]["messages"] == [user("sure?")]
        assert line["prediction"] == "yes"


def test_a_rollout_that_fails_is_made_again_and_then_counted(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    async def flaky(task: Any, model: Any) -> float:
        number = tries[task.prompt_id] = tries.get(task.prompt_id, 0) + 1
        await model.chat([user(str(number))])
        if task.prompt_id == "p:0" or (task.prompt_id == "p:1" and number == 1):
            raise ValueError("its world is gone")
        return 1.0

    result = evaluated(flaky, tmp_path)
    assert tries == {"p:0": TRIES, "p:1": 2, "p:2": 1}
    assert (result.failures, result.reward) == (1, pytest.approx(2 / 3))
    failed, again, _ = lines(tmp_path)
    assert failed["error"].startswith("agent: ValueError: its world is gone (")
    assert [call["messages"] for call in again["calls"]] == [[user("2")]]  # of the last try


def test_the_loss_of_all_engines_ends_the_evaluation_instead_of_wrong_answers(
    tmp_path: Path,
) -> None:
    class Dead(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Generation:
            raise EnginesLost("no engine is left")

    with pytest.raises(EnginesLost):
        evaluated(twice, tmp_path, Dead(lambda prompt: ""))
    assert not list(tmp_path.iterdir())
