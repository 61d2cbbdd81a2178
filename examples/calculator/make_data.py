"""Writes train.jsonl and test.jsonl: sums of two numbers of three digits.

python examples/calculator/make_data.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def write(folder: Path, count: int = 400, held_out: int = 200) -> None:
    """Write the problems to `folder/train.jsonl`, and others to `folder/test.jsonl`."""
    choice = random.Random(0)
    pairs = [(choice.randint(100, 499), choice.randint(100, 499)) for _ in range(count)]
    others = [(choice.randint(100, 499), choice.randint(100, 499)) for _ in range(held_out)]
    others = [pair for pair in others if pair not in pairs]
    for name, problems in (("train", pairs), ("test", others)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for a, b in problems:
                messages = [{"role": "user", "content": f"{a}+{b}"}]
                file.write(json.dumps({"messages": messages, "gt_answer": str(a + b)}) + "\n")


if __name__ == "__main__":
    write(Path(__file__).parent)
