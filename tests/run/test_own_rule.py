"""Rules of the user's own, from the config to the groups that are trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.command_runs import train

RULES = """
def keep(rollouts):
    return int(rollouts[0].rollout_id.removeprefix("train:").partition(".")[0]) % 2 == 0

def go_on(completed, batch_size):
    return len(completed) < batch_size

async def keep_later(rollouts):
    return keep(rollouts)
"""


@pytest.mark.parametrize("rule", ["keep", "keep_later"])
def test_a_rule_may_be_a_coroutine_function(rule: str, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    rules = f"produce.is_valid_sample={tmp_path / 'rules.py'}:{rule}"
    run = train(tmp_path, rule, rules, "produce.strategy=sync", "train.steps=2")
    assert run.code == 0, run.told
    trained = run.query("SELECT cursor FROM groups WHERE state = 'trained' ORDER BY cursor")
    assert trained == [(0,), (2,), (4,), (6,)]


def test_a_rule_of_going_on_must_answer_at_once(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    rule = f"{tmp_path / 'rules.py'}:keep_later"
    run = train(tmp_path, "later", f"produce.should_continue={rule}")
    assert run.code == 2
    assert f"produce.should_continue: got '{rule}', which is async, allowed: " in run.told


@pytest.mark.slow
def test_a_rule_that_raises_ends_the_run_in_one_line_with_its_place(tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(RULES)
    run = train(tmp_path, "raises", f"produce.should_continue={rules}:go_on")
    line = RULES.splitlines().index("    return len(completed) < batch_size") + 1
    assert run.code == 1
    assert run.told.splitlines()[-1] == (
        "error: task train: its production failed: TypeError: object of type 'int' has no len() "
        f"({rules}:{line})"
    )
