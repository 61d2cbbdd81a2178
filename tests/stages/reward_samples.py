"""Rollouts and prompts for the tests of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.types import Prompt, Rollout, VersionSegment


def rollout(
    text: str, *, tokens: int = 0, finish_reason: str = "stop", name: str = "task:0.0"
) -> Rollout:
    return Rollout(
        rollout_id=name,
        prompt_ids=np.ones(1, dtype=np.int32),
        seed=0,
        text=text,
        finish_reason=finish_reason,
        response_ids=np.zeros(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, dtype=np.float32),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        segments=(VersionSegment(0, tokens),) if tokens else (),
    )


def prompt(gt_answer: str | None = None, test_cases: dict[str, Any] | None = None) -> Prompt:
    messages = ({"role": "user", "content": "question"},)
    return Prompt("data:1", messages, np.ones(1), gt_answer=gt_answer, test_cases=test_cases)


def tagged(answer: str) -> str:
    return f"<think>because</think><answer>{answer}</answer>"
