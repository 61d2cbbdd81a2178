"""A user's code whose words hold half a character, as those of a judge that was cut do."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.workers.rpc import append_to_log
from stages.command_runs import penstock, train

REWARD = """
def score(response):
    return {"value": 1.0, "note": "half \\ud83d", "parsed": "\\udc00", "answer_ok": True}

def keep(rollouts):
    raise ValueError("half \\ud83d")
"""


def test_every_file_of_the_run_holds_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    rewards = f"rewards=[{{type='{tmp_path / 'own.py'}:score'}}]"
    run = train(
        tmp_path,
        "half",
        "train.steps=1",
        "track.rollouts_every_steps=1",
        f"tasks.train.{rewards}",
        "eval.tasks.held.data=addition:heldout",
        "eval.max_problems=2",
        f"eval.tasks.held.{rewards}",
    )
    assert run.code == 0, run.told
    lines = (run.folder.evaluations / "held-step-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["parsed"] for line in lines] == ["\udc00"] * 2
    for line in (run.folder.path / "rollouts.jsonl").read_text().splitlines():
        json.loads(line)
    assert penstock("replay", str(run.folder.path)) == 0


def test_a_run_that_it_ends_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    rule = f"produce.is_valid_sample={tmp_path / 'own.py'}:keep"
    run = train(tmp_path, "ended", "train.steps=1", "produce.max_tries=1", rule)
    assert run.code == 1
    assert "the last reason: validity rule: ValueError: half" in run.told
    assert "Traceback" not in run.told
    assert "half \\ud83d" in (run.folder.logs / "traceback.txt").read_text()


def test_the_log_of_a_worker_holds_it(tmp_path: Path) -> None:
    append_to_log(tmp_path, "engine-0", "half \ud83d")
    assert (tmp_path / "engine-0.log").read_text() == "half \\ud83d\n"
