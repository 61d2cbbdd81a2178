"""Write train.jsonl (2,000 small programming tasks) and heldout.jsonl (200 others) beside this file.

    python examples/code/make_data.py

A task names a function, says in one sentence what it returns, and has four test cases that the sandbox
runs. The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRAIN, HELDOUT = 2_000, 200
LETTERS = "abcdefghij"

Draw = random.Random
# (sentence, the arguments' names, how to draw arguments, what the function returns)
Task = tuple[str, str, Callable[[Draw], list[Any]], Callable[..., Any]]


def _number(draw: Draw) -> list[Any]:
    return [draw.randint(-20, 20)]


def _two_numbers(draw: Draw) -> list[Any]:
    return [draw.randint(-20, 20), draw.randint(-20, 20)]


def _numbers(draw: Draw) -> list[Any]:
    return [[draw.randint(-9, 20) for _ in range(draw.randint(1, 6))]]


def _word(draw: Draw) -> list[Any]:
    return ["".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 8)))]


def draw_task(draw: Draw) -> Task:
    """Return one task with constants of its own."""
    a, b = draw.randint(2, 30), draw.randint(1, 50)
    letter = draw.choice(LETTERS)
    tasks: list[Task] = [
        (f"x times {a} plus {b}", "x", _number, lambda x: x * a + b),
        (f"x minus {b}, times {a}", "x", _number, lambda x: (x - b) * a),
        (f"the square of x plus {b}", "x", _number, lambda x: x * x + b),
        (f"the remainder of x divided by {a}", "x", _number, lambda x: x % a),
        (f"True if x is greater than {b}, else False", "x", _number, lambda x: x > b),
        (f"True if x is divisible by {a}, else False", "x", _number, lambda x: x % a == 0),
        (f"x plus y plus {b}", "x, y", _two_numbers, lambda x, y: x + y + b),
        (f"{a} times x minus y", "x, y", _two_numbers, lambda x, y: a * x - y),
        (f"the larger of x and {b}", "x", _number, lambda x: max(x, b)),
        (f"the smaller of x, y and {b}", "x, y", _two_numbers, lambda x, y: min(x, y, b)),
        (f"the sum of the list x plus {b}", "x", _numbers, lambda x: sum(x) + b),
        (f"the length of the list x times {a}", "x", _numbers, lambda x: len(x) * a),
        (
            f"a list with each number of the list x times {a}",
            "x",
            _numbers,
            lambda x: [v * a for v in x],
        ),
        (
            f"a list of the numbers in the list x that are greater than {b % 10}",
            "x",
            _numbers,
            lambda x: [v for v in x if v > b % 10],
        ),
        (f"the largest number of the list x plus {b}", "x", _numbers, lambda x: max(x) + b),
        (
            f"how often the letter '{letter}' occurs in the string x",
            "x",
            _word,
            lambda x: x.count(letter),
        ),
        (
            f"the string x repeated {a % 5 + 2} times",
            "x",
            _word,
            lambda x: x * (a % 5 + 2),
        ),
        (f"the string x with '{letter}' added at its end", "x", _word, lambda x: x + letter),
        (f"the length of the string x plus {b}", "x", _word, lambda x: len(x) + b),
        (
            f"True if the string x starts with '{letter}', else False",
            "x",
            _word,
            lambda x: x.startswith(letter),
        ),
    ]
    return draw.choice(tasks)


def make_tasks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` different tasks as dataset lines."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        sentence, names, arguments, function = draw_task(draw)
        prompt = (
            f"Write a Python function f({names}) that returns {sentence}. "
            "Answer with one python code block and nothing else."
        )
        inputs = [arguments(draw) for _ in range(4)]
        cases = {"inputs": inputs, "outputs": [function(*i) for i in inputs], "fn_name": "f"}
        found.setdefault(prompt, {"prompt": prompt, "test_cases": cases})
    tasks = list(found.values())
    draw.shuffle(tasks)  # kinds with few constants come first otherwise
    return tasks


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    tasks = make_tasks(TRAIN + HELDOUT)
    for name, part in (("train", tasks[:TRAIN]), ("heldout", tasks[TRAIN:])):
        lines = "".join(json.dumps(record) + "\n" for record in part)
        (folder / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    write(HERE)
    print(f"wrote {HERE / 'train.jsonl'} and {HERE / 'heldout.jsonl'}")
