"""reasoning-gym problems: generated from a seed, split by question, judged by their generator."""

from __future__ import annotations

import importlib.util
import json

import pytest

from penstock.config import RewardConfig, TaskConfig
from penstock.data import load_dataset, reasoning_gym, validate_source
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


def questions(name: str, **options: object) -> set[str]:
    records = reasoning_gym.load(name, options, seed=0)
    return {record["messages"][0]["content"] for record in records}


@pytest.mark.slow
def test_same_seed_same_problems_other_seed_others() -> None:
    first = reasoning_gym.load("reasoning_gym:leg_counting", {"size": 5}, seed=3)
    again = reasoning_gym.load("reasoning_gym:leg_counting", {"size": 5}, seed=3)
    by_option = reasoning_gym.load("reasoning_gym:leg_counting", {"size": 5, "seed": 3}, seed=9)
    other = reasoning_gym.load("reasoning_gym:leg_counting", {"size": 5}, seed=4)
    assert first == again == by_option
    assert first != other
    assert len(first) == 5


def test_heldout_questions_are_never_training_questions() -> None:
    """Small numbers, so that two seeds would surely share questions without the split."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = questions("reasoning_gym:basic_arithmetic", size=400, seed=1, **options)
    heldout = questions("reasoning_gym:basic_arithmetic:heldout", size=40, seed=2, **options)
    assert heldout
    assert not train & heldout


def test_a_dataset_of_generated_problems() -> None:
    task = TaskConfig(data="reasoning_gym:basic_arithmetic", data_options={"size": 4})
    validate_source("train", task)
    dataset = load_dataset("train", task, ChatTemplate(load_tokenizer("demo")), seed=0)
    assert len(dataset) == 4
    prompt = dataset[0]
    assert prompt.prompt_id.startswith("train:1@")
    assert prompt.gt_answer
    assert prompt.extra["reasoning_gym"] == "basic_arithmetic"
    json.dumps(prompt.extra)


def test_the_generators_own_verdict() -> None:
    task = TaskConfig(
        data="reasoning_gym:graph_color",  # many right colourings: it gives no answer of its own
        data_options={"size": 1},
        rewards=[RewardConfig(type="penstock.data.reasoning_gym:score")],
        max_prompt_tokens=10_000,
    )
    prompt = load_dataset("train", task, ChatTemplate(load_tokenizer("demo")), seed=0)[0]
    assert prompt.gt_answer is None
    colours = json.dumps(prompt.extra["metadata"]["possible_answer"])
    assert reasoning_gym.score(f"<think></think><answer>{colours}</answer>", prompt) == 1.0
    assert reasoning_gym.score("<answer>none</answer>", prompt) < 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:leg_countin", {}, "did you mean reasoning_gym:leg_counting"),
        ("reasoning_gym:leg_counting:test", {}, "with :train or :heldout"),
        ("reasoning_gym:leg_counting", {"sise": 3}, "allowed: settings of that generator"),
        ("reasoning_gym:leg_counting", {"min_animals": -3}, "allowed: settings of that generator"),
    ],
)
def test_mistakes_are_named_before_the_run(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        validate_source("train", TaskConfig(data=name, data_options=options))


def test_a_generator_without_enough_questions_is_named() -> None:
    options = {"size": 2, "min_n": 1, "max_n": 3}  # three questions, none on the held-out side
    with pytest.raises(UserError, match=r"data_options.size .*got 2, allowed: at most 0"):
        reasoning_gym.load("reasoning_gym:count_bits:heldout", options, seed=0)


@pytest.mark.parametrize("size", [0, -1, "many", True])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    task = TaskConfig(data="reasoning_gym:leg_counting", data_options={"size": size})
    with pytest.raises(UserError, match=r"data_options.size"):
        validate_source("train", task)
