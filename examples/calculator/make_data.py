"""Writes train.jsonl: sums of two numbers of three digits.

python examples/calculator/make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def write(folder: Path, count: int = 400) -> None:
    """Write the problems to `folder/train.jsonl`."""
    choice = random.Random(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(count):
            a, b = choice.randint(100, 499), choice.randint(100, 499)
            messages = [{"role": "user", "content": f"{a}+{b}"}]
            file.write(json.dumps({"messages": messages, "gt_answer": str(a + b)}) + "\n")


if __name__ == "__main__":
    write(Path(__file__).parent)
