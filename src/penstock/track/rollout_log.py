"""rollouts.jsonl: a few trained groups for a person to read, every n-th update."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.types import Batch, expand_segments


class RolloutLog:
    """Consumes batches and writes the first groups of every n-th one."""

    def __init__(self, path: Path, *, every_steps: int, num_groups: int) -> None:
        self._path = path
        self._every_steps = every_steps
        self._num_groups = num_groups

    def write(self, batch: Batch) -> None:
        if not self._every_steps or batch.step % self._every_steps:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for group in batch.groups[: self._num_groups]:
                for rollout in group.rollouts:
                    line = {
                        "step": batch.step,
                        "task": group.task,
                        "group_id": group.group_id,
                        "rollout_id": rollout.rollout_id,
                        "prompt": list(group.prompt.messages),
                        "response": rollout.text,
                        "gt_answer": group.prompt.gt_answer,
                        "test_cases": group.prompt.test_cases,
                        "reward": rollout.reward,
                        "parts": rollout.score.parts if rollout.score else {},
                        "versions": sorted(set(expand_segments(rollout.segments))),
                        "temperature": rollout.temperature,
                        "finish_reason": rollout.finish_reason,
                        "response_length": len(rollout.response_ids),
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
