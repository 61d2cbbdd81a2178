"""Writes train.jsonl: every number 40 times, in a random order; and test.jsonl: every number once.

python examples/guess/make_data.py
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from guess import NUMBERS


def write(folder: Path, rounds: int = 40) -> None:
    """Write the games to `folder/train.jsonl` and `folder/test.jsonl`."""
    choice = random.Random(0)
    train = [one for _ in range(rounds) for one in choice.sample(NUMBERS, len(NUMBERS))]
    for name, secrets in (("train", train), ("test", NUMBERS)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for secret in secrets:
                messages = [{"role": "user", "content": "guess"}]
                file.write(json.dumps({"messages": messages, "gt_answer": secret}) + "\n")


if __name__ == "__main__":
    write(Path(__file__).parent)
