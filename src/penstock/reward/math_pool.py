"""Symbolic comparisons in worker processes, each with a time-out.

Algebra on a model's text may never end or use all memory, and math-verify's own time-out works only in
a main thread. So each worker is a process: past the time-out it is killed and replaced, and only that
answer counts as wrong. Workers start at the first comparison. Results are cached, because the rollouts
of a group often give the same answer.

`python -m penstock.reward.math_pool [MEMORY_BYTES]` is the worker: one JSON line `[gold, answer]` in, one line
`1` or `0` out. It limits its own memory.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.reward.equality import clean
from penstock.reward.line_process import ProcessGone, ProcessPool, ProcessSlow, serve_lines

START_TIMEOUT_S = 120.0
CACHE_SIZE = 8192
MEMORY_BYTES = 4 << 30  # address space of one worker
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")  # of a name, not of a command such as \\frac


@dataclass(slots=True, frozen=True)
class Comparison:
    """Whether two answers are equal; `note` says why the comparison failed."""

    equal: bool
    note: str = ""


class MathPool:
    """Consumes pairs of answers, produces Comparisons; at most `workers` at a time."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._workers = ProcessPool(
            [sys.executable, "-m", "penstock.reward.math_pool", str(MEMORY_BYTES)],
            workers,
            name="the symbolic comparison",
            start_timeout_s=START_TIMEOUT_S,
        )
        self._known: OrderedDict[tuple[str, str], Comparison] = OrderedDict()

    async def compare(self, gold: str, answer: str) -> Comparison:
        """Whether algebra finds the answers equal; an answer it cannot handle is not equal."""
        cached = self._known.get((gold, answer))
        if cached is not None:
            self._known.move_to_end((gold, answer))
            return cached
        comparison = self._known[gold, answer] = await self._ask(gold, answer)
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return comparison

    async def _ask(self, gold: str, answer: str) -> Comparison:
        for _ in range(2):  # another pair may have caused the first death
            async with self._workers.lend() as worker:
                try:
                    equal = await worker.ask([gold, answer], self._timeout_s, processor_time=True)
                    return Comparison(bool(equal))
                except ProcessSlow:
                    return Comparison(False, f"comparison took more than {self._timeout_s:g} s")
                except ProcessGone:
                    continue
        return Comparison(False, "comparison crashed its worker")

    async def close(self) -> None:
        """End every process."""
        await self._workers.close()


# -- the worker --------------------------------------------------------------------------------------


def compare(gold: str, answer: str) -> bool:
    """Whether math-verify finds the two equal; text that it cannot read is not equal."""
    from math_verify import verify

    sides = answer.split("=")
    if len(sides) > 1 and "=" not in gold and not _LETTER.search(sides[0]):
        return all(compare(gold, side) for side in sides)  # 6*7=42, but not 41=42
    expected, actual = _parse(gold), _parse(answer)
    if not expected or not actual:
        return False
    return bool(verify(expected, actual, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    cleaned = clean(text)
    parsed = parse(f"${cleaned}$", parsing_timeout=None)
    return parsed or parse(cleaned, parsing_timeout=None)


def main() -> None:
    """Serve until the input ends."""
    if len(sys.argv) > 1:
        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)
    serve_lines(_start)


def _start() -> Callable[[list[str]], int]:
    """Import everything and fill first-use tables before the pool counts the process as ready."""
    compare("x+1", "1+x")
    return _answer


def _answer(pair: list[str]) -> int:
    try:
        return int(compare(*pair))
    except Exception:  # a hostile answer may raise anything in the parser
        return 0


if __name__ == "__main__":
    main()
