"""Which defaults learn best? One config, each candidate changes one setting, several seeds.

    python benchmarks/defaults.py --out defaults                       # the demo, on a CPU
    python benchmarks/defaults.py --out defaults --config my.toml --parallel 4 train.steps=60   # a GPU: runs share it
    python benchmarks/defaults.py --out defaults --show --picture docs/images/defaults.svg

Every (candidate, seed) is a `penstock train` in a process of its own; OUT/runs holds their folders, and a run
that is finished is not done again. Without `--config` the demo runs for 20 steps at twice its learning rate, so
that the middle of the curve, where candidates differ, is most of it. With `--parallel` above 1 curves count,
times do not.

Expected, before it was run: on the demo (responses of 19 to 23 tokens, staleness 1, an exact engine) no
candidate differs from the defaults by more than seeds differ from each other; dual clip is never active.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CANDIDATES: dict[str, list[str]] = {
    "defaults": [],
    "sequence mean": ["algorithm.aggregation=sequence"],
    "beta2 0.999": ["train.betas=[0.9, 0.999]"],
    "no dual clip": ["algorithm.dual_clip=0"],
    "plain masters": ["train.masters=plain"],
    "decoupled": ["algorithm.decoupled=true"],
}
DEMO = ["launch.kind=inline", "train.steps=20", "train.lr=2e-4", "eval.every_steps=0"]
QUIET = ["track.trackers=[]", "eval.at_start=false", "checkpoint.every_steps=0"]


def run_one(args: argparse.Namespace, candidate: str, seed: int) -> None:
    """Train one candidate with one seed; its log is beside the run folders."""
    name = f"{candidate.replace(' ', '-')}-{seed}"
    if (args.out / "runs" / name / "report.html").exists():
        return
    config = [str(args.config)] if args.config else DEMO
    command = [
        sys.executable,
        "-m",
        "penstock.cli",
        "train",
        *config,
        *QUIET,
        *CANDIDATES[candidate],
    ]
    command += [f"seed={seed}", f"run.dir={args.out / 'runs'}", f"run.name={name}", *args.settings]
    with (args.out / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"{name}: exit {done.returncode}", flush=True)


def read_curves(args: argparse.Namespace, candidate: str) -> dict[int, list[dict[str, float]]]:
    """Return the metrics of every step, by seed, of the runs that are there."""
    curves = {}
    for seed in args.seeds:
        path = args.out / "runs" / f"{candidate.replace(' ', '-')}-{seed}" / "metrics.jsonl"
        if path.is_file():
            curves[seed] = [json.loads(line) for line in path.read_text().splitlines()]
    return curves


def heldout(args: argparse.Namespace, candidate: str, seed: int) -> float:
    """Return the last held-out reward of a run, the mean over its evaluation tasks."""
    folder = args.out / "runs" / f"{candidate.replace(' ', '-')}-{seed}" / "eval"
    lines = [json.loads(line) for line in (folder / "summary.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    return statistics.mean(line["reward"] for line in lines if line["step"] == last)


def spread(values: list[float], digits: int = 3) -> str:
    """Return "mean (lowest to highest)"."""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(args: argparse.Namespace) -> str:
    lines = [
        "| candidate | seeds | held-out reward, last | reward, mean over steps | clip/fraction | grad_norm |",
        "|---|---|---|---|---|---|",
    ]
    for candidate in args.candidates:
        curves = read_curves(args, candidate)
        if not curves:
            continue

        def mean(name: str, curves: dict[int, list[dict[str, float]]] = curves) -> list[float]:
            return [statistics.mean(row[name] for row in rows) for rows in curves.values()]

        last = [heldout(args, candidate, seed) for seed in curves]
        lines.append(
            f"| {candidate} | {len(curves)} | {spread(last)} | {spread(mean('reward/mean'))} "
            f"| {spread(mean('clip/fraction'), 5)} | {spread(mean('grad_norm'), 2)} |"
        )
    return "\n".join(lines)


def draw(args: argparse.Namespace) -> None:
    """Draw the mean curve of each candidate and the range of its seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for candidate in args.candidates:
        curves = [
            [row["reward/mean"] for row in rows] for rows in read_curves(args, candidate).values()
        ]
        if not curves:
            continue
        steps = range(1, min(map(len, curves)) + 1)
        columns = list(zip(*curves, strict=False))
        (line,) = axes.plot(steps, [statistics.mean(column) for column in columns], label=candidate)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel="reward of the step's samples")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="a config file; default: the demo")
    parser.add_argument("--candidates", type=lambda text: text.split(","), default=list(CANDIDATES))
    parser.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--picture", type=Path, help="where to write the picture, an SVG")
    parser.add_argument("settings", nargs="*", help="key=value for every run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.show:
        pairs = [(candidate, seed) for seed in args.seeds for candidate in args.candidates]
        with ThreadPoolExecutor(args.parallel) as pool:
            list(pool.map(lambda pair: run_one(args, *pair), pairs))
    print(table(args))
    if args.picture:
        draw(args)


if __name__ == "__main__":
    main()
