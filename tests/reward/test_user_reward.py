"""A user's own function or class as a reward."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import RewardConfig
from penstock.errors import RewardError, UserError
from penstock.reward import VerifiableReward, build_reward, check, fields_read
from penstock.types import Prompt, Score
from penstock.waits import Waits
from stages.reward_samples import prompt, rollout

SOURCE = """
import numpy
import threading
from penstock.types import Score

def length(response):
    return len(response)

def with_options(rollout, prompt, *, factor=1.0):
    return factor * (rollout.text == prompt.gt_answer)

def right(response, gt_answer):
    return response == gt_answer

async def asynchronous(response, gt_answer):
    import asyncio
    await asyncio.sleep(0)
    return {"value": 0.5, "note": "half"}

def full(rollout):
    return Score(value=2.0, parts={"a": 1.0}, format_ok=True, answer_ok=False, note="n")

def of_numpy(rollout):
    one = numpy.float32(1.0)
    return {"value": one, "parts": {"a": one}, "answer_ok": numpy.bool_(True), "note": None}

def score_of_numpy(rollout):
    return Score(numpy.float32(1.0), parts=None, format_ok=numpy.bool_(False), parsed=7)

def text_as_part(rollout):
    return {"value": 1.0, "parts": {"a": "much"}}

def text_as_verdict(rollout):
    return Score(1.0, answer_ok="no")

def best_of_group(rollouts, prompt):
    longest = max(len(r.text) for r in rollouts)
    return [float(len(r.text) == longest) for r in rollouts]

async def by_responses(responses, gt_answer):
    return [r == gt_answer for r in responses]

def too_few(rollouts):
    return [1.0]

def raises(response):
    raise KeyError("no such thing")

def text(response):
    return "good"

def nan(response):
    return float("nan")

def huge(response):
    return -1e300

def thread(response):
    return threading.get_ident()

released = threading.Event()
def hangs(response):
    released.wait(60)
    return 1.0

def picky(response):
    if response == "bad":
        raise KeyError("bad")
    if response == "slow":
        released.wait(60)
    return len(response)

def needs_more(response, threshold):
    return threshold

def nothing(x):
    return x

def both(rollout, rollouts):
    return 0

def trl(prompts, completions, gt_answer, level="none", **kwargs):
    assert len(prompts) == len(gt_answer) == len(kwargs["source"]) == len(completions)
    said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert said == completions or prompts[0][-1]["role"] == "user"
    return [None if s == "skip" else float(a in s) + (l == "hard") for s, a, l in zip(said, gt_answer, level)]

async def trl_ids(completions, completion_ids, log_metric):
    log_metric("seen", 1.0)
    return [float(len(ids)) for ids in completion_ids]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "source": data_source}

async def verl_number(solution_str, ground_truth, extra_info, *, bonus=0.0, **kwargs):
    return float(solution_str in ground_truth) + extra_info["index"] + bonus

def openrlhf(queries, prompts, labels, **kwargs):
    said = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": numpy.array([float(s == a) for s, a in zip(said, labels, strict=True)])}

class Own:
    def __init__(self, factor=1.0):
        self.factor = factor
    async def score(self, rollout, prompt):
        return Score(value=self.factor)
    async def close(self):
        pass

class OwnWithoutClose:
    async def score(self, rollout, prompt):
        return 0.5

an_object = OwnWithoutClose()

class NotAReward:
    pass
"""


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("users_rewards")
    exec(SOURCE, made.__dict__)
    sys.modules["users_rewards"] = made
    yield made
    made.released.set()
    del sys.modules["users_rewards"]


def build(name: str, **options: Any) -> VerifiableReward:
    config = RewardConfig(type=f"users_rewards:{name}", options=options)
    return build_reward([config], max_tokens=10)


def score(reward: VerifiableReward, text: str = "abc", gold: str = "abc") -> Score:
    async def run() -> Score:
        try:
            return await reward.score(rollout(text), prompt(gold))
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", Score(3.0, {"length": 3.0})),
        ("with_options", Score(1.0, {"with_options": 1.0})),
        ("right", Score(1.0, {"right": 1.0}, answer_ok=True)),
        ("asynchronous", Score(0.5, {"asynchronous": 0.5}, note="half")),
        ("full", Score(2.0, {"full": 2.0, "full.a": 1.0}, True, False, "n")),
        ("Own", Score(1.0, {"Own": 1.0})),
        ("OwnWithoutClose", Score(0.5, {"OwnWithoutClose": 0.5})),
        ("an_object", Score(0.5, {"an_object": 0.5})),
    ],
)
def test_kinds_of_functions(name: str, expected: Score) -> None:
    assert score(build(name)) == expected


def test_a_function_of_a_response_does_not_look_at_the_prompt(module: types.ModuleType) -> None:
    asked = Prompt("line:1", ({"role": "assistant", "tool_calls": []},), np.zeros(1, np.int32))
    reward = build("length")

    async def run() -> Score:
        try:
            return await reward.score(rollout("abc"), asked)
        finally:
            await reward.close()

    assert asyncio.run(run()).value == 3.0


@pytest.mark.usefixtures("module")
def test_options_reach_the_function() -> None:
    assert score(build("with_options", factor=3.0)).value == 3.0
    assert score(build("Own", factor=3.0)).value == 3.0


def test_a_file_is_as_good_as_a_module(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reward(response):\n    return len(response) / 2\n")
    reward = build_reward([RewardConfig(type=f"{path}:reward")], max_tokens=10)
    assert score(reward).value == 1.5


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "values"), [("best_of_group", [0.0, 1.0]), ("by_responses", [1.0, 0.0])]
)
def test_a_group_function_sees_the_whole_group(name: str, values: list[float]) -> None:
    async def run() -> list[Score]:
        reward = build(name)
        assert reward.needs_group
        rollouts = [rollout("abc", name="g.0"), rollout("abcd", name="g.1")]
        try:
            return await reward.score_group(rollouts, [prompt("abc")] * 2)
        finally:
            await reward.close()

    assert [one.value for one in asyncio.run(run())] == values


@pytest.mark.usefixtures("module")
def test_a_group_function_is_not_called_for_one_rollout() -> None:
    with pytest.raises(RewardError, match="judges whole groups"):
        score(build("best_of_group"))


@pytest.mark.usefixtures("module")
def test_a_group_function_must_give_one_value_each() -> None:
    async def run() -> None:
        rollouts = [rollout("a", name="g.0"), rollout("b", name="g.1")]
        await build("too_few").score_group(rollouts, [prompt("a")] * 2)

    with pytest.raises(
        RewardError, match=r"rollout g\.0 to g\.1: reward too_few: got 1 scores, allowed: 2"
    ):
        asyncio.run(run())


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"rollout task:0\.0: reward raises: KeyError: 'no such thing'"),
        ("text", r"rollout task:0\.0: reward text: got 'good', allowed: a number"),
        ("nan", r"rollout task:0\.0: reward nan: got the value nan, allowed: a finite number"),
        ("huge", r"reward huge: got the value -1e\+300, allowed: a finite number, at most 1e\+18"),
        (
            "text_as_part",
            r"reward text_as_part: got \{.*'much'.*, allowed: a number, a bool, a Score",
        ),
        (
            "text_as_verdict",
            r"reward text_as_verdict: got Score.*, allowed: a number, a bool, a Score",
        ),
    ],
)
def test_faults_name_the_rollout(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(build(name))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["of_numpy", "score_of_numpy"])
def test_figures_of_numpy_become_pythons_own(name: str) -> None:
    """The journal refuses others, and the run with them."""
    judged = score(build(name))
    assert judged.value == 1.0
    assert {type(judged.value), *map(type, judged.parts.values())} == {float}
    assert {type(judged.answer_ok), type(judged.format_ok)} == {bool, type(None)}
    assert isinstance(judged.note, str)
    assert judged.parsed in (None, "7")


@pytest.mark.usefixtures("module")
def test_it_runs_off_the_event_loop() -> None:
    assert score(build("thread")).value != threading.get_ident()


@pytest.mark.usefixtures("module")
def test_a_function_that_hangs_fails_its_rollout() -> None:
    with pytest.raises(RewardError, match=r"no result after 0\.05 s \(timeout_s\)"):
        score(build("hangs", timeout_s=0.05))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("names", [["picky"], ["picky", "length"]])
def test_each_of_many_rollouts_has_its_own_outcome(names: list[str]) -> None:
    async def run() -> list[Score | BaseException]:
        configs = [RewardConfig(type=f"users_rewards:{name}") for name in names]
        reward = build_reward(configs, max_tokens=10)
        texts = ["a", "bad", "abc"]
        asked = [rollout(text, name=f"t:0.{n}") for n, text in enumerate(texts)]
        try:
            return await reward.score_each(asked, [prompt()] * len(asked))
        finally:
            await reward.close()

    first, fault, last = asyncio.run(run())
    assert isinstance(first, Score)
    assert isinstance(last, Score)
    assert [first.value, last.value] == [len(names), 3.0 * len(names)]
    assert first.parts == dict.fromkeys(names, 1.0)
    assert type(fault) is RewardError
    assert str(fault).startswith("rollout t:0.1: reward picky: KeyError: 'bad'")


@pytest.mark.usefixtures("module")
def test_each_call_is_a_wait_until_its_answer_or_a_stop() -> None:
    async def run() -> tuple[list[str], list[str]]:
        waits = Waits()
        config = RewardConfig(type="users_rewards:picky")
        reward = build_reward([config], max_tokens=10, waits=waits)
        answered = asyncio.Event()
        waits.on_close(lambda wait: answered.set())
        asked = [rollout("slow", name="a"), rollout("quick", name="b")]
        scoring = asyncio.create_task(reward.score_each(asked, [prompt()] * 2))
        await answered.wait()
        left = [wait.detail for wait in waits.leaves()]
        scoring.cancel()
        await asyncio.wait([scoring])
        await asyncio.sleep(0)  # the call that the stop cancelled closes its wait
        await reward.close()
        return left, [wait.detail for wait in waits.open.values()]

    assert asyncio.run(run()) == (["a"], [])


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("with_options", {"facto": 1}, "unknown option 'facto'.*did you mean factor?"),
        ("length", {"timeout_s": 0}, "timeout_s: got 0, allowed: a number above 0"),
        ("nothing", {}, r"got a function of \(x\), allowed: .*response.*completions.*solution_str"),
        ("both", {}, "allowed: one kind"),
        ("Own", {"facto": 1}, "unknown option 'facto'"),
        ("NotAReward", {}, "a class with `async def score"),
        ("absent", {}, "has no 'absent'"),
    ],
)
def test_mistakes_are_told_before_the_run(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check([RewardConfig(type=f"users_rewards:{name}", options=options)])


def a_prompt(gold: str | None = "2", **extra: Any) -> Prompt:
    messages = ({"role": "user", "content": "1+1"},)
    return Prompt("p:1", messages, np.ones(1), gt_answer=gold, extra=extra)


def score_all(name: str, texts: list[str], asked: Prompt, *, is_chat: bool = False) -> list[Score]:
    async def run() -> list[Score]:
        config = RewardConfig(type=f"users_rewards:{name}")
        reward = build_reward([config], max_tokens=10, is_chat=is_chat)
        return await reward.score_group([rollout(text) for text in texts], [asked] * len(texts))

    return asyncio.run(run())


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_function_in_the_shape_of_trl(is_chat: bool) -> None:
    asked = a_prompt(level="hard", source="x")
    scores = score_all("trl", ["it is 2", "3", "skip"], asked, is_chat=is_chat)
    assert [score.value for score in scores] == [2.0, 1.0, 0.0]
    assert scores[2].note == "not judged"  # TRL's None: this reward says nothing of the response
    assert [score.value for score in score_all("trl_ids", ["a", "b"], asked)] == [0.0, 0.0]


@pytest.mark.usefixtures("module")
def test_a_function_in_the_shape_of_verl() -> None:
    asked = a_prompt(data_source="sums", extra_info={"index": 3})
    right, wrong = score_all("verl", ["2", "3"], asked)
    assert (right.value, right.answer_ok, wrong.value, wrong.answer_ok) == (1.0, True, 0.0, False)
    several = a_prompt(None, reward_model={"ground_truth": ["2", "two"]}, extra_info={"index": 3})
    (score,) = score_all("verl_number", ["two"], several)
    assert score.value == 4.0  # the answer keeps the type that it has in verl's layout


@pytest.mark.usefixtures("module")
def test_a_function_in_the_shape_of_openrlhf() -> None:
    assert [score.value for score in score_all("openrlhf", ["2", "3"], a_prompt())] == [1.0, 0.0]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("length", {}),
        ("right", {"gt_answer": "right"}),
        ("needs_more", {"threshold": "needs_more"}),
        ("trl", {"gt_answer": "trl"}),
        ("verl", {"gt_answer": "verl"}),
        ("openrlhf", {"gt_answer": "openrlhf"}),
    ],
)
def test_the_fields_that_a_reward_reads_are_known(name: str, fields: dict[str, str]) -> None:
    assert fields_read([RewardConfig(type=f"users_rewards:{name}")]) == fields


def test_an_object_with_score_is_a_reward(module: types.ModuleType) -> None:
    module.made = module.Own(factor=3.0)
    assert score(build("made")).value == 3.0
    with pytest.raises(UserError, match="unknown option 'factor'"):
        build("made", factor=1.0)
