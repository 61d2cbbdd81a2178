"""Count the functions and files that the groups of one step pass, from their prompts to the published weights.

    python scripts/rollout_way.py [--list] [key=value ...]

Trains three small steps of the demo and counts every penstock function that runs in the driver during the
second one. With `launch.kind=inline` the driver holds engine and trainer too.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import penstock
from penstock.config.source import load_config
from penstock.run.loop import Loop
from penstock.run.session import train_new

ROOT = Path(penstock.__file__).parent
SMALL = [
    "run.name=way",
    "produce.strategy=sync",
    "train.steps=3",
    "train.groups_per_step=4",
    "sampling.num_generations=4",
    "engine.max_slots=16",
    "eval.at_start=false",
    "eval.every_steps=0",
    "eval.max_problems=1",
    "track.trackers=[]",
]


def main() -> None:
    passed: Counter[tuple[str, str]] = Counter()
    counting = False

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<")
        if counting and event == "call" and ours:
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            passed[file, code.co_qualname] += 1

    one_step = Loop._one_step

    async def counted_step(loop: Loop, step: int) -> None:
        nonlocal counting
        counting = step == 2
        await one_step(loop, step)
        counting = False

    Loop._one_step = counted_step  # type: ignore[method-assign]
    threading.setprofile(count)
    sys.setprofile(count)
    overrides = [word for word in sys.argv[1:] if "=" in word]
    with tempfile.TemporaryDirectory() as folder:
        train_new(load_config(None, [*SMALL, f"run.dir={folder}", *overrides]).config)
    sys.setprofile(None)
    if "--list" in sys.argv:
        for (file, function), calls in sorted(passed.items()):
            print(f"{file}: {function} ({calls})")
    print(f"{len(passed)} functions in {len({file for file, _ in passed})} files")


if __name__ == "__main__":
    main()
