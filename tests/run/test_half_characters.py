"""A reward whose words hold half a character, as those of a judge that was cut do."""

from __future__ import annotations

import json
from pathlib import Path

from stages.command_runs import penstock, train

REWARD = """
def score(response):
    return {"value": 1.0, "note": "half \\ud83d", "parsed": "\\udc00", "answer_ok": True}
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
