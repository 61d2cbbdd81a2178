"""Six ways to round the policy's weights, on one task: how much of an update arrives, and what is learned.

    python benchmarks/precision.py demo --out demo.jsonl                     # a CPU, emulated coarse grid
    python benchmarks/precision.py sums --model smollm2 --out sums.jsonl     # a GPU, real formats
    python benchmarks/precision.py show demo.jsonl                           # the table of what is there
    python benchmarks/precision.py lora [--lr 1e-5]                          # what engines get of adapters
    python benchmarks/precision.py first smollm2                             # what arrives of a first update, on a CPU

float32      nothing is rounded
plain        masters start at the weights, on the grid
dithered     masters start anywhere in the weights' rounding cells
stochastic   masters start at the weights; every publication rounds them up or down at random
float16      as plain, on a grid that is 8 times as fine; a real float16 with a loss scale on a GPU
float16-dithered    both

`demo` trains the policy that ships, its weights rounded to `--bits` significant bits, so that a CPU shows at lr 1e-5 in 100
steps what bfloat16 does to larger models. `sums` trains a model folder, its weights rounded to bfloat16 first,
on examples/sums. Every run is a process of its own (`--parallel` at a time), on-policy and inline, and appends a line
to OUT after each step. Runs that share a GPU give curves, not times. `--minutes` ends what still runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
SUMS = HERE.parent / "examples" / "sums"
VARIANTS = ("float32", "plain", "dithered", "stochastic", "float16", "float16-dithered")
MORE_BITS_OF_FLOAT16 = 3
SHOWN_STEPS = (1, 5, 10, 20, 40, 60, 80, 100)


# ---- grids of few significant bits, and the masters beside them


def bits_between(tensor: Tensor, bits: int) -> int:
    """Return the number of float32 patterns from one number of `bits` significant bits to the next."""
    assert tensor.dtype == torch.float32
    return 1 << (24 - bits)


def rounded(exact: Tensor, bits: int) -> Tensor:
    """Round float32 to nearest, ties to even, with `bits` significant bits."""
    step = bits_between(exact, bits)
    pattern = exact.contiguous().view(torch.int32)
    odd = torch.div(pattern, step, rounding_mode="floor") & 1
    return (torch.div(pattern + step // 2 - 1 + odd, step, rounding_mode="floor") * step).view(
        torch.float32
    )


def rounded_at_random(exact: Tensor, bits: int) -> Tensor:
    """Round up or down with the probabilities that make the mean right."""
    step = bits_between(exact, bits)
    pattern = exact.contiguous().view(torch.int32) + torch.randint_like(
        exact, step, dtype=torch.int32
    )
    return (torch.div(pattern, step, rounding_mode="floor") * step).view(torch.float32)


def dithered(exact: Tensor, bits: int) -> Tensor:
    """Move numbers of the grid to a random place inside their rounding cells."""
    step = bits_between(exact, bits)
    offset = torch.randint_like(exact, step - 1, dtype=torch.int32) + 1 - step // 2
    moved = (exact.contiguous().view(torch.int32) + offset).view(torch.float32)
    return torch.where(exact == 0, exact, moved)


def install_masters(variant: str, bits: int) -> None:
    """Make the consumer of this process round as the variant says; 0 bits: the formats of torch."""
    from penstock.training import consumer, optimizer

    class Coarse(optimizer.Masters):
        """Masters beside float32 weights that lie on a grid."""

        def __init__(self, model: Any, dtype: torch.dtype, **fields: Any) -> None:
            super().__init__(model, dtype, **fields)
            for name, parameter in list(self.parameters.items()):
                master = torch.nn.Parameter(parameter.detach().clone())
                self.rounded[name], self.parameters[name] = parameter, master
                parameter.register_post_accumulate_grad_hook(optimizer._AddGradientTo(master))

        @torch.no_grad()
        def dither(self, seed: int) -> None:
            for name, master in self.parameters.items():
                torch.manual_seed(seed)
                master.copy_(dithered(master, bits))
                assert torch.equal(rounded(master, bits), self.rounded[name])

        @torch.no_grad()
        def write_back(self) -> None:
            way = rounded_at_random if variant == "stochastic" else rounded
            for name, parameter in self.rounded.items():
                parameter.copy_(way(self.parameters[name], bits))

    class Stochastic(optimizer.Masters):
        """Masters beside bfloat16 weights, rounded at random."""

        @torch.no_grad()
        def write_back(self) -> None:
            for name, parameter in self.rounded.items():
                parameter.copy_(rounded_at_random(self.parameters[name], 8))

    if bits and variant != "float32":
        consumer.Masters = Coarse  # type: ignore[misc]
    elif variant == "stochastic":
        consumer.Masters = Stochastic  # type: ignore[misc]


# ---- one run


class LineTracker:
    """Appends the figures of each step and evaluation to the file that the environment names."""

    def __init__(self, info: Any) -> None:
        self._path = Path(os.environ["PRECISION_OUT"])
        self._head = json.loads(os.environ["PRECISION_RUN"])

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        names = ("reward/mean", "update/arrived", "mismatch/kl", "response_length/mean")
        names = (*names, "updates/skipped", "loss_scale", "time/step_s")
        self._append({"step": step} | {name: metrics.get(name) for name in names})

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        self._append({"step": step} | {f"eval/{name}": value for name, value in metrics.items()})

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """Every line is already in the file."""

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._head | line) + "\n")


def run_one(task: str, model: Path, run: dict[str, Any], words: list[str]) -> None:
    """Train one variant in this process."""
    from penstock.config.source import load_config
    from penstock.run.session import train_new

    torch.set_num_threads(1)
    variant = run["variant"]
    install_masters(variant, run["bits"])
    masters = "dithered" if "dithered" in variant else "plain"
    overrides = [
        f"model.path={model}",
        f"seed={run['seed']}",
        f"train.lr={run['lr']}",
        f"train.steps={run['steps']}",
        f"train.masters={masters}",
        "launch.kind=inline",
        "produce.strategy=sync",
        "produce.max_staleness=0",
        f'track.trackers=["{Path(__file__).resolve()}:LineTracker"]',
        f"run.dir={model.parent / 'runs'}",
        f"run.name={variant}-{run['lr']}-{run['seed']}",
        "eval.every_steps=0",
        "eval.blocking=true",
        "checkpoint.every_steps=0",
    ]
    if task == "sums":
        dtype = variant.split("-")[0] if variant.startswith("float") else "bfloat16"
        overrides += [
            f"model.dtype={dtype}",
            "engine.max_slots=1024",
            "engine.options.max_tokens_in_flight=200000",
            "engine.options.kv_memory_share=0.3",
            "train.micro_batch_tokens=8192",
        ]
    config = None if task == "demo" else str(SUMS / "sums.toml")
    train_new(load_config(config, [*overrides, *words]).config)


def write_model(args: argparse.Namespace, folder: Path, bits: int) -> Path:
    """Write the model with its weights rounded to the grid, as a hub checkpoint would have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from penstock.config.demo import resolve_model_path

    source = resolve_model_path(args.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter, bits or 8))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


# ---- adapters


def show_lora(rate: float, steps: int) -> None:
    """Train adapters on random tokens; print which share of their product the engines receive.

    The second figure is the same share of the change of log-probs, the third what the rounding adds to
    them, both with float32 arithmetic, so that only the weights' rounding counts.
    """
    from transformers import AutoModelForCausalLM

    from penstock.config import Config
    from penstock.config.demo import policy_path
    from penstock.training.consumer import Consumer

    sys.path.insert(0, str(HERE.parent / "tests"))
    from stages.training_data import random_batch

    torch.set_num_threads(1)
    probe = AutoModelForCausalLM.from_pretrained(policy_path(), dtype=torch.bfloat16).float()
    ids = torch.randint(1, 23, (64, 24), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logprobs(weights: dict[str, Tensor]) -> Tensor:
        probe.load_state_dict(weights, strict=False)
        table = probe(ids).logits[:, :-1].double().log_softmax(-1)
        return table.gather(-1, ids[:, 1:, None]).flatten()

    with tempfile.TemporaryDirectory() as folder:
        probe.bfloat16().save_pretrained(folder)
        probe.float()
        for masters in ("plain", "dithered"):
            fields = {
                "model": {"path": folder, "dtype": "bfloat16", "lora": {"rank": 16}},
                "train": {"lr": rate, "masters": masters},
            }
            consumer = Consumer.from_config(Config.model_validate(fields), total_steps=steps)
            start = {name: tensor.float() for name, tensor in consumer.weights()}
            for step in range(1, steps + 1):
                consumer.train(random_batch(step, seed=step, groups=8))
                if step in (1, 5, steps):
                    received = {name: tensor.float() for name, tensor in consumer.weights()}
                    exact = {name: start[name] + _product(consumer, name) for name in start}
                    shares = [_share(received, exact, start)]
                    base, got, want = (logprobs(one) for one in (start, received, exact))
                    shares += [_slope(got - base, want - base), float((got - want).std())]
                    print(masters, "step", step, *(f"{share:.4f}" for share in shares), flush=True)


def _product(consumer: Any, name: str) -> Tensor | float:
    """Return what the adapters' masters add to a weight."""
    stem = name.removesuffix("weight")
    layer = consumer.policy.adapted_layers().get(f"{stem}base_layer.weight")
    if layer is None:
        return 0.0
    low, high = (
        consumer.masters.parameters[f"{stem}lora_{side}.default.weight"].detach() for side in "AB"
    )
    return layer.scaling["default"] * (high @ low)


def _share(
    received: dict[str, Tensor], exact: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    changes = [
        torch.cat([(one[name] - start[name]).flatten() for name in start])
        for one in (received, exact)
    ]
    return _slope(*changes)


def _slope(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() @ wanted.double()) / wanted.double().square().sum())


# ---- a first update


@torch.no_grad()
def show_first(source: str) -> None:
    """Print which share of a first update arrives in bfloat16, by where a checkpoint's numbers lie.

    The update adds or subtracts the learning rate, as AdamW's first one does, with random signs.
    """
    from transformers import AutoModelForCausalLM

    from penstock.config.demo import resolve_model_path
    from penstock.training.dither import dither_, dither_key

    model = AutoModelForCausalLM.from_pretrained(resolve_model_path(source), dtype=torch.float32)
    torch.manual_seed(0)
    print("| numbers | masters | lr 1e-6 | lr 5e-6 |\n|---|---|---|---|")
    for numbers in (None, torch.float16, torch.bfloat16):
        for masters in ("plain", "dithered"):
            dot, square = torch.zeros(2, 2, dtype=torch.float64)
            for name, parameter in model.named_parameters():
                exact = parameter.to(numbers or torch.float32).float()
                if masters == "dithered":
                    dither_(exact, torch.bfloat16, dither_key(0, name))
                weight = exact.to(torch.bfloat16).double()
                sign = torch.randint_like(exact, 2) * 2 - 1
                for at, rate in enumerate((1e-6, 5e-6)):
                    moved = exact + rate * sign
                    change = moved.double() - exact.double()
                    dot[at] += (change * (moved.to(torch.bfloat16).double() - weight)).sum()
                    square[at] += change.square().sum()
            label = "as saved" if numbers is None else f"rounded to {str(numbers)[6:]}"
            print(f"| {label} | {masters} |", *(f"{x:.2f} |" for x in (dot / square).tolist()))


# ---- all runs


def run_all(args: argparse.Namespace) -> None:
    """Run every (rate, seed, variant), `--parallel` at a time, until the time is over."""
    ends = time.monotonic() + 60 * args.minutes
    sums_data = SUMS / "train.jsonl"
    if args.task == "sums" and not sums_data.is_file():
        subprocess.run([sys.executable, str(SUMS / "make_data.py")], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[int, Path] = {}
        waiting = [(r, s, v) for r in args.lrs for s in args.seeds for v in args.variants]
        running: list[subprocess.Popen[bytes]] = []
        try:
            while (waiting or running) and time.monotonic() < ends:
                running = [process for process in running if process.poll() is None]
                if waiting and len(running) < args.parallel:
                    rate, seed, variant = waiting.pop(0)
                    # The grid of the checkpoint is the same for all variants.
                    if args.bits not in models:
                        folder = Path(scratch) / "model"
                        models[args.bits] = write_model(args, folder, args.bits)
                    running.append(start(args, models[args.bits], rate, seed, variant))
                else:
                    time.sleep(0.5)
        finally:
            for process in running:
                process.kill()
                process.wait()
    show(args.out)


def start(
    args: argparse.Namespace, model: Path, rate: float, seed: int, variant: str
) -> subprocess.Popen[bytes]:
    """Start one run; its log is beside OUT."""
    finer = MORE_BITS_OF_FLOAT16 if variant.startswith("float16") and args.bits else 0
    run = {"variant": variant, "lr": rate, "seed": seed, "bits": args.bits + finer}
    run["steps"] = args.steps
    log = args.out.with_suffix(f".{variant}-{rate}-{seed}.log")
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, __file__, "one", args.task, str(model), json.dumps(run), *args.words],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=HERE.parent,
            env=os.environ
            | {"PRECISION_OUT": str(args.out.resolve()), "PRECISION_RUN": json.dumps(run)},
        )


def show(path: Path) -> None:
    """Print a row for each rate and variant: arrived shares, rewards, distance from float32, held-out."""
    rewards: dict[tuple[float, str], dict[int, dict[int, float]]] = defaultdict(dict)
    arrived: dict[tuple[float, str], dict[int, list[float]]] = defaultdict(dict)
    heldout: dict[tuple[float, str], dict[int, float]] = defaultdict(dict)
    for line in map(json.loads, path.read_text().splitlines()):
        key = line["lr"], line["variant"]
        if "reward/mean" in line:
            rewards[key].setdefault(line["seed"], {})[line["step"]] = line["reward/mean"]
            arrived[key].setdefault(line["step"], []).append(line["update/arrived"])
        else:
            found = [v for name, v in line.items() if name.startswith("eval/") and "acc" in name]
            found += [
                v for name, v in line.items() if name.startswith("eval/") and "reward" in name
            ]
            if found:
                heldout[key][line["seed"]] = found[0]  # of the last evaluation
    last = max(step for runs in rewards.values() for run in runs.values() for step in run)
    steps = [step for step in SHOWN_STEPS if step <= last]
    print("| lr | variant (seeds) | arrived at", *steps, "| reward around", *steps, end=" ")
    print("| mean reward | off float32 (rms) | held-out |")
    print("|---|---|---|---|---|---|---|")
    for (rate, variant), runs in rewards.items():
        exact = rewards.get((rate, "float32"), {})
        gaps = [
            (value - exact[seed][step]) ** 2
            for seed, run in runs.items()
            for step, value in run.items()
            if step in exact.get(seed, {})
        ]
        cells = [
            f"{rate:g}",
            f"{variant} ({len(runs)})",
            " ".join(_mean(arrived[rate, variant].get(step, [])) for step in steps),
            " ".join(_mean([_around(run, step) for run in runs.values()]) for step in steps),
            _mean([statistics.fmean(run.values()) for run in runs.values()]),
            f"{statistics.fmean(gaps) ** 0.5:.3f}" if gaps else "",
            _mean(list(heldout[rate, variant].values())),
        ]
        print("|", " | ".join(cells), "|")


def _around(run: dict[int, float], step: int) -> float:
    near = [value for at, value in run.items() if abs(at - step) <= (2 if step > 2 else 0)]
    return statistics.fmean(near) if near else float("nan")


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else "-"


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        task, model, run, *words = sys.argv[2:]
        run_one(task, Path(model), json.loads(run), words)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="task", required=True)
    commands.add_parser("show").add_argument("out", type=Path)
    lora = commands.add_parser("lora")
    lora.add_argument("--lr", type=float, default=1e-5)
    lora.add_argument("--steps", type=int, default=20)
    commands.add_parser("first").add_argument("model")
    for name, model, rates, steps, bits in (
        ("demo", "demo", [1e-5], 100, 5),
        ("sums", None, [1e-6, 5e-6], 40, 0),
    ):
        one = commands.add_parser(name)
        one.add_argument("--model", default=model, required=model is None)
        one.add_argument("--out", type=Path, default=Path(f"precision-{name}.jsonl"))
        one.add_argument("--lrs", type=float, nargs="+", default=rates)
        one.add_argument("--seeds", type=int, nargs="+", default=[0])
        one.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
        one.add_argument("--steps", type=int, default=steps)
        one.add_argument("--parallel", type=int, default=1 if name == "demo" else 6)
        one.add_argument("--minutes", type=float, default=60.0)
        one.add_argument(
            "--bits", type=int, default=bits, help=argparse.SUPPRESS if not bits else ""
        )
        one.add_argument("words", nargs="*", help="further settings, key=value")
    args = parser.parse_args()
    if args.task == "show":
        show(args.out)
    elif args.task == "lora":
        show_lora(args.lr, args.steps)
    elif args.task == "first":
        show_first(args.model)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
