"""`penstock generate`: samples of the demo policy with log-probs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import cli
from penstock.config import Config
from penstock.data.chat import ChatTemplate
from penstock.errors import UserError
from penstock.run.generate import describe, generate_samples, talk


def test_samples_of_the_demo_policy() -> None:
    config = Config.model_validate({"sampling": {"max_tokens": 12}})
    samples = generate_samples(config, ["12+34=", "5+5="], num_generations=2)
    assert [s.prompt for s in samples] == ["12+34=", "12+34=", "5+5=", "5+5="]
    assert all(len(s.tokens) == len(s.logprobs) <= 12 for s in samples)
    assert all(max(s.logprobs) <= 0 for s in samples)
    lines = list(describe(samples))
    assert len(lines) == 12
    assert "mean log-prob" in lines[1]


def test_the_same_seed_gives_the_same_samples() -> None:
    config = Config.model_validate({"sampling": {"max_tokens": 8}})
    first, second = (generate_samples(config, ["7+8="], raw=True) for _ in range(2))
    assert first == second


def test_a_prompt_is_asked_as_the_config_trains_it() -> None:
    """`penstock generate RUN` left out the system prompt that the run had trained with."""
    system = "12+34 "
    tasks = {"sums": {"data": "addition", "system_prompt": system}}
    sampling = {"max_tokens": 8}
    trained = Config.model_validate({"sampling": sampling, "tasks": tasks})
    chat = ChatTemplate.from_config(trained.model)
    whole = chat.decode(chat.encode([{"role": "user", "content": "7+8"}], system).tolist())
    plain = Config.model_validate({"sampling": sampling})
    (expected,) = generate_samples(plain, [whole], raw=True)
    (sample,) = generate_samples(trained, ["7+8"])
    assert (sample.tokens, sample.logprobs) == (expected.tokens, expected.logprobs)
    (bare,) = generate_samples(plain, ["7+8"])
    assert bare.logprobs != sample.logprobs


def test_a_prompt_that_is_no_text_is_refused() -> None:
    messages: list[Any] = [[{"role": "user", "content": "7+8"}]]
    with pytest.raises(UserError, match=r"prompts: got \[\{'role': .*allowed: strings"):
        generate_samples(Config(), messages)


def test_an_unknown_engine_is_refused() -> None:
    config = Config.model_validate({"engine": {"name": "steam"}})
    with pytest.raises(UserError, match="transformers"):
        generate_samples(config, ["x"])


def test_a_conversation_without_room_goes_on_after_a_reset() -> None:
    config = Config.model_validate({"sampling": {"max_tokens": 8}})
    told: list[str] = []
    questions = [*["12+34 " * 12] * 5, "/reset", "12+34"]
    asyncio.run(talk(config, questions, told.append, scored=False))
    said = "".join(told).splitlines()
    assert any("/reset begins a new one" in line for line in said)
    assert said[-2] == "a new conversation"
    assert said[-1]


def test_a_model_can_be_asked_for_its_likeliest_response(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["penstock", "generate", "demo", "--prompt", "12+34", "sampling.max_tokens=8"]
    for temperature, code in (("0", 0), ("hot", 2)):
        monkeypatch.setattr("sys.argv", [*words, f"sampling.temperature={temperature}"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert (left.value.code or 0) == code
    printed = capsys.readouterr()
    assert "prompt: 12+34" in printed.out
    assert printed.err == "error: sampling.temperature: got 'hot', allowed: a number\n"
