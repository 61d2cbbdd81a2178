"""`penstock generate`: samples of the demo policy with log-probs."""

from __future__ import annotations

import asyncio

import pytest

from penstock import cli
from penstock.config import Config
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
