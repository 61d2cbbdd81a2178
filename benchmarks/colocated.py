"""One GPU for engine and trainer: the memory of each in its turn, and the cost of a hand-over.

    python benchmarks/colocated.py                      # CPU: a tiny size, to see that it works
    python benchmarks/colocated.py --size 1.5b          # one GPU, a Qwen3 shape of 1.5B parameters
    python benchmarks/colocated.py --size 1.5b --fill   # sized so that both together do not fit
    python benchmarks/colocated.py --size 1.5b --fill --beside   # the same without turns: does not start

A real local run (launch.colocate=true) in a process of its own, which is ended after --timeout seconds
whatever happens. Device memory is sampled from outside (mem_get_info; nvidia-smi by process where it
tells) and matched with the run's own timeline. Weights are random; the reward is a sum of token
ids.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.config import Config
from penstock.config.demo import policy_path
from penstock.config.source import load_config
from penstock.inspection.timeline import Event, read_events

GIB = 2**30
SAMPLE_S, PROCESS_SAMPLE_S, STOP_S = 0.005, 0.5, 20.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    groups: int  # groups of 8 responses in a step
    tokens: int  # tokens of a response
    slots: int


SIZES = {
    "tiny": Size(64, 2, 4, 2, 16, 128, 512, 4, 16, 16),
    "0.6b": Size(1024, 28, 16, 8, 128, 3072, 32768, 16, 512, 128),
    "1.5b": Size(2048, 28, 16, 8, 128, 6144, 32768, 16, 512, 128),
}


def reward(rollout) -> float:
    """Return a reward that differs within nearly every group."""
    return float(int(rollout.response_ids.sum()) % 5) / 4


# ---- the run, in a process of its own


def make_model(size: Size, folder: Path) -> int:
    """Save random weights and the demo's tokenizer; return the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(Path(policy_path()) / name, folder / name)
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    size = SIZES[arguments.size]
    share = 0.85 if arguments.fill else 0.3
    slots = 2 * size.slots if arguments.fill else size.slots
    words = [
        f"run.dir={folder}",
        "run.name=colocated",
        f"model.path={folder / 'model'}",
        "tasks.train.data=addition",
        f"tasks.train.rewards=[{{type='{Path(__file__).resolve()}:reward'}}]",
        f"train.steps={arguments.steps}",
        f"train.groups_per_step={size.groups}",
        "train.lr=1e-6",
        "sampling.num_generations=8",
        f"sampling.max_tokens={size.tokens}",
        f"engine.max_slots={slots}",
        f"engine.options={{kv_memory_share={share}}}",
        "produce.strategy=sync",
        "produce.max_staleness=0",
        f"sync.every_steps={arguments.sync_every}",
        "eval.tasks={}",
        "checkpoint.every_steps=0",
        "track.trackers=[]",
        f"launch.colocate={'false' if arguments.beside else 'true'}",
        "launch.max_restarts=0",
        *arguments.overrides,
    ]
    return load_config(None, words).config


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Train; with --snapshot, copy an offloaded trainer's state at the end."""
    from penstock.run.job import open_job
    from penstock.run.loop import Loop
    from penstock.run.recover import begin
    from penstock.store.run_folder import create

    parameters = make_model(SIZES[arguments.size], folder / "model")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"model: {parameters / 1e9:.2f}B parameters, saved; starting the run", flush=True)
    config = config_of(arguments, folder)
    run_folder = create(config)

    async def train() -> dict[str, object]:
        async with open_job(config, run_folder) as job:
            print(f"started: {job.workers.description}", flush=True)
            await begin(job)
            await Loop(job).run()
            stats, identity = await job.engine.stats(), await job.trainer.identity()
            found: dict[str, object] = {
                "same_weights": (stats.policy_version, stats.digest) == identity
            }
            if arguments.snapshot:
                since = time.time()
                await job.trainer.snapshot(str(folder / "snapshot"))
                found["snapshot"] = [since, time.time()]
            return found

    found = asyncio.run(train())
    (folder / "found.json").write_text(json.dumps(found))


# ---- watching it


@dataclass
class Watch:
    """Samples device memory over time, from outside the run."""

    used: list[tuple[float, int]] = field(default_factory=list)  # bytes of the whole device
    by_process: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    total: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self, logs: Path) -> Iterator[None]:
        threads = []
        if torch.cuda.is_available():
            torch.cuda.init()
            self.total = torch.cuda.mem_get_info()[1]
            threads = [threading.Thread(target=self._sample, daemon=True)]
        if shutil.which("nvidia-smi"):
            ask = threading.Thread(target=self._sample_processes, args=(logs,), daemon=True)
            threads.append(ask)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(timeout=10)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            free, total = torch.cuda.mem_get_info()
            self.used.append((time.time(), total - free))

    def _sample_processes(self, logs: Path) -> None:
        query = [
            "nvidia-smi",
            "--query-compute-apps=pid,used_memory",
            "--format=csv,noheader,nounits",
        ]
        while not self._over.wait(PROCESS_SAMPLE_S):
            self.names.update(_workers(logs))
            with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
                told = subprocess.run(query, capture_output=True, text=True, timeout=5)
                rows = [line.split(",") for line in told.stdout.splitlines() if "," in line]
                held = {int(pid): int(mib) * 2**20 for pid, mib in rows}
                self.by_process.append((time.time(), held))

    def most(self, *spans: tuple[float, float]) -> float:
        return max(self._within(spans), default=0) / GIB

    def least(self, *spans: tuple[float, float]) -> float:
        return min(self._within(spans), default=0) / GIB

    def _within(self, spans: Sequence[tuple[float, float]]) -> list[int]:
        return [used for at, used in self.used if any(start <= at <= end for start, end in spans)]

    def most_of(self, name: str, start: float, end: float) -> float | None:
        """Return the most memory of a process; None if nvidia-smi does not report it."""
        pids = {pid for pid, known in self.names.items() if known == name}
        found = [
            held[pid]
            for at, held in self.by_process
            if start <= at <= end
            for pid in pids & held.keys()
        ]
        return max(found) / GIB if found else None


def _workers(logs: Path) -> dict[int, str]:
    """Return the process ids of the workers, found by the log that each writes."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                log = Path(os.readlink(process / "fd" / "2"))
                if log.parent == logs and log.suffix == ".log":
                    found[int(process.name)] = log.stem
    return found


# ---- what it says


@dataclass(frozen=True)
class Turns:
    """The run's timeline as turns; `of(lane, what)` returns the events of one kind in order."""

    events: list[Event]

    def of(self, lane: str, what: str) -> list[Event]:
        return [event for event in self.events if event.lane == lane and event.what == what]

    def trainers(self) -> list[tuple[float, float]]:
        """Return the trainer's turns: from the engine asleep to the trainer asleep."""
        asleep, offloaded = self.of("engine-0", "sleep"), self.of("trainer", "sleep")
        return [(one.end, other.start) for one, other in zip(asleep, offloaded, strict=False)]

    def between(self) -> list[tuple[float, float]]:
        """Return the times when both sleep: between the trainer's release and the engine's wake-up."""
        offloaded, awake = self.of("trainer", "sleep"), self.of("engine-0", "wake")
        return [(one.end, other.start) for one, other in zip(offloaded, awake, strict=False)]

    def engines(self) -> list[tuple[float, float]]:
        """Return the engine's turns: from its wake-up (first from its start) to its pause."""
        first = min((event.start for event in self.of("engine-0", "generate")), default=0.0)
        begins = [first, *(event.end for event in self.of("engine-0", "wake"))]
        ends = [event.start for event in self.of("engine-0", "sleep")]
        last = max((event.end for event in self.events), default=0.0)
        return list(zip(begins, [*ends, last], strict=False))


def table(turns: Turns, watch: Watch) -> None:
    print(
        "\nturn              s   device GiB (most)   engine-0   trainer   (by process: nvidia-smi)"
    )
    rows = [("engine", span) for span in turns.engines()]
    rows += [("trainer", span) for span in turns.trainers()]
    rows += [("both asleep", span) for span in turns.between()]
    for name, (start, end) in sorted(rows, key=lambda row: row[1]):
        own = [watch.most_of(lane, start, end) for lane in ("engine-0", "trainer")]
        told = "  ".join("       -" if one is None else f"{one:8.2f}" for one in own)
        print(f"{name:12s} {end - start:7.2f}   {watch.most((start, end)):17.2f}   {told}")
    print("\nhand-over, seconds of each (in order)")
    for lane, what, words in (
        ("engine-0", "pause", "engine: pause and resume"),
        ("engine-0", "sleep", "engine: sleep (weights out, cache and graphs dropped)"),
        ("trainer", "wake", "trainer: wake (reload)"),
        ("trainer", "train", "trainer: the step itself"),
        ("trainer", "sleep", "trainer: sleep (offload)"),
        ("trainer", "publish", "trainer: publish"),
        ("engine-0", "sync", "engine: load the new weights, asleep"),
        ("engine-0", "wake", "engine: wake (weights in, cache and graphs made)"),
    ):
        seconds = " ".join(f"{event.end - event.start:.2f}" for event in turns.of(lane, what))
        print(f"  {words:55s} {seconds or '-'}")


def verdict(arguments: argparse.Namespace, turns: Turns, watch: Watch, found: dict) -> bool:
    """Return whether the memory that one side held in its turn was free for the other."""
    trained = len(turns.of("trainer", "train"))
    good = trained == arguments.steps and bool(found.get("same_weights"))
    print(f"\nsteps trained: {trained} of {arguments.steps}")
    print(f"engine and trainer hold the same weights: {found.get('same_weights')}")
    if "snapshot" in found:
        since, until = span = tuple(found["snapshot"])
        print(
            f"state of the offloaded trainer copied in {until - since:.2f} s; device memory meanwhile "
            f"{watch.least(span):.2f} to {watch.most(span):.2f} GiB"
        )
    if not watch.used:
        print("device memory: 0 of 0 GiB (no GPU)")
        return good
    trainer, engine = watch.most(*turns.trainers()), watch.most(*turns.engines())
    floor = watch.least(*turns.between())
    both, most = trainer + engine - floor, max(used for _, used in watch.used) / GIB
    print(
        f"device: {watch.total / GIB:.1f} GiB; both asleep {floor:.2f}; the trainer's turn takes "
        f"{trainer - floor:.2f} more, the engine's {engine - floor:.2f} more"
    )
    print(f"both at once would be {both:.2f} GiB; most that was in use at any time: {most:.2f} GiB")
    handed = both > most + 0.5
    print(f"memory of one turn was free for the other: {'yes' if handed else 'NO'}")
    if arguments.fill:
        does_not_fit = both > watch.total / GIB
        print(f"both together do not fit on the device: {'yes' if does_not_fit else 'NO'}")
        good = good and does_not_fit
    return good and handed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=1, help="sync.every_steps")
    parser.add_argument(
        "--fill", action="store_true", help="a cache that leaves no room for the trainer"
    )
    parser.add_argument("--beside", action="store_true", help="launch.colocate=false, to compare")
    parser.add_argument("--snapshot", action="store_true", help="copy a offloaded trainer's state")
    parser.add_argument(
        "--timeout", type=float, default=170.0, help="seconds after which it is ended"
    )
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides", nargs="*", help="settings over those of the benchmark: key=value"
    )
    arguments = parser.parse_args()
    if arguments.inside:
        run(arguments, Path(arguments.inside))
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-colocated-") as name:
        return watched_run(arguments, Path(name))


def watched_run(arguments: argparse.Namespace, folder: Path) -> int:
    watch, started = Watch(), time.time()
    logs = folder / "colocated" / "logs"
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *sys.argv[1:],
        "--inside",
        str(folder),
    ]
    with watch.watching(logs):
        child = subprocess.Popen(command, start_new_session=True)
        try:
            code = child.wait(timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            code = -1
            print(f"not through after {arguments.timeout:g} s: it is stopped", flush=True)
            child.send_signal(signal.SIGINT)  # lets the run write its timeline
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=STOP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    print(f"the run ended with {code} after {time.time() - started:.1f} s")
    return report(arguments, folder, watch, code)


def report(arguments: argparse.Namespace, folder: Path, watch: Watch, code: int) -> int:
    """Print everything that is known, also of a run that failed."""
    from penstock.errors import PenstockError
    from penstock.store.run_folder import RunFolder

    if code:
        print(f"the last lines of its workers, of {folder}:")
        for log in sorted((folder / "colocated" / "logs").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            print(f"--- {log.name}, its end", *lines[-15:], sep="\n")
    try:
        turns = Turns(read_events(RunFolder(folder / "colocated")))
    except PenstockError as error:
        print(error)
        return 1
    table(turns, watch)
    print(f"  trainer's own peak, as torch counts it: {_trainer_peak(folder):.2f} GiB")
    found_path = folder / "found.json"
    found = json.loads(found_path.read_text()) if found_path.exists() else {}
    good = False
    if turns.trainers():
        good = verdict(arguments, turns, watch, found)
    else:
        print("no turns were taken")
    return 0 if good and not code else 1


def _trainer_peak(folder: Path) -> float:
    """Return the peak of the newest step (max_memory_allocated; on a CPU the process's memory)."""
    path = folder / "colocated" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    peaks = [json.loads(line).get("memory/peak_mib", 0.0) for line in lines]
    return max(peaks, default=0.0) / 1024


if __name__ == "__main__":
    sys.exit(main())
