"""A long run of small steps: whether the memory of driver, engine and trainer and the speed stay flat.

    python benchmarks/soak.py [--steps 9000]
    python benchmarks/soak.py --steps 10000 --kill-every 500

Trains the demo policy with 2 groups of 2 responses a step. A tracker in the driver writes the resident
memory of every process of the run, a hundred times in all. Printed are the first and last figures after
the first tenth (imports, caches), the slope of a straight line through each half, and the steps per second.

With --kill-every N the driver is killed (SIGKILL) after every N steps and the run is resumed. Printed are, for
each life of the driver, the seconds to its first step, the size of the journal and the memory at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
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


class KillingTracker:
    """Writes a line at the first step of each life of the driver and every N steps, then kills the driver."""

    def __init__(self, info: object) -> None:
        self._path = info.folder / "lives.jsonl"  # type: ignore[attr-defined]
        self._every, self._is_new = int(os.environ["KILL_EVERY"]), True

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        kills = step % self._every == 0
        if self._is_new or kills:
            line = {"step": step, "at": time.monotonic(), **resident_kib()}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._is_new = False
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


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


def settings(steps: int, folder: str, tracker: type) -> list[str]:
    return [
        f"run.dir={folder}",
        "run.name=soak",
        f"train.steps={steps}",
        "train.groups_per_step=2",
        "sampling.num_generations=2",
        "sampling.max_tokens=8",
        "eval.tasks={}",
        f"track.trackers=['{Path(__file__).resolve()}:{tracker.__name__}']",
    ]


def soak(steps: int, folder: str) -> list[dict[str, float]]:
    from penstock.config.source import load_config
    from penstock.run.session import train_new

    train_new(load_config(None, settings(steps, folder, MemoryTracker)).config)
    lines = (Path(folder) / "soak" / "memory.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def soak_with_kills(steps: int, every: int, folder: str) -> None:
    """Train to the end through all kills; print a line for each life of the driver, and the audit."""
    run = Path(folder) / "soak"
    command = [sys.executable, "-c", "from penstock.cli import main; main()"]
    words = ["train", *settings(steps, folder, KillingTracker), "checkpoint.every_steps=100"]
    workers = ("driver", "trainer", "engine-0")
    sizes = (f"{name}, MiB" for name in workers)
    table = Table("life", "steps", "s to its first step", "journal, MiB", *sizes, box=None)
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        started, seen = time.monotonic(), len(_lives(run))
        code = subprocess.run(
            [*command, *words], env={**os.environ, "KILL_EVERY": str(every)}, capture_output=True
        ).returncode
        lines, words = _lives(run)[seen:], ["resume", str(run)]
        if lines:
            first, last = lines[0], lines[-1]
            size = sum(path.stat().st_size for path in run.glob("journal.db*")) / 2**20
            resident = (last[name] / 1024 for name in workers)
            figures = (first["at"] - started, size, *resident)
            span = f"{first['step']:.0f}-{last['step']:.0f}"
            table.add_row(str(table.row_count + 1), span, *(f"{figure:.1f}" for figure in figures))
    audit = subprocess.run([*command, "audit", str(run)], capture_output=True).returncode
    console.print(table)
    console.print(f"exit {code}, audit {audit} (0: balanced)", highlight=False)


def _lives(run: Path) -> list[dict[str, float]]:
    path = run / "lives.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def slope_of(lines: list[dict[str, float]], name: str) -> float:
    return float(np.polyfit([line["step"] for line in lines], [line[name] for line in lines], 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--kill-every", type=int, default=0, help="steps; 0: never")
    options = parser.parse_args()
    if options.kill_every:
        with tempfile.TemporaryDirectory() as folder:
            soak_with_kills(options.steps, options.kill_every, folder)
        return
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
