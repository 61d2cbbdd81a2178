"""The agents that ship: tools (functions, TRL's environment class) and gym (reset and step over text)."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.config import SamplingConfig, TaskConfig
from penstock.errors import UserError
from penstock.rollout.agent.build import check_agent
from penstock.rollout.agent.gym import Environment
from penstock.rollout.agent.gym import make as make_gym
from penstock.rollout.agent.inside import result_text
from penstock.rollout.agent.tools import make as make_tools
from penstock.store.journal.calls import ToolResult
from penstock.types import Status
from stages.agent_parts import play, tool_call
from stages.chat_policy import NO_END

FILE = '''
class Calculator:
    """TRL's form: reset, tools, get_reward."""

    def reset(self, number, **row):
        self.results = []
        return f" (number {number})"

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: the first
            b: the second
        """
        self.results.append(a + b)
        return a + b

    def get_reward(self) -> float:
        return float(sum(self.results))


def double(a: int) -> int:
    """
    Double a number.

    Args:
        a: the number
    """
    return 2 * a


def untyped(a):
    return a


class Guess:
    """Higher, lower; the reward comes at the end."""

    def reset(self, seed=0):
        self.secret = 7
        return "guess 1 to 9"

    def step(self, action):
        guess = int(action)
        if guess == self.secret:
            return "right", 1.0, True
        return ("higher" if guess < self.secret else "lower"), -0.25, False
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calc.py"
    path.write_text(FILE)
    return path


def test_trls_environment_class_is_used_as_it_is(file: Path) -> None:
    function = make_tools("o", {"env": f"{file}:Calculator"})
    rollout, kept, prompts = play(
        function,
        tool_call("add", a=1, b=2) + tool_call("add", a=3, b=4),
        tool_call("add", a=5, b=5),
        "done",
    )
    assert rollout.error == ""
    assert (rollout.reward, rollout.extra["turns"], rollout.text) == (20.0, 3, "done")
    assert "question 0 (number 0)<eos>" in prompts[0]
    assert '"name": "add"' in prompts[0]
    assert prompts[1].endswith("<turn>tool\n3<eos><turn>tool\n7<eos><turn>assistant\n")
    assert [what for what, _ in kept.tools] == ["begun", "done"] * 3


def test_a_tool_that_raises_or_is_unknown_tells_the_policy(file: Path) -> None:
    function = make_tools("o", {"env": f"{file}:Calculator"})
    rollout, kept, prompts = play(
        function, tool_call("add", a=1), tool_call("sub", a=1, b=2), "done"
    )
    assert (rollout.reward, rollout.status) == (0.0, Status.COMPLETED)
    assert "missing 1 required positional argument" in prompts[1]
    assert "no tool sub; there are add" in prompts[2]
    assert [what for what, _ in kept.tools] == ["begun", "failed"]


def test_results_that_json_does_not_know_reach_the_policy() -> None:
    """Else the policy is told of a TypeError at every call, and the user of nothing."""
    assert result_text(np.int64(5)) == "5"
    assert result_text({"a": np.array([1, 2]), "b": np.bool_(True)}) == '{"a": [1, 2], "b": true}'
    assert result_text(b"ab\xff") == '"ab\ufffd"'
    assert result_text([Path("x")]) == '["x"]'


def test_a_property_of_an_environment_is_not_read_before_its_reset(file: Path) -> None:
    begin = "    def reset(self, number"
    last = "    @property\n    def last(self):\n        return [][0]\n\n"
    file.write_text(file.read_text().replace(begin, last + begin))
    function = make_tools("o", {"env": f"{file}:Calculator"})
    rollout, _, _ = play(function, tool_call("add", a=1, b=2), "done")
    assert (rollout.error, rollout.reward) == ("", 3.0)


def test_functions_are_tools_and_turns_are_bounded(file: Path) -> None:
    function = make_tools("o", {"functions": [f"{file}:double"]})
    rollout, _, _ = play(function, tool_call("double", a=4), tool_call("double", a=8), max_turns=2)
    assert rollout.error == (
        "agent: it returned None and the task has no rewards, allowed: a number, a bool, a dict with "
        "the fields of a score, or rewards in the config"
    )
    env = make_tools("o", {"env": f"{file}:Calculator"})
    rollout, _, _ = play(env, tool_call("add", a=1, b=1), tool_call("add", a=1, b=1), max_turns=2)
    assert (rollout.reward, rollout.finish_reason) == (4.0, "length")


def test_a_template_without_tools_gets_them_as_text(file: Path) -> None:
    function = make_tools("o", {"env": f"{file}:Calculator"})
    rollout, _, prompts = play(function, tool_call("add", a=1, b=2), "done", template=NO_END)
    assert rollout.reward == 3.0
    assert 'Tools:\n{"type": "function"' in prompts[0]
    assert "<tool_response>3</tool_response>" in prompts[1]
    assert len(rollout.rows) == 2  # no end token: each turn is a row


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "allowed: one of"),
        ({"env": "calc.py:Calculator", "functions": ["a:b"]}, "allowed: one of"),
        ({"functions": ["FILE:untyped"]}, "types and a docstring"),
        ({"env": "FILE:untyped"}, r"o\.env: got '.*:untyped', which is no class, allowed: a class"),
    ],
)
def test_tools_that_cannot_be_described_are_refused(file: Path, options, words) -> None:
    given = json.loads(json.dumps(options).replace("FILE", str(file)))
    with pytest.raises(UserError, match=words):
        make_tools("o", given)
    task = TaskConfig(agent="tools", agent_options={"env": f"{file}:Calculator", "colour": 1})
    with pytest.raises(UserError, match="colour: got 1, allowed: the keys timeout_s, "):
        check_agent("tasks.t", task, SamplingConfig())


def test_a_game_is_played_to_its_end_and_its_rewards_add_up(file: Path) -> None:
    function = make_gym("o", {"env": f"{file}:Guess"})
    rollout, kept, prompts = play(function, "5", "8", "7")
    assert (rollout.error, rollout.reward, len(rollout.rows)) == ("", 0.5, 1)
    shown = re.findall(r"<turn>user\n(.*?)<eos>", prompts[-1])
    assert shown == ["question 0", "guess 1 to 9", "higher", "lower"]
    assert kept.tools[-1] == ("done", '["right", 1.0, true]')


@pytest.mark.parametrize(
    ("recorded", "error"), [("higher", ""), ("lower", "the environment is not deterministic")]
)
def test_a_game_is_rebuilt_after_a_crash_and_every_observation_compared(
    file: Path, recorded: str, error: str
) -> None:
    before = ToolResult(
        call_id="step0", name="step", outcome="done", result=json.dumps([recorded, -0.25, False])
    )
    function = make_gym("o", {"env": f"{file}:Guess"})
    rollout, _, _ = play(function, "5", "7", interrupted=[before])
    assert error in rollout.error
    assert (rollout.status is Status.COMPLETED) == (error == "")


class TextArena:
    def reset(self, num_players: int, seed: int) -> None:
        self.last = f"{num_players} player"

    def get_observation(self) -> tuple[int, str]:
        return 0, self.last

    def step(self, action: str) -> tuple[bool, dict]:
        self.last += action * 2  # as TextArena does: everything so far
        return action == "end", {}

    def close(self) -> tuple[dict[int, float], dict]:
        return {0: 0.75}, {}


class Gem:
    def reset(self, seed: int) -> tuple[str, dict]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return action * 2, 0.75, False, action == "end", {}


class SkyRL:
    def init(self, prompt: list) -> tuple[list, dict]:
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, action: str) -> dict:
        return {"observations": [{"content": action * 2}], "reward": 0.75, "done": action == "end"}


class OpenEnv:
    async def reset(self) -> Any:
        return SimpleNamespace(text="begin")

    async def step(self, action: str) -> Any:
        seen = SimpleNamespace(content=action * 2)
        return SimpleNamespace(observation=seen, reward=0.75, done=action == "end")


async def at_once(function: Callable[[], Any]) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize(
    ("kind", "first"),
    [(TextArena, "1 player"), (Gem, "seed 3"), (SkyRL, "begin"), (OpenEnv, "begin")],
)
def test_four_forms_of_environment_are_understood(kind: type, first: str) -> None:
    async def main() -> None:
        environment = Environment(kind(), at_once)
        task: Any = SimpleNamespace(messages=[], gt_answer=None, extra={})
        assert [message["content"] for message in await environment.start(task, 3)] == [first]
        step = await environment.step("ab")
        assert (step.observation, step.done) == ("abab", False)
        step = await environment.step("end")
        assert (step.reward, step.done) == (0.75, True)

    asyncio.run(main())


SLOW = """
import threading


class Slow:
    def __init__(self, at="__init__"):
        self.at = at
        self._wait("__init__")

    def _wait(self, name):
        if name == self.at:
            threading.Event().wait(3)

    def reset(self, seed=0):
        self._wait("reset")
        return "begin"

    def step(self, action: str):
        '''
        Step.

        Args:
            action: any
        '''
        self._wait("step")
        return "end", 1.0, True

    def get_reward(self) -> float:
        self._wait("get_reward")
        return 1.0

    def close(self):
        self._wait("close")


class SlowToReset(Slow):
    def __init__(self):
        super().__init__("reset")


class SlowToReward(Slow):
    def __init__(self):
        super().__init__("get_reward")


class SlowToClose(Slow):
    def __init__(self):
        super().__init__("close")
"""


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((make_gym, {"env_options": {"at": at}}) for at in ("__init__", "reset", "step", "close")),
        *((make_tools, {"kind": kind}) for kind in ("", "ToReset", "ToReward", "ToClose")),
    ],
)
def test_no_method_of_an_environment_keeps_the_driver_waiting(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    env = f"{tmp_path / 'slow.py'}:Slow{options.pop('kind', '')}"
    limits = {"tool_timeout_s": 0.05, "turn_timeout_s": 1.0}
    rollout, _, _ = play(make("o", {"env": env, **options}), "go", "go", **limits)
    assert rollout.error == "agent: TimeoutError: no result after 0.05 s (tool_timeout_s)"


def test_a_tool_may_have_an_argument_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        'def look(function: str) -> str:\n    """Look.\n\n    Args:\n        function: its name\n    """\n'
        '    return f"saw {function}"\n'
    )
    agent = make_tools("o", {"functions": [f"{tmp_path / 'tools.py'}:look"]})
    _, _, prompts = play(agent, tool_call("look", function="sin"), "done", reward=True)
    assert "saw sin" in prompts[1]
