"""rollouts.jsonl: a few trained groups for a person to read, every n-th update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.inspection.track.line_file import LineFile, Note, print_note
from penstock.types import Batch, Group, Rollout, expand_segments


class RolloutLog:
    """Consumes batches and writes the first groups of every n-th one."""

    def __init__(
        self, path: Path, *, every_steps: int, num_groups: int, note: Note = print_note
    ) -> None:
        self._file = LineFile(path, note)
        self._every_steps = every_steps
        self._num_groups = num_groups

    def write(self, batch: Batch) -> None:
        if not self._every_steps or batch.step % self._every_steps:
            return
        self._file.append(
            [
                json.dumps(_line(batch.step, group, rollout), ensure_ascii=False)
                for group in batch.groups[: self._num_groups]
                for rollout in group.rollouts
            ]
        )

    def close(self) -> None:
        self._file.tell_loss()


def _line(step: int, group: Group, rollout: Rollout) -> dict[str, Any]:
    return {
        "step": step,
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
        "response_length": rollout.num_sampled,
    }
