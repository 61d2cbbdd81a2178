"""Write shown.jsonl (600 worked differences), train.jsonl and heldout.jsonl (256 others) beside this file.

    python examples/warm_start/make_data.py

A difference has two numbers of two digits and is above 0. The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHOWN, HELDOUT = 600, 256


def write(folder: Path) -> None:
    """Write the three files into `folder`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a)]
    random.Random(0).shuffle(pairs)
    heldout, rest = pairs[:HELDOUT], pairs[HELDOUT:]
    _write(folder / "shown.jsonl", map(demonstration, rest[:SHOWN]))
    _write(folder / "train.jsonl", map(problem, rest))
    _write(folder / "heldout.jsonl", map(problem, heldout))


def demonstration(pair: tuple[int, int]) -> dict[str, str]:
    return {"prompt": "{}-{}".format(*pair), "completion": worked(*pair)}


def problem(pair: tuple[int, int]) -> dict[str, str]:
    return {"prompt": "{}-{}".format(*pair), "answer": str(pair[0] - pair[1])}


def worked(a: int, b: int) -> str:
    """The difference digit by digit, the units first."""
    borrowed = a % 10 < b % 10
    units = a % 10 + 10 * borrowed - b % 10
    tens = a // 10 - borrowed - b // 10
    one = f"{a % 10 + 10 * borrowed}-{b % 10}={units}"
    ten = f"{a // 10}{'-1' if borrowed else ''}-{b // 10}={tens}"
    return f"<think>{one} {ten}</think><answer>{a - b}</answer>"


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"wrote {path}")


if __name__ == "__main__":
    write(HERE)
