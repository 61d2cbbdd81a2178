"""What a person reads in a run's folder: pauses and tail batches in words, prompts with their system message."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.inspection.track.logs import NoteLog, RolloutLog
from stages.training_data import random_batch


def test_the_log_of_a_run_tells_tail_batches_and_pauses(tmp_path: Path) -> None:
    log = NoteLog(tmp_path / "run.log")
    log.log_step(1, {"time/pause_s": 0.0, "tasks/train/tail_calls": 0.0})
    log.log_step(2, {"time/pause_s": 1.5, "tasks/train/tail_calls": 2.0})
    log.log_step(3, {"tasks/math/pause_timeouts": 3.0})
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert lines == [
        "step 2: generation was paused for 1.50 s for new weights",
        "step 2: tasks/train: 2 tail batches, which draw expired groups before new ones",
        "step 3: tasks/math: 3 groups were still running at the end of produce.pause_timeout_s and start again",
    ]


def test_a_recorded_prompt_has_its_system_message(tmp_path: Path) -> None:
    log = RolloutLog(
        tmp_path / "rollouts.jsonl", every_steps=1, system_prompts={"train": "Be brief."}
    )
    log.write(random_batch(groups=1))
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [{"role": "system", "content": "Be brief."}]
