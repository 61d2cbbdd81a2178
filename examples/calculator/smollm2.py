"""An agent for a model that knows no tool calls: the model writes calc(12 + 34), as one example shows."""

from __future__ import annotations

import re
from typing import Any

EXAMPLE = [
    {"role": "user", "content": "What is 71 - 25?"},
    {"role": "assistant", "content": "calc(71 - 25)"},
    {"role": "user", "content": "result: 46"},
    {"role": "assistant", "content": "The answer is 46."},
]
CALL = re.compile(r"calc\(([-+ \d]{1,40})\)")
TERM = re.compile(r"([-+]?) *(\d+)")


async def rollout(task: Any, model: Any) -> float:
    """Answer a call of the calculator with its result; the first answer without a call is the last."""
    messages = [*EXAMPLE, *task.messages]
    for _ in range(3):
        said = await model.chat(messages)
        call = CALL.search(said["content"])
        if call is None:
            numbers = re.findall(r"-?\d+", said["content"])
            return float(numbers[-1:] == [task.gt_answer])
        result = sum(int(sign + digits) for sign, digits in TERM.findall(call[1]))
        messages += [said, {"role": "user", "content": f"result: {result}"}]
    return 0.0
