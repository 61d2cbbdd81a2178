"""One update: packed and chunked (Penstock) against padded full logits (plain transformers).

    python benchmarks/train_step.py [--shape small|qwen0.5b] [--lengths 64,256,1024]
    python benchmarks/train_step.py --case tree:32 [--trees 1]

Prints time, tokens/s and peak memory of forward + backward + AdamW at each length, and MFU on a GPU.
Both sides train the same sequences on a model with random weights: `uniform` rows have between a quarter
and all of the given length, `equal` rows all have that length, so packing gains nothing. Padding does not
count as tokens. MFU is (6 x parameters x tokens + causal attention) over the rate of a large bf16 matrix
product on the same GPU. The digest of the weights, which a training step also computes, is timed apart.

A `tree` is a rollout of an agent that branches in two at each of eight turns, with so many tokens a turn, half
of them sampled: 256 rows that share their beginnings. `separate` trains the same rows with other tokens, so
that no two begin alike. Both count the tokens of all rows.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import shapes
import torch

from penstock.config import Config
from penstock.model import packed_attention
from penstock.training.consumer import Consumer
from penstock.types import Batch, Group, Prompt, Rollout, Row, Score, Status, VersionSegment

PROMPT = 1  # tokens; nearly every token is trained, as on the padded side
GROUP = 8


@dataclass(frozen=True)
class Figure:
    seconds: float
    tokens: int
    peak_gib: float
    flops: float


def make_model(shape: str, dtype: torch.dtype, device: str) -> Any:
    packed_attention.register()
    # weights are made in float32, as those that a run loads for its masters
    model = shapes.make_model(shape, torch.float32, device, eos_token_id=0)
    return model.to(dtype)


def make_lengths(kind: str, length: int, tokens: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    rows: list[int] = []
    while sum(rows) < tokens or len(rows) % GROUP:
        rows.append(length if kind == "equal" else int(generator.integers(length // 4, length + 1)))
    return np.array(rows)


def make_batch(lengths: np.ndarray, vocabulary: int, step: int) -> Batch:
    generator = np.random.default_rng(step)
    groups = []
    for number in range(0, len(lengths), GROUP):
        prompt = generator.integers(1, vocabulary, PROMPT).astype(np.int32)
        rollouts = []
        for index, length in enumerate(lengths[number : number + GROUP]):
            count = int(length) - PROMPT
            rollouts.append(
                Rollout(
                    rollout_id=f"{number}.{index}",
                    prompt_ids=prompt,
                    seed=0,
                    response_ids=generator.integers(1, vocabulary, count).astype(np.int32),
                    logprobs=np.full(count, -np.log(vocabulary), dtype=np.float32),
                    loss_mask=np.ones(count, dtype=bool),
                    segments=(VersionSegment(0, count),),
                    status=Status.COMPLETED,
                    finish_reason="stop",
                    score=Score(float(index % 2)),
                )
            )
        group = Group(
            group_id=f"train:{number}",
            task="train",
            cursor=number,
            prompt=Prompt(f"random:{number}", (), prompt),
            rollouts=rollouts,
        )
        groups.append(group)
    return Batch(step=step, groups=tuple(groups))


DEPTH = 8  # turns of a tree that branches in two at each


def tree_rollout(
    name: str, turn: int, draw: np.random.Generator, alike: bool, vocabulary: int
) -> Rollout:
    """One tree of calls; a sampled token is trained in the first row that has it."""
    rows: list[Row] = []
    response: list[np.ndarray] = []
    trained: list[bool] = []

    def tokens(count: int) -> np.ndarray:
        return draw.integers(1, vocabulary, count).astype(np.int32)

    def grow(context: np.ndarray, new: int, level: int) -> None:
        """`new`: turns at the end of `context` that no row has trained."""
        if level == DEPTH:
            path = context if alike else tokens(len(context))
            length = new * turn - turn // 2  # the first turn's observation is the row's prompt
            rows.append(Row(path[:-length], length))
            response.append(path[-length:])
            observed = np.arange(len(path))[-length:] % turn < turn // 2
            trained.extend((~observed).tolist())
            return
        for branch in range(2):
            grow(np.concatenate([context, tokens(turn)]), new + 1 if branch == 0 else 1, level + 1)

    grow(np.zeros(0, np.int32), 0, 0)
    ids = np.concatenate(response)
    return Rollout(
        rollout_id=name,
        prompt_ids=rows[0].prompt_ids,
        seed=0,
        response_ids=ids,
        logprobs=np.full(len(ids), -np.log(vocabulary), dtype=np.float32),
        loss_mask=np.array(trained),
        segments=(VersionSegment(0, len(ids)),),
        rows=tuple(rows),
        status=Status.COMPLETED,
        finish_reason="stop",
        score=Score(float(int(name[-1]) % 2)),
    )


def tree_batch(turn: int, trees: int, vocabulary: int, step: int, *, alike: bool) -> Batch:
    draw = np.random.default_rng(step)
    rollouts = [tree_rollout(f"0.{n}", turn, draw, alike, vocabulary) for n in range(trees)]
    prompt = Prompt("random:0", (), rollouts[0].prompt_ids)
    group = Group(group_id="train:0", task="train", cursor=0, prompt=prompt, rollouts=rollouts)
    return Batch(step=step, groups=(group,))


def num_flops(model: Any, lengths: np.ndarray) -> float:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    pairs = float((lengths.astype(np.float64) ** 2).sum()) / 2
    attention_flops = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return 6 * parameters * float(lengths.sum()) + attention_flops


def timed(step: Any, repeats: int, device: str) -> tuple[float, float]:
    """Return (median seconds, peak GiB) of `step(number)` after two warm-ups; on a CPU seconds of the processor."""
    seconds = []
    clock = time.perf_counter if device == "cuda" else time.process_time
    for number in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = clock()
        step(number + 1)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return statistics.median(seconds[2:]), peak


def penstock_update(args: argparse.Namespace, lengths: np.ndarray, device: str) -> Figure:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = make_model(args.shape, dtype, device)
    train = {
        "lr": 1e-6,
        "micro_batch_tokens": args.micro_batch_tokens,
        "threads": args.threads,
    }
    consumer = Consumer(Config.model_validate({"train": train}), model, total_steps=100)
    kind, length = args.case.split(":")

    def batch(step: int) -> Batch:
        if kind != "tree":
            return make_batch(lengths, model.config.vocab_size, step)
        alike = args.side == "penstock"
        return tree_batch(int(length), args.trees, model.config.vocab_size, step, alike=alike)

    batches = {n: batch(n) for n in range(1, args.repeats + 3)}
    seconds, peak = timed(
        lambda number: consumer.train_batch(batches[number]), args.repeats, device
    )
    started = time.perf_counter()
    consumer.digest()
    print(f"    digest of the weights: {time.perf_counter() - started:.2f} s")
    if args.profile:
        profile(lambda: consumer.train_batch(batches[1]))
    return Figure(seconds, int(lengths.sum()), peak, num_flops(model, lengths))


def padded_update(args: argparse.Namespace, lengths: np.ndarray, device: str) -> Figure:
    """Train with plain transformers: padded rows, a mask, full logits, AdamW in the model's dtype."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = make_model(args.shape, dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    longest = int(lengths.max())
    rows = max(1, args.micro_batch_tokens // longest) if args.micro_batch_tokens else len(lengths)
    columns = torch.arange(longest, device=device)

    def step(number: int) -> None:
        torch.manual_seed(number)
        for start in range(0, len(lengths), rows):
            own = torch.from_numpy(lengths[start : start + rows]).to(device)
            mask = columns[None] < own[:, None]
            ids = torch.randint(1, model.config.vocab_size, mask.shape, device=device)
            logits = model(ids, attention_mask=None if bool(mask.all()) else mask.long()).logits
            log_all = torch.log_softmax(logits[:, :-1].float(), -1)
            own_logprobs = log_all.gather(-1, ids[:, 1:, None]).squeeze(-1)
            sign = 1.0 - 2.0 * (torch.arange(len(ids), device=device) % 2)
            loss = -(own_logprobs * mask[:, 1:] * sign[:, None]).sum() / float(lengths.sum())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds, peak = timed(step, args.repeats, device)
    return Figure(seconds, int(lengths.sum()), peak, num_flops(model, lengths))


def profile(step: Any) -> None:
    with torch.profiler.profile() as trace:
        step()
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


def product_rate() -> float:
    """Measure the FLOP/s of a large bf16 matrix product on random data, the base of MFU."""
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - started)


def one_case(args: argparse.Namespace) -> None:
    """Measure one side at one length in this process; print one line for the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    kind, length = args.case.split(":")
    lengths = make_lengths(kind, int(length), args.tokens)
    if kind == "tree":
        lengths = np.full(args.trees << DEPTH, DEPTH * int(length))
    run = padded_update if args.side == "padded" else penstock_update
    try:
        figure = run(args, lengths, device)
    except torch.OutOfMemoryError:
        print(f"ROW {args.side} {args.case}: out of memory")
        return
    rate = product_rate() if device == "cuda" else 0.0
    mfu = f"  MFU {100 * figure.flops / figure.seconds / rate:5.1f} %" if rate else ""
    print(
        f"ROW {args.side:9s} {args.case:13s} {len(lengths):4d} rows {figure.tokens:7d} tokens  "
        f"{1000 * figure.seconds:8.1f} ms  {figure.tokens / figure.seconds:9.0f} tokens/s  "
        f"peak {figure.peak_gib:6.2f} GiB{mfu}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shape", choices=list(shapes.SHAPES), default="qwen0.5b" if gpu else "small"
    )
    parser.add_argument("--lengths", default="512,2048,8192" if gpu else "64,256,1024")
    parser.add_argument("--tokens", type=int, default=16384 if gpu else 4096)
    parser.add_argument("--micro-batch-tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5 if gpu else 2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--side", choices=["penstock", "padded", "separate", "both"], default="both"
    )
    parser.add_argument("--case", default="", help="KIND:LENGTH; empty: all but tree")
    parser.add_argument("--trees", type=int, default=2)
    args = parser.parse_args()
    if args.case and args.side != "both":
        one_case(args)
        gc.collect()
        return
    lengths = args.lengths.split(",")
    cases = (
        [args.case] if args.case else [f"equal:{lengths[0]}"] + [f"uniform:{n}" for n in lengths]
    )
    for case in cases:
        sides = ["penstock", "separate" if case.startswith("tree") else "padded"]
        for side in (
            sides if args.side == "both" else [args.side]
        ):  # one process each, so that peak memory is its own
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--side", side]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            rows = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
            print("\n".join(rows) or f"{side} {case} failed:\n{done.stderr[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
