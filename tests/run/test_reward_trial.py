"""The trial of a user's reward function before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config
from penstock.run.preflight import try_rewards

REWARDS = """
def strict(response, gt_answer):
    return float(response.split("####")[1] == gt_answer)

def mild(response, gt_answer):
    return float(gt_answer in response)
"""


@pytest.mark.parametrize(("name", "warnings"), [("strict", 1), ("mild", 0)])
def test_a_function_that_raises_on_a_form_it_does_not_know_is_told_of(
    name: str, warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be right about other responses, so it is no mistake yet."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    task = {"data": "addition", "rewards": [{"type": f"{tmp_path / 'rewards.py'}:{name}"}]}
    try_rewards(Config.model_validate({"model": {"path": "demo"}, "tasks": {"t": task}}))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == warnings
    for line in told:
        assert line.startswith("warning: tasks.t.rewards: no made-up response could be scored: ")
        assert "reward strict: IndexError: list index out of range" in line
