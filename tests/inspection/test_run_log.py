"""What a person reads in a run's folder: prompts with their system message."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.inspection.track.logs import RolloutLog
from stages.training_data import random_batch


def test_a_recorded_prompt_has_its_system_message(tmp_path: Path) -> None:
    log = RolloutLog(
        tmp_path / "rollouts.jsonl", every_steps=1, system_prompts={"train": "Be brief."}
    )
    log.write(random_batch(groups=1))
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [{"role": "system", "content": "Be brief."}]
