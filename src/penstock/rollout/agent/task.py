"""What an agent gets of the dataset: one line, copied for each rollout."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from penstock.types import Prompt


@dataclass(slots=True, frozen=True, kw_only=True)
class Task:
    """What a rollout is about: one line of the dataset."""

    prompt_id: str
    messages: list[dict[str, Any]]  # with the task's system prompt
    gt_answer: str | None = None
    test_cases: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # every other field of the line

    @classmethod
    def of(cls, prompt: Prompt, system_prompt: str) -> Task:
        """Copy the prompt, so that no rollout changes what another one sees."""
        messages = [copy.deepcopy(dict(message)) for message in prompt.messages]
        if system_prompt and not any(message.get("role") == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": system_prompt})
        return cls(
            prompt_id=prompt.prompt_id,
            messages=messages,
            gt_answer=prompt.gt_answer,
            test_cases=copy.deepcopy(prompt.test_cases),
            extra=copy.deepcopy(prompt.extra),
        )
