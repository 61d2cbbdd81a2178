"""Write train.jsonl (20,000 sums) and heldout.jsonl (300 others) beside this file.

    python examples/sums/make_data.py

A sum has two or three numbers of two digits, joined by + and -. The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAIN, HELDOUT = 20_000, 300


def make_sums(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return `count` different problems."""
    draw = random.Random(seed)
    answers: dict[str, int] = {}
    while len(answers) < count:
        numbers = [draw.randint(10, 99) for _ in range(draw.choice((2, 3)))]
        signs = [draw.choice("+-") for _ in numbers[1:]]
        text, total = str(numbers[0]), numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            text += f" {sign} {number}"
            total += number if sign == "+" else -number
        answers[text] = total
    return [{"prompt": f"What is {text}?", "gt_answer": str(answers[text])} for text in answers]


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    sums = make_sums(TRAIN + HELDOUT)
    for name, part in (("train", sums[:TRAIN]), ("heldout", sums[TRAIN:])):
        lines = "".join(json.dumps(record) + "\n" for record in part)
        (folder / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    write(HERE)
    print(f"wrote {HERE / 'train.jsonl'} and {HERE / 'heldout.jsonl'}")
