"""Do kills change what a run learns? Two equal runs, one whose processes are killed four times, and a replay.

    python benchmarks/kills.py                                   # the demo policy, on this machine
    python benchmarks/kills.py CONFIG KEY=VALUE ... --steps 30   # for instance SmolLM2 on examples/sums, on a GPU

The runs are on-policy. In the third one the driver, the trainer, the engine and the driver again are killed (SIGKILL)
after a fifth, two, three and four fifths of the steps; a run without its driver is resumed. Printed is how many
steps' digests of the weights the runs share, what `penstock replay` says of the first, and the killed run's audit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VICTIMS = ("driver", "trainer", "engine-0", "driver")
PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()"]


class Killer:
    """A tracker that kills each victim once, after its step."""

    def __init__(self, info: object) -> None:
        self._done = info.folder / "kills.txt"  # type: ignore[attr-defined]

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        lines = self._done.read_text().splitlines() if self._done.exists() else []
        if len(lines) == len(VICTIMS) or step < int(os.environ["KILLS"].split(",")[len(lines)]):
            return
        victim = VICTIMS[len(lines)]
        self._done.write_text("\n".join([*lines, f"{victim} after step {step}"]) + "\n")
        os.kill(os.getpid() if victim == "driver" else _pid_of(victim), signal.SIGKILL)

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def _pid_of(worker: str) -> int:
    """The worker of this process that writes to the log of this name."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and Path(os.readlink(process / "fd" / "1")).stem == worker:
                return int(process.name)
        except OSError:  # it has just ended
            continue
    raise LookupError(worker)


def run(given: argparse.Namespace, folder: Path, name: str, *, kills: bool) -> list[str]:
    """Train to the end; return the digests of all steps."""
    words = [f"run.dir={folder}", f"run.name={name}", f"train.steps={given.steps}"]
    words += ["produce.strategy=sync", "eval.tasks={}", *given.words]
    if kills:
        words.append(f"track.trackers=['{Path(__file__).resolve()}:Killer']")
    steps = ",".join(str(given.steps * part // 5) for part in range(1, 5))
    command, started, code = ["train", *given.config, *words], time.monotonic(), -signal.SIGKILL
    with (folder / f"{name}.log").open("a") as log:
        while code == -signal.SIGKILL:
            code = subprocess.run(
                [*PENSTOCK, *command], env={**os.environ, "KILLS": steps}, stdout=log, stderr=log
            ).returncode
            command = ["resume", str(folder / name)]
    print(f"{name}: exit {code}, {time.monotonic() - started:.0f} s", flush=True)
    if code:
        print((folder / f"{name}.log").read_text()[-2000:])
    return digests(folder / name)


def digests(folder: Path) -> list[str]:
    from penstock.store.journal import Journal
    from penstock.store.run_folder import RunFolder

    journal = Journal.open(RunFolder(folder).journal, readonly=True)
    try:
        return [report.digest for report in journal.steps()]
    finally:
        journal.close()


def shared(first: list[str], second: list[str]) -> str:
    equal = sum(map(str.__eq__, first, second))
    return f"{equal} of {max(len(first), len(second))} digests equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="CONFIG|KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    given.config = [word for word in given.words if "=" not in word]
    given.words = [word for word in given.words if "=" in word]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = run(given, folder, "first", kills=False)
        print(f"second run: {shared(first, run(given, folder, 'second', kills=False))}", flush=True)
        killed = run(given, folder, "killed", kills=True)
        told = (folder / "killed" / "kills.txt").read_text().splitlines()
        print(f"killed run ({'; '.join(told)}): {shared(first, killed)}", flush=True)
        for command, name in (("replay", "first"), ("audit", "killed")):
            done = subprocess.run(
                [*PENSTOCK, command, str(folder / name)], capture_output=True, text=True
            )
            last = done.stdout.strip().splitlines()[-1:]
            print(f"{command} of {name}: exit {done.returncode}; {' '.join(last)}", flush=True)


if __name__ == "__main__":
    main()
