"""The reward of the sums: 1 if the last number in the response is the answer, else 0."""

from __future__ import annotations

import re

# a minus belongs to the number unless it follows a digit, as in 12-5
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


def last_number(response: str, gt_answer: str) -> float:
    """Return 1.0 if the response's last number equals the answer."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0
    return float(float(numbers[-1].replace(",", "")) == float(gt_answer))
