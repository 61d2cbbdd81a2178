"""Prompts, and rollouts that are finished without an engine."""

from __future__ import annotations

import numpy as np

from penstock.types import Prompt, Rollout, Score, Status, VersionSegment


def make_prompt(number: int = 0, length: int = 3) -> Prompt:
    return Prompt(
        prompt_id=f"data:{number}",
        messages=({"role": "user", "content": f"question {number}"},),
        token_ids=np.arange(1, length + 1),
        gt_answer=str(number),
        extra={"number": number},
    )


def make_prompts(count: int) -> list[Prompt]:
    return [make_prompt(number) for number in range(count)]


def finish_rollout(
    rollout: Rollout, *, version: int = 0, num_tokens: int = 4, reward: float = 1.0
) -> Rollout:
    """Give a rollout that is not finished the response and score of a finished one."""
    new = max(1, num_tokens - len(rollout.response_ids))
    rng = np.random.default_rng(rollout.seed)
    rollout.append(
        rng.integers(1, 100, new), -rng.random(new), [VersionSegment(version=version, length=new)]
    )
    rollout.finish_reason, rollout.text = "stop", "text"
    rollout.score = Score(reward)
    rollout.move_to(Status.COMPLETED)
    return rollout
