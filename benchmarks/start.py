"""Print where the time goes from the command `penstock train` to the end of its first step.

    python benchmarks/start.py [--model qwen0.5b|smollm2-shape|small|demo|PATH] [--repeats 2] [--imports]
                               [--entry train|python|resume]

--entry python begins with `import penstock; penstock.train(...)`, --entry resume continues a run of one step.
Weights are random. The first run may also compile kernels and read files that the later ones find in caches, so
every run is printed. A worker says itself what it does while it starts (logs/run.log); the rest comes from
the run's timeline. --imports adds the packages that take a worker the longest to import.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

from grpo_step import Load, model_path, write_config

IMPORTS = "import penstock.training.consumer, penstock.engine.transformers.engine"
LINE = re.compile(r"start of (\S+): (.*); ([\d.]+) s in all since (\S+)$", re.M)


PROGRAM = "import penstock, sys; penstock.train(config=sys.argv[1])"


def one_run(model: str, load: Load, words: list[str], entry: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        config = write_config(model, load, 0, Path(scratch))
        run, command = Path(scratch) / "staleness-0", [sys.executable, "-m", "penstock.cli"]
        train, log = [*command, "train", str(config), *words], run / "logs" / "run.log"
        if entry == "resume":
            subprocess.run([*train, "train.steps=1"], stdout=subprocess.DEVNULL, check=True)
            train = [*command, "resume", str(run), "train.steps=2"]
            log.unlink()
        elif entry == "python":
            train = [sys.executable, "-c", PROGRAM, str(config)]
        steps = 1 + (entry == "resume")
        began, first = time.time(), 0.0
        with subprocess.Popen(train, stdout=subprocess.DEVNULL) as running:
            while running.poll() is None:
                metrics = run / "metrics.jsonl"
                if not first and metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                    first = time.time() - began
                time.sleep(0.02)
        if running.returncode:
            raise SystemExit(f"penstock ended with {running.returncode}")
        print(f"\nfrom the command to the end of the first step: {first:.2f} s", flush=True)
        print_workers(log.read_text(), began)
        print_driver(run / "timeline" / "events.jsonl", began)


def print_workers(log: str, began: float) -> None:
    day = datetime.fromtimestamp(began).date()
    for name, stages, total, since in LINE.findall(log):
        moment = datetime.combine(day, datetime.strptime(since, "%H:%M:%S.%f").time())
        after = moment.timestamp() - began
        print(f"  {name}: from {after:.2f} to {after + float(total):.2f} s")
        for stage in stages.split(", "):
            what, _, seconds = stage.removesuffix(" s").rpartition(" ")
            print(f"    {float(seconds):6.2f} s  {what}")


def print_driver(path: Path, began: float) -> None:
    wanted = {"session", "wait", "train", "publish", "ask", "sync"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if line["start"] >= began]  # a resumed run has earlier ones
    train_end = next((line["end"] for line in lines if line["what"] == "train"), float("inf"))
    print("  driver:")
    for line in sorted(lines, key=lambda line: line["start"]):
        if line["what"] in wanted and line["start"] <= train_end:
            what = f"{line['lane']}: {line['what']} {line.get('detail', '')}"
            print(f"    {line['start'] - began:6.2f} to {line['end'] - began:6.2f} s  {what}")


def print_imports() -> None:
    """Print the seconds that each package's own modules take to import; they overlap with nothing."""
    command = [sys.executable, "-X", "importtime", "-c", IMPORTS]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spent: Counter[str] = Counter()
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", log):
        spent[".".join(name.split(".")[:2])] += int(own)
    print(f"\nimports of a worker: {sum(spent.values()) / 1e6:.2f} s")
    for name, micros in spent.most_common(25):
        print(f"    {micros / 1e6:6.3f} s  {name}")


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen0.5b" if gpu else "small")
    parser.add_argument("--prompts", type=int, default=64 if gpu else 4)
    parser.add_argument("--new-tokens", type=int, default=256 if gpu else 16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--entry", choices=["train", "python", "resume"], default="train")
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the config")
    options = parser.parse_args()
    if options.set and options.entry == "python":
        parser.error("--set: allowed with the entries train and resume")
    with tempfile.TemporaryDirectory() as folder:
        model = model_path(options.model, Path(folder))
        for _ in range(options.repeats):
            load = Load(options.prompts, options.new_tokens, 1, 0)
            one_run(model, load, options.set, options.entry)
    if options.imports:
        print_imports()


if __name__ == "__main__":
    main()
