"""Several adapters against one in a service: tokens/s of training and of sampling.

    python benchmarks/service.py [--model demo|small|qwen0.5b|PATH] [--adapters 8] [--rank 32] [--only training|sampling]

The same number of sequences is trained, and the same number of responses sampled, once for one adapter and once
shared among several: each update has the same tokens, and all samples are asked for at once. Weights of named
shapes are random. The first round of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from grpo_step import model_path

import penstock
from penstock import AdamParams, Datum, SamplingParams


def batch(args: argparse.Namespace, seed: int) -> list[Datum]:
    """Sequences of one update."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(3, args.vocabulary, (args.sequences, args.length + 1)).tolist()
    ones = [1.0] * args.length
    return [Datum(row[:-1], {"target_tokens": row[1:], "weights": ones}) for row in rows]


def train(args: argparse.Namespace, trainers: list[Any]) -> int:
    """So many updates, in turns; the tokens of all."""
    futures = []
    for update in range(args.updates):
        trainer = trainers[update % len(trainers)]
        futures.append(trainer.forward_backward(batch(args, update), "cross_entropy"))
        futures.append(trainer.optim_step(AdamParams(learning_rate=1e-4)))
    for future in futures:
        future.result()
    return int(args.updates * args.sequences * args.length)


def sample(args: argparse.Namespace, samplers: list[Any]) -> int:
    """So many responses, all asked for at once; the tokens of all."""
    draw = np.random.default_rng(7)
    futures = []
    for number in range(args.prompts):
        prompt = draw.integers(3, args.vocabulary, 16).tolist()
        params = SamplingParams(max_tokens=args.new_tokens, seed=number, stop=[])
        futures.append(samplers[number % len(samplers)].sample(prompt, args.responses, params))
    return sum(len(s.tokens) for future in futures for s in future.result().sequences)


def rate(work: Callable[[], int], rounds: int) -> float:
    """Tokens/s of the best round but the first."""
    rates = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        rates.append(work() / (time.perf_counter() - started))
    return max(rates[1:])


def measure(args: argparse.Namespace, model: str, folder: Path) -> dict[str, dict[int, float]]:
    """Tokens/s by what is done and the number of adapters."""
    figures: dict[str, dict[int, float]] = {"training": {}, "sampling": {}}
    with penstock.Service(model, folder=folder, settings=dict(args.set)) as service:
        for count in (1, args.adapters):
            trainers = [service.create_lora_training_client(rank=args.rank) for _ in range(count)]
            if args.only != "sampling":
                figures["training"][count] = rate(lambda t=trainers: train(args, t), args.rounds)
            if args.only != "training":
                samplers = [trainer.save_weights_and_get_sampling_client() for trainer in trainers]
                figures["sampling"][count] = rate(lambda s=samplers: sample(args, s), args.rounds)
    return {name: rates for name, rates in figures.items() if rates}


def setting(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    return key, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--updates", type=int, default=16, help="of a round")
    parser.add_argument("--sequences", type=int, default=8, help="of an update")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--prompts", type=int, default=16, help="of a round")
    parser.add_argument("--responses", type=int, default=4, help="to each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each response")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["training", "sampling"])
    parser.add_argument("--set", nargs="*", default=[], type=setting, help="KEY=JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = "demo" if args.model == "demo" else str(model_path(args.model, Path(scratch)))
        config = "" if args.model == "demo" else (Path(model) / "config.json").read_text()
        args.vocabulary = json.loads(config)["vocab_size"] if config else 64
        figures = measure(args, model, Path(scratch) / "service")
    for name, rates in figures.items():
        one, many = rates[1], rates[args.adapters]
        print(
            f"{name}: 1 adapter {one:,.0f} tokens/s, {args.adapters} adapters {many:,.0f} tokens/s, "
            f"{many / one:.0%}"
        )


if __name__ == "__main__":
    main()
