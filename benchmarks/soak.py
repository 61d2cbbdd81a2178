"""A long run of small steps: whether the memory of driver, engine and trainer and the speed stay flat.

    python benchmarks/soak.py [--steps 9000]

Trains the demo policy with 2 groups of 2 responses a step. A tracker in the driver writes the resident
memory of every process of the run, a hundred times in all. Printed are the first and last figures after
the first tenth (imports, caches), the slope of a straight line through each half, and the steps per second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

console = Console()
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class MemoryTracker:
    """Writes a line of (step, time, KiB by process) to RUN/memory.jsonl, a hundred times in a run."""

    def __init__(self, info: object) -> None:
        self._file = (info.folder / "memory.jsonl").open("w", buffering=1)  # type: ignore[attr-defined]
        self._every = max(1, info.total_steps // 100)  # type: ignore[attr-defined]

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        if step % self._every == 0:
            line = {"step": step, "at": time.monotonic(), **resident_kib()}
            self._file.write(json.dumps(line) + "\n")

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        self._file.close()


def resident_kib() -> dict[str, int]:
    """Return the resident memory of this process and of its workers, which write to logs of their name."""
    found = {"driver": _resident(os.getpid())}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                log = Path(os.readlink(process / "fd" / "1"))
                if log.suffix == ".log":
                    found[log.stem] = _resident(int(process.name))
        except OSError:  # it has just ended
            continue
    return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


def soak(steps: int, folder: str) -> list[dict[str, float]]:
    from penstock.config.source import load_config
    from penstock.run.session import train_new

    words = [
        f"run.dir={folder}",
        "run.name=soak",
        f"train.steps={steps}",
        "train.groups_per_step=2",
        "sampling.num_generations=2",
        "sampling.max_tokens=8",
        "eval.tasks={}",
        f"track.trackers=['{Path(__file__).resolve()}:MemoryTracker']",
    ]
    train_new(load_config(None, words).config)
    lines = (Path(folder) / "soak" / "memory.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def slope_of(lines: list[dict[str, float]], name: str) -> float:
    return float(np.polyfit([line["step"] for line in lines], [line[name] for line in lines], 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=9000)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        lines = soak(options.steps, folder)
        size = (Path(folder) / "soak" / "journal.db").stat().st_size
    kept = lines[len(lines) // 10 :]
    halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    columns = ("process", "first, MiB", "last, MiB", "KiB a step, first half", "second half")
    table = Table(*columns, box=None)
    for name in [key for key in kept[0] if key not in ("step", "at")]:
        sizes = (kept[0][name] / 1024, kept[-1][name] / 1024)
        table.add_row(
            name,
            *(f"{size:.1f}" for size in sizes),
            *(f"{slope_of(half, name):.2f}" for half in halves),
        )
    speeds = [
        (half[-1]["step"] - half[0]["step"]) / (half[-1]["at"] - half[0]["at"]) for half in halves
    ]
    console.print(f"{options.steps} steps, {os.cpu_count()} cores, load {load:.1f} at the start")
    console.print(table)
    console.print(
        f"steps/s: {speeds[0]:.1f} in the first half, {speeds[1]:.1f} in the second; "
        f"journal: {size / options.steps / 1024:.1f} KiB a step",
        highlight=False,
    )


if __name__ == "__main__":
    main()
