"""`penstock generate`: samples of the demo policy with log-probs."""

from __future__ import annotations

import pytest

from penstock.config import Config
from penstock.errors import UserError
from penstock.run.generate import describe, generate_samples


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
