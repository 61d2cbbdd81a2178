"""Rules that end a run early: what each looks at, and mistakes in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from penstock.config.doubts import doubts
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.inspection.track.logs import Finding
from penstock.rollout.evaluation.evaluate import best_or_pending
from penstock.run.stop_rules import StopRules, check_scores

FINDING = Finding(name="equal_rewards", what="", since=1, evidence="", advice="")


def write_scores(folder: Path, *scores: float) -> None:
    rows = ({"task": "test", "step": n, "accuracy": score} for n, score in enumerate(scores))
    (folder / "summary.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(
    ("rule", "scores", "holds"),
    [
        ("test/accuracy >= 0.9", [0.5, 0.8], False),
        ("test/accuracy >= 0.9", [0.5, 0.9], True),
        ("test/accuracy>=0.9", [0.95, 0.5], False),
        ("test/accuracy <= 0.1", [0.05], True),
        ("test/accuracy >= 0.9", [], False),
        ("test/accuracy stalls 2", [0.1, 0.5, 0.5], False),
        ("test/accuracy stalls 2", [0.1, 0.5, 0.5, 0.4], True),
        ("test/accuracy stalls 2", [0.1, 0.5, 0.5, 0.6], False),
        ("reward/mean >= 0.7", [], True),
        ("reward/mean >= 0.8", [], False),
        ("reward/mean >= .8", [], False),
        ("reward/mean <= 1e+2", [], True),
        ("finding equal_rewards", [], True),
        ("finding truncated", [], False),
    ],
)
def test_a_rule_holds(tmp_path: Path, rule: str, scores: list[float], holds: bool) -> None:
    write_scores(tmp_path, *scores)
    rules = StopRules([rule], tmp_path)
    assert rules.met({"reward/mean": 0.75}, [FINDING]) == (rule if holds else "")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stop_when=['heldout/acuracy >= 1']", "allowed scores: heldout/accuracy"),
        ("train.stop_when=['other/accuracy >= 1']", "allowed scores: heldout/accuracy"),
        ("train.stop_when=['other/accuracy stalls 2']", "allowed scores: heldout/accuracy"),
        ("train.stop_when=['finding bad']", "allowed findings: "),
        ("train.stop_when=['heldout/accuracy >= .5.5']", "allowed: 'SCORE >= NUMBER'"),
        ("train.stop_when=['when it is good']", "allowed: 'SCORE >= NUMBER'"),
        ("checkpoint.keep_best=accuracy", "keep_best: got 'accuracy', allowed: heldout/accuracy"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_scores(load_config(None, [setting]).config)


def test_a_rule_that_waits_for_an_unknown_metric_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    rules = StopRules(["reward/maen >= 0.5", "test/accuracy >= 0.9"], tmp_path, told.append)
    rules.met({}, [])  # before the first step
    for _ in range(2):
        assert not rules.met({"reward/mean": 0.75}, [])
    (line,) = told
    assert "'reward/maen >= 0.5'" in line
    assert "did you mean reward/mean?" in line


def test_a_score_of_the_start_and_the_end_alone_ends_nothing() -> None:
    settings = ["train.stop_when=['heldout/accuracy stalls 2', 'reward/mean >= 1']"]
    settings += ["checkpoint.keep_best=heldout/accuracy"]
    for every, count in ((0, 2), (5, 0)):
        lines = doubts(load_config(None, [*settings, f"eval.every_steps={every}"]).config)
        assert len([line for line in lines if "eval.every_steps" in line]) == count


def test_only_a_step_that_will_be_evaluated_is_kept_until_it_is(tmp_path: Path) -> None:
    write_scores(tmp_path, 0.1, 0.5, 0.4)  # of the steps 0 to 2
    kept = partial(best_or_pending, tmp_path, "test/accuracy", [1, 2, 3, 4, 5, 6])
    assert kept(every_steps=2) == {1, 4, 6}
    assert kept(every_steps=0) == {1}


def test_a_step_whose_evaluation_failed_is_not_kept_for_its_score(tmp_path: Path) -> None:
    """While a judge is down every evaluation fails: each would stay on the disk."""
    rows = ({"task": "test", "step": n, "accuracy": score} for n, score in ((0, 0.1), (2, None)))
    (tmp_path / "summary.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kept = best_or_pending(tmp_path, "test/accuracy", [0, 1, 2, 3, 4], every_steps=1)
    assert kept == {0, 3, 4}
