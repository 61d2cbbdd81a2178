"""What durability costs: journal, digest and checkpoint as a share of a step, and as a run gets longer.

    python benchmarks/durability.py [--steps 40] [--groups 20000] [--digest-gib 1 4]
    python benchmarks/durability.py --steps 0 --groups 0      # the digest alone; with a GPU, on both sides
    python benchmarks/durability.py --lengths 100 1000 10000  # the journal alone, at those lengths of a run
    python benchmarks/durability.py --step-s 2.8              # a large step (64 groups of 8 x 512 tokens) that takes 2.8 s
    python benchmarks/durability.py --beside-gib 2            # a small fsync beside that of a checkpoint of 2 GiB

Three parts. A real run of the built-in demo with its worker processes and a checkpoint every fourth step, where
the calls that wait are timed: their shares of a step, in the first and in the last third of the run.
Then the journal alone over a long run, to see whether a record costs more as the journal grows, how
much of it a resume reads, and what removing its tokens frees.
Then the digest alone on weights of big models' sizes, and how long a step must last for it to be
one per cent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

console = Console()


class Stopwatch:
    """Seconds spent in chosen methods, per step of the run."""

    def __init__(self) -> None:
        self.step = 1
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def watch(self, name: str, owner: Any, method: str, *, cpu: bool = False) -> None:
        """Time a method; with `cpu` only what its own thread computes, not its waits for the lock."""
        function = getattr(owner, method)
        clock = time.thread_time if cpu else time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name][self.step] += clock() - started

        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return await function(*args, **kwargs)
            finally:
                self.seconds[name][self.step] += time.perf_counter() - started

        setattr(owner, method, timed_async if asyncio.iscoroutinefunction(function) else timed)

    def next_step_after(self, owner: Any, method: str) -> None:
        function: Callable = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.step += 1
            return result

        setattr(owner, method, counted)


WAITS = (
    "the loop waits for the journal: batch",
    "the loop waits for the journal: commit",
    "the trainer hashes its weights and its batch",
)
COPY = "the loop waits for the copy of a checkpoint"
BESIDE = (
    "beside training: the journal's thread (CPU)",
    "beside training: digest in an engine",
    "beside training: writing a checkpoint",
)


def measure_run(steps: int, every: int) -> None:
    """Train the demo as a user does, with worker processes; print what each part took of a step."""
    from penstock.config.source import load_config
    from penstock.inspection.track.logs import JsonlTracker
    from penstock.run.session import train_new
    from penstock.store.journal import Journal
    from penstock.store.journal.writer import Writer
    from penstock.workers.supervise.trainer import RestartingTrainer

    watch = Stopwatch()
    watch.watch(WAITS[0], Journal, "begin_step")
    watch.watch(WAITS[1], Journal, "commit_step")
    watch.watch(COPY, RestartingTrainer, "snapshot")
    watch.watch(BESIDE[0], Writer, "_commit", cpu=True)
    watch.watch(BESIDE[2], RestartingTrainer, "write_snapshot")
    watch.next_step_after(JsonlTracker, "log_step")
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run.dir={folder}",
            "run.name=run",
            f"train.steps={steps}",
            f"checkpoint.every_steps={every}",
            "eval.tasks={}",
            "track.trackers=[]",
        ]
        train_new(load_config(None, words).config)
        run = Path(folder) / "run"
        size = (run / "journal.db").stat().st_size
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    watch.seconds[WAITS[2]].update((row["step"], row["time/digest_s"]) for row in rows)
    digest_s = demo_digest_s()
    watch.seconds[BESIDE[1]].update((row["step"], digest_s) for row in rows)
    print_shares(watch, steps, statistics.mean(row["time/step_s"] for row in rows[1:]), every)
    console.print(f"journal: {size / steps / 1024:.1f} KiB a step\n", highlight=False)


def demo_digest_s() -> float:
    """Return the seconds that the digest of the demo's policy takes, alone."""
    from penstock.config.demo import policy_path
    from penstock.weights.digest import digest_of
    from penstock.weights.model_weights import read_folder

    weights = read_folder(str(policy_path()))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        digest_of(weights.items())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def print_shares(watch: Stopwatch, steps: int, step_s: float, every: int) -> None:
    """Print each part's milliseconds a step, its share, and the share that training waits for."""
    third = steps // 3
    columns = ("part", "first third, ms a step", "last third, ms a step", "share of a step")
    table = Table(*columns, box=None)
    shares = {}
    for name in (*WAITS, COPY, *BESIDE):
        spent = watch.seconds[name]
        if not spent:
            raise SystemExit(f"{name}: was never called; the benchmark watches the wrong place")
        first = statistics.mean(spent[step] for step in range(2, third + 2))
        last = statistics.mean(spent[step] for step in range(steps - third + 1, steps + 1))
        shares[name] = statistics.mean(spent[step] for step in range(2, steps + 1)) / step_s
        table.add_row(name, f"{1e3 * first:.2f}", f"{1e3 * last:.2f}", f"{shares[name]:.2%}")
    console.print(
        f"\nthe demo, {steps} steps of {1e3 * step_s:.0f} ms, a checkpoint every {every}:"
    )
    console.print(table)
    copy_s = sum(watch.seconds[COPY].values()) / (steps // every)
    console.print(
        f"training waits {sum(shares[name] for name in WAITS):.2%} of a step, and {copy_s / 600:.4%} "
        "for the copy of a checkpoint every ten minutes",
        highlight=False,
    )


def measure_long_journal(groups: int, per_step: int = 32) -> None:
    """Write a long run's records and print the cost of a step in each tenth of it."""
    from penstock.store.journal import Journal
    from penstock.types import StepReport

    async def write(journal: Journal) -> list[float]:
        times = []
        for step in range(1, groups // per_step + 1):
            batch = [made_group((step - 1) * per_step + index) for index in range(per_step)]
            started = time.perf_counter()
            for group in batch:
                journal.drawn(group)
                await journal.landed(group)
            await journal.begin_step(step, batch)
            await journal.commit_step(StepReport(step=step, policy_version=step, digest="d" * 32))
            times.append(time.perf_counter() - started)
        return times

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder) / "journal.db")
        times = asyncio.run(write(journal))
        started = time.perf_counter()
        journal.batch(len(times) // 2)
        read_ms = 1e3 * (time.perf_counter() - started)
        journal.close()
        path = Path(folder) / "journal.db"
        size, resumed = path.stat().st_size, resume_cost(path)
    tenth = len(times) // 10
    medians = [statistics.median(times[i * tenth : (i + 1) * tenth]) for i in range(10)]
    console.print(f"the journal alone, {groups:,} groups of 8 responses of 24 tokens:")
    console.print(
        "  ms per step of 32 groups, by tenth of the run: "
        + " ".join(f"{1e3 * value:.1f}" for value in medians),
        highlight=False,
    )
    console.print(
        f"  last tenth / first tenth: {medians[-1] / medians[0]:.2f}; a batch is read in "
        f"{read_ms:.1f} ms; {size / 2**20:.0f} MiB",
        highlight=False,
    )
    console.print(f"  {resumed}\n", highlight=False)


def resume_cost(path: Path) -> str:
    """Read what a resume reads that redoes the last step."""
    from penstock.store.journal import Journal

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before, started = bytes_read(), time.perf_counter()
    journal = Journal.open(path, readonly=True)
    journal.check_for_resume()
    journal.batch(journal.last_committed_step())
    journal.unfinished_groups()
    for ask in (journal.steps, journal.counts, journal.drops, journal.taken, journal.cursors):
        ask()
    journal.close()
    spent, read = time.perf_counter() - started, bytes_read() - before
    return f"a resume reads {read / 2**20:.0f} MiB of {path.stat().st_size / 2**20:.0f} in {spent:.1f} s"


def measure_pruning(steps: int = 100, per_step: int = 4, tokens: int = 1000) -> None:
    """Write a run of long responses, remove its tokens, and write as much again."""
    from penstock.store.journal import Journal

    def batch(step: int) -> list:
        numbers = range((step - 1) * per_step, step * per_step)
        return [made_group(number, tokens=tokens) for number in numbers]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        sizes, spent = [], 0.0
        for part in range(3):
            journal = Journal.open(path)
            asyncio.run(
                write_steps(journal, range(part * steps + 1, (part + 1) * steps + 1), batch)
            )
            started = time.process_time()
            journal.prune_payloads((part + 1) * steps, keep_text=True)
            spent += time.process_time() - started
            journal.close()
            sizes.append(f"{path.stat().st_size / 2**20:.1f}")
    console.print(
        f"journal.keep_payloads = text, {tokens} tokens a response, {8 * per_step} responses a step: "
        f"{' -> '.join(sizes)} MiB after {steps}, {2 * steps} and {3 * steps} steps; "
        f"{1e3 * spent / (3 * steps):.1f} CPU ms a step\n",
        highlight=False,
    )


async def write_steps(journal: Any, steps: range, batch: Callable[[int], list]) -> list[tuple]:
    """Write the records of steps; return (seconds the loop waits, seconds of all records) of each."""
    from penstock.types import StepReport

    times = []
    for step in steps:
        groups = batch(step)
        started = time.perf_counter()
        for group in groups:
            journal.drawn(group)
        await asyncio.gather(*(journal.landed(group) for group in groups))
        landed = time.perf_counter()
        await journal.begin_step(step, groups)
        await journal.commit_step(StepReport(step=step, policy_version=step, digest="d" * 32))
        ended = time.perf_counter()
        times.append((ended - landed, ended - started))
    return times


def measure_lengths(lengths: list[int], per_step: int = 8) -> None:
    """Write the records of a long run; print what a step costs around each of those lengths."""
    from penstock.store.journal import Journal

    def batch(step: int) -> list:
        return [made_group((step - 1) * per_step + index) for index in range(per_step)]

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder) / "journal.db")
        last = max(lengths)
        cpu = time.process_time()
        times = asyncio.run(write_steps(journal, range(1, last + 1), batch))
        cpu = time.process_time() - cpu
        journal.close()
        size = (Path(folder) / "journal.db").stat().st_size
    table = Table("around step", "loop waits, ms", "all records of a step, ms", box=None)
    for length in lengths:
        near = times[max(0, length - 50) : length]
        waits, whole = (1e3 * statistics.median(part) for part in zip(*near, strict=True))
        table.add_row(f"{length:,}", f"{waits:.2f}", f"{whole:.2f}")
    console.print(
        f"the journal alone, {per_step} groups of 8 responses a step, {size / 2**20:.0f} MiB; "
        f"{last * per_step / sum(whole for _, whole in times):,.0f} groups/s, "
        f"{1e6 * cpu / (last * per_step):.0f} CPU us a group with the making of it:",
        highlight=False,
    )
    console.print(table)


def measure_large_step(step_s: float, groups: int, responses: int, tokens: int) -> None:
    """Write the records of large steps; print their share of the time that such a step takes."""
    from penstock.store.journal import Journal
    from penstock.types import Batch

    def batch(step: int) -> list:
        return [made_group(step * groups + n, responses, tokens) for n in range(groups)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        journal = Journal.open(path)
        times = asyncio.run(write_steps(journal, range(1, 8), batch))
        journal.close()
        size = path.stat().st_size / 7
    waits, whole = (statistics.median(part) for part in zip(*times, strict=True))
    trained = Batch(step=1, groups=tuple(batch(0)))
    started = time.thread_time()
    trained.fingerprints()
    evidence = time.thread_time() - started
    console.print(
        f"a step of {groups} groups of {responses} responses of {tokens} tokens in {step_s:g} s: "
        f"the loop waits {1e3 * waits:.1f} ms for the journal ({waits / step_s:.2%}), the trainer's "
        f"record of its batch takes {1e3 * evidence:.0f} CPU ms ({evidence / step_s:.2%}); beside "
        f"it the journal writes {size / 2**20:.1f} MiB in {1e3 * whole:.0f} ms ({whole / step_s:.2%})\n",
        highlight=False,
    )


def made_group(number: int, responses: int = 8, tokens: int = 24) -> Any:
    from penstock.types import Group, Prompt, Rollout, Score, Status, VersionSegment

    ids = np.arange(tokens)
    prompt = Prompt(f"p:{number}", ({"role": "user", "content": f"question {number}"},), ids[:8])
    rollouts = []
    for index in range(responses):
        rollout = Rollout(rollout_id=f"t:{number}.{index}", prompt_ids=prompt.token_ids, seed=0)
        segments = (VersionSegment(number // 32, tokens),)
        rollout.append(ids, np.zeros(tokens, dtype=np.float32), segments)
        rollout.score, rollout.text = Score(1.0), "an answer of about this length"
        rollout.move_to(Status.COMPLETED)
        rollouts.append(rollout)
    return Group(group_id=f"t:{number}", task="t", cursor=number, prompt=prompt, rollouts=rollouts)


def measure_beside(gib: float) -> None:
    """Time fsyncs of 20 kB, as the journal's, while a checkpoint's file goes to disk: by fsync, and as Penstock does it."""
    from penstock.files import sync

    def fsync(path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    block = os.urandom(16 << 20)
    for name, force in (("fsync", fsync), ("penstock", sync)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            large, small = Path(folder) / "large", Path(folder) / "small"
            with large.open("wb") as file:
                for _ in range(int(gib * 2**30) // len(block)):
                    file.write(block)
            waits, ended = [], threading.Event()

            def commit(small: Path = small, waits: list = waits, ended: Any = ended) -> None:
                with small.open("wb", buffering=0) as file:
                    while not ended.wait(0.02):
                        started = time.perf_counter()
                        file.write(block[:20_000])
                        os.fsync(file.fileno())
                        waits.append(time.perf_counter() - started)

            beside = threading.Thread(target=commit)
            beside.start()
            started = time.perf_counter()
            force(large)
            took = time.perf_counter() - started
            ended.set()
            beside.join()
            console.print(
                f"{name}: {gib:g} GiB in {took:.2f} s; small fsyncs beside it took "
                f"{1e3 * statistics.median(waits):.1f} ms, at most {1e3 * max(waits):.0f} ms",
                highlight=False,
            )


def measure_digest(gibibytes: list[float]) -> None:
    """Hash weights of those sizes: tensors of 16 MiB, 64 different ones, more than a cache holds."""
    import torch

    from penstock.weights.digest import digest_of

    pieces = [torch.full((4 * 2**20,), float(i)) for i in range(64)]
    columns = ("weights", "wall s", "CPU s", "GiB / CPU s", "digest is 1 % of a step of", "")
    table = Table(*columns, box=None)
    for size in gibibytes:
        count = max(1, round(64 * size))
        weights = [(f"layer.{i}", pieces[i % len(pieces)]) for i in range(count)]
        wall, cpu = time.perf_counter(), time.process_time()
        digest_of(weights)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rate = count / 64 / cpu
        on_cores = ", ".join(f"{100 * size / rate / n:.0f} s on {n} cores" for n in (1, 8, 16))
        numbers = (f"{size:g} GiB", f"{wall:.2f}", f"{cpu:.2f}", f"{rate:.2f}")
        table.add_row(*numbers, on_cores, "(computed from CPU s)")
    console.print(f"the digest alone, on {torch.get_num_threads()} thread(s):", highlight=False)
    console.print(table)


def measure_device_digest(gibibytes: list[float]) -> None:
    """Hash weights of those sizes on the GPU, and through the host; matrices of 32 MiB, random."""
    import torch

    from penstock.weights.digest import digest_of

    columns = ("weights on the GPU", "hashed there", "GiB/s", "through the host")
    table = Table(*columns, box=None)
    for size in gibibytes:
        count = max(1, round(32 * size))
        weights = [
            (f"layer.{i}", torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16))
            for i in range(count)
        ]
        digest_of(weights[:1])  # loads the kernels
        wall = time.perf_counter()
        there = digest_of(weights)
        wall = time.perf_counter() - wall
        host = time.perf_counter()
        assert there == digest_of((name, tensor.cpu()) for name, tensor in weights)
        host = time.perf_counter() - host
        table.add_row(f"{size:g} GiB", f"{wall:.4f} s", f"{size / wall:.0f}", f"{host:.2f} s")
        del weights
    console.print(f"the digest on {torch.cuda.get_device_name()}:", highlight=False)
    console.print(table)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--digest-gib", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="only this part: steps of a long run"
    )
    parser.add_argument("--step-s", type=float, help="only this part: seconds of a large step")
    parser.add_argument("--beside-gib", type=float, help="only this part: size of a checkpoint")
    parser.add_argument("--large", type=int, nargs=3, default=[64, 8, 512], metavar="N")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    console.print(f"{os.cpu_count()} cores, load {load:.1f} before the start", highlight=False)
    if options.lengths or options.step_s or options.beside_gib:
        if options.lengths:
            measure_lengths(options.lengths)
        if options.step_s:
            measure_large_step(options.step_s, *options.large)
        if options.beside_gib:
            measure_beside(options.beside_gib)
        return
    measure_digest(options.digest_gib)
    if has_gpu():
        measure_device_digest(options.digest_gib)
    if options.groups:
        measure_long_journal(options.groups)
        measure_pruning()
    if options.steps:
        measure_run(options.steps, options.checkpoint_every)


if __name__ == "__main__":
    main()
