"""Run schedules: `python -m simulation --schedules 20000`, or one: `python -m simulation --seed 17`."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

from simulation.defects import DEFECTS
from simulation.schedule import Result, run_seed

CHUNK = 50
MOST_SHOWN = 5


def main() -> int:
    options = _options()
    sys.unraisablehook = lambda unraisable: None  # coroutines of dead drivers are freed half-way
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # theirs
    gc.collect()
    gc.freeze()
    if options.seed is not None:
        result = run_seed(options.seed, trace=options.trace)
        print(report(result, whole=True))
        return int(result.failed)
    with DEFECTS[options.defect]() if options.defect else nullcontext():
        most = 1 if options.defect else MOST_SHOWN
        processes = options.processes or os.cpu_count() or 1
        return run_many(options.first, options.schedules, processes, most)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone and show it")
    parser.add_argument("--trace", help="with --seed: write every callback to this file")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1, help="0: one for each core")
    parser.add_argument("--defect", choices=DEFECTS, help="bring a known defect back")
    return parser.parse_args()


def run_many(first: int, number: int, processes: int, most_failed: int) -> int:
    """Run schedules until some have failed; return 1 if one did."""
    started, faults, lives, ticks, done, failed = time.monotonic(), Counter[str](), 0, 0, 0, 0
    for result in _results(first, number, processes):
        done += 1
        lives += len(result.lives)
        ticks += result.ticks
        faults.update(line.split()[1] for line in result.happened)
        if result.failed:
            failed += 1
            print(report(result), flush=True)
            if failed == most_failed:
                break
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in faults.most_common())
    print(
        f"{done:,} schedules in {time.monotonic() - started:.0f} s, {lives:,} lives of the driver, {ticks:,} ticks, "
        f"{faults.total():,} faults ({kinds}): {failed} failed"
    )
    return int(failed > 0)


def _results(first: int, number: int, processes: int) -> Iterator[Result]:
    seeds = range(first, first + number)
    if processes == 1:
        yield from map(run_seed, seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=CHUNK)


def report(result: Result, *, whole: bool = False) -> str:
    """Return what happened in a schedule, and the command that repeats it."""
    lines = [f"seed {result.seed}: {'FAILED' if result.failed else 'holds'}"]
    lines.append(
        f"  again with: PYTHONPATH=tests:tests/promises python -m simulation --seed {result.seed}"
    )
    lines += [f"  fault {line}" for line in result.happened]
    lines += [f"  life {number} ended: {end}" for number, end in enumerate(result.lives)]
    lines += [f"  broken: {line}" for line in result.violations]
    if whole:
        lines += [f"  settings: {result.settings}", "  notes:", result.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
