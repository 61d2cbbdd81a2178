"""How many sampled tokens does a student need to be as good as its teacher, with and without the teacher?

    python benchmarks/distill.py --out distill [--seeds 3]
    python benchmarks/distill.py --out distill --show    # the table and the picture of what is there

The teacher of each seed is the demo's policy after `penstock train`, GRPO with the demo's settings. The student
is the demo's policy again, distilled on its own samples: the reverse KL over the whole vocabulary, one response
to a prompt. Both are evaluated on the same held-out sums. Shown are the tokens that each needed to an accuracy of
0.95, and to the teacher: within one standard error of its last accuracy.

Expected, before it was run: a tenth of GRPO's tokens; a teacher grades every token, a reward one response.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

PROBLEMS = 821  # all held-out sums
COMMON = [f"eval.max_problems={PROBLEMS}", "track.trackers=[]"]
TEACHER = ["train.steps=80", "eval.every_steps=4"]
STUDENT = [
    "algorithm.name=distill",
    "algorithm.teacher=grown",
    "algorithm.divergence=reverse",
    "sampling.num_generations=1",
    "train.groups_per_step=64",
    "train.steps=40",
    "train.lr=5e-4",
    "train.schedule=cosine",
    "eval.every_steps=4",
]


def train(out: Path, name: str, seed: int, words: list[str]) -> None:
    """Make one run in a process of its own, unless it is there; its log is beside it."""
    if (out / name / "report.html").is_file():
        return
    settings = [f"run.dir={out}", f"run.name={name}", f"seed={seed}", *COMMON, *words]
    with (out / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "penstock.cli", "train", *settings]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)


def curve(folder: Path) -> list[tuple[int, float]]:
    """The held-out accuracy by the tokens that were sampled for training until then."""
    tokens, spent = {0: 0}, 0
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        spent += int(line["produced/tokens"])  # without those of evaluations
        tokens[line["step"]] = spent
    rows = map(json.loads, (folder / "eval" / "summary.jsonl").read_text().splitlines())
    return [(tokens[row["step"]], row["accuracy"]) for row in rows]


def tokens_to(points: list[tuple[int, float]], goal: float) -> int | None:
    return next((tokens for tokens, accuracy in points if accuracy >= goal), None)


def show(out: Path) -> None:
    print("| seed | teacher | student's last | goal | GRPO tokens | distilled tokens | share |")
    print("|---|---|---|---|---|---|---|")
    pairs = []
    for folder in sorted(out.glob("grpo-*[0-9]/")):
        seed = folder.name.partition("-")[2]
        grown, taught = curve(folder), curve(out / f"distilled-{seed}")
        pairs.append((grown, taught))
        last = grown[-1][1]
        for goal in (0.95, last - math.sqrt(last * (1 - last) / PROBLEMS)):
            own, other = tokens_to(grown, goal), tokens_to(taught, goal)
            share = f"{other / own:.3f}" if own and other else "-"
            cells = (seed, f"{last:.3f}", f"{taught[-1][1]:.3f}", f"{goal:.3f}", own, other, share)
            print("|", " | ".join(map(str, cells)), "|")
    draw(pairs, out / "distill.svg")


def draw(pairs: list[tuple[list[tuple[int, float]], list[tuple[int, float]]]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "penstock"
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for number, pair in enumerate(pairs):
        for colour, (name, points) in enumerate(zip(("GRPO", "distilled"), pair, strict=True)):
            label = name if number == 0 else None
            axis.plot(*zip(*points, strict=True), color=f"C{colour}", label=label)
    axis.set(xlabel="sampled tokens", ylabel="held-out accuracy", xscale="symlog")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(0 if args.show else args.seeds):
        train(args.out, f"grpo-{seed}", seed, TEACHER)
        teacher = f"teachers.grown.path={args.out / f'grpo-{seed}'}"
        train(args.out, f"distilled-{seed}", seed, [teacher, *STUDENT])
    show(args.out)


if __name__ == "__main__":
    main()
