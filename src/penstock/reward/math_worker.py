"""The worker program of `math_pool.py`: reads pairs of answers, says whether algebra finds them equal.

One JSON line `[gold, answer]` in, one line `1` or `0` out. It limits its own memory; its time is limited
by the pool, which kills it. Run as `python -m penstock.reward.math_worker [MEMORY_BYTES]`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from typing import Any


def compare(gold: str, answer: str) -> bool:
    """Return whether math-verify finds the two equal; text that it cannot read is not equal."""
    from math_verify import verify

    wanted, given = _parse(gold), _parse(answer)
    if not wanted or not given:
        return False
    return bool(verify(wanted, given, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    from penstock.reward.quantity import clean

    cleaned = clean(text)
    parsed = parse(f"${cleaned}$", parsing_timeout=None)
    return parsed or parse(cleaned, parsing_timeout=None)


def main() -> None:
    """Serve until the input ends."""
    if len(sys.argv) > 1:
        limit = int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not reach the answers' pipe
    logging.disable(logging.CRITICAL)
    # import everything and fill first-use tables before the pool counts it as ready
    compare("x+1", "1+x")
    print('"ready"', file=answers, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = compare(gold, answer)
        except Exception:  # a hostile answer may raise anything in the parser
            equal = False
        print(int(equal), file=answers, flush=True)


if __name__ == "__main__":
    main()
