"""Does `sampler = "difficulty"` save generation? Tokens until the same held-out accuracy, against `shuffle`.

    python benchmarks/curriculum.py --out curriculum             # the demo policy, on a CPU
    python benchmarks/curriculum.py --out few --prompts 48       # the same steps are four times the passes
    python benchmarks/curriculum.py --out curriculum --show

Two sets of 192 prompts: `plain` has sums of two digits, all about equally hard for the demo policy; `mixed` has a
third of them, a third of sums below 10, and a third of four digits, which the policy does not learn. Every (data,
sampler, seed) is a `penstock train` that ends at the target; a run that is finished is not done again.

Expected, before it was run: no difference on `plain`; on `mixed` difficulty needs a half to two thirds of the
tokens, since after a pass it draws few of the sums that cannot be learned. Found: docs/controls.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from penstock.data.builtin import load

DATA, SAMPLERS = ("plain", "mixed"), ("shuffle", "difficulty")
SCORE = "heldout/accuracy"
SETTINGS = [
    *("launch.kind=inline", "produce.strategy=sync", "train.groups_per_step=16", "train.lr=2e-4"),
    *("eval.every_steps=2", "eval.at_start=false", "checkpoint.every_steps=0"),
    *("track.trackers=[]", "train.steps=80"),
]


def write_data(folder: Path, size: int) -> None:
    """Write both sets of prompts; none is a held-out problem of the demo."""
    draw = random.Random(0)
    plain, third = load("addition", {"size": size}), size // 3
    easy = [(a, b) for a in range(10) for b in range(10)]
    pairs = draw.sample(easy, third)
    pairs += [(draw.randint(1000, 9999), draw.randint(1000, 9999)) for _ in range(third)]
    others = [{"prompt": f"{a}+{b}", "gt_answer": str(a + b)} for a, b in pairs]
    for name, records in (("plain", plain), ("mixed", [*plain[:third], *others])):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)


def train(args: argparse.Namespace, data: str, sampler: str, seed: int) -> None:
    name = f"{data}-{sampler}-{seed}"
    if (args.out / "runs" / name / "report.html").exists():
        return
    command = [sys.executable, "-m", "penstock.cli", "train", *SETTINGS]
    command += [f"tasks.train.data={args.out / data}.jsonl", f"tasks.train.sampler={sampler}"]
    command += [f"train.stop_when=['{SCORE} >= {args.target}']", f"seed={seed}"]
    command += [f"run.dir={args.out / 'runs'}", f"run.name={name}", *args.settings]
    with (args.out / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"{name}: exit {done.returncode}", flush=True)


def tokens(args: argparse.Namespace, data: str, sampler: str, seed: int) -> tuple[int, int]:
    """(tokens that were generated, steps) until the run ended; evaluations generate no counted token."""
    path = args.out / "runs" / f"{data}-{sampler}-{seed}" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return int(sum(line["produced/tokens"] for line in lines)), len(lines)


def show(args: argparse.Namespace) -> None:
    for data in DATA:
        means = {}
        for sampler in SAMPLERS:
            counts = [tokens(args, data, sampler, seed) for seed in args.seeds]
            means[sampler] = statistics.mean(count for count, _ in counts)
            each = ", ".join(f"{count:,} in {steps} steps" for count, steps in counts)
            print(f"{data:6} {sampler:11} mean {means[sampler]:>9,.0f} tokens  ({each})")
        print(f"{data:6} difficulty / shuffle: {means['difficulty'] / means['shuffle']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--prompts", type=int, default=192, help="of each set; at most 300")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("settings", nargs="*", help="overrides for every run")
    args = parser.parse_args()
    args.out = args.out.resolve()
    if not args.show:
        args.out.mkdir(parents=True, exist_ok=True)
        write_data(args.out, args.prompts)
        for seed in args.seeds:
            for data in DATA:
                for sampler in SAMPLERS:
                    train(args, data, sampler, seed)
    show(args)


if __name__ == "__main__":
    main()
