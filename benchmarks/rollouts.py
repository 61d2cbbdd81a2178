"""Rollout speed of the transformers engine beside `generate`, `generate_batch` and vLLM, in one run.

    python benchmarks/rollouts.py                        # CPU: the 1M-parameter shape of the demo
    python benchmarks/rollouts.py --model smollm2        # CPU: SmolLM2-135M (see smollm2.py)
    python benchmarks/rollouts.py --vllm .venv-vllm/bin/python   # vLLM too (scripts/test_vllm.sh builds it)
    python benchmarks/rollouts.py --model qwen0.5b --device cuda

Two loads: equal lengths and log-normal lengths. Every engine samples exactly the requested number of tokens
at temperature 1; ours and vLLM also return log-probs. `generate` gets batches of as many rows as our engine
has slots, and vLLM as many sequences; `generate_batch` is transformers' own continuous batching.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from shapes import CASES, Case, make_model
from smollm2 import load_smollm2
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions

CACHE_BLOCKS, CACHE_BATCH_TOKENS = 4096, 512  # transformers' paged cache: fits every load here


def build(model: str, device: str, implementation: str) -> torch.nn.Module:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    if model == "smollm2":
        built = load_smollm2(implementation)
    else:
        built = make_model(model, dtype, device, implementation)
    built.config.eos_token_id = built.generation_config.eos_token_id = None
    built.generation_config.pad_token_id = 0
    return built.to(device).eval()


def lognormal_lengths(count: int, mean: int, largest: int) -> list[int]:
    """Return lengths with this mean after clipping at `largest`; the same on every machine."""
    normal = np.random.default_rng(0).standard_normal(count)
    scale, lengths = float(mean), np.ones(count)
    for _ in range(20):
        lengths = np.clip(scale * np.exp(1.1 * normal - 0.6), 4, largest)
        scale *= mean / lengths.mean()
    return [int(length) for length in lengths]


class RowLengths(StoppingCriteria):
    """Ends each row of `generate` after its own number of tokens."""

    def __init__(self, prompt_tokens: int, lengths: list[int], device: str) -> None:
        self._ends = prompt_tokens + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def run_generate(
    model: torch.nn.Module, prompts: np.ndarray, lengths: list[int], slots: int
) -> None:
    device = str(next(model.parameters()).device)
    ids = torch.from_numpy(prompts).to(device)
    for first in range(0, len(lengths), slots):
        part = lengths[first : first + slots]
        model.generate(
            ids[first : first + slots],
            attention_mask=torch.ones_like(ids[first : first + slots]),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(part),
            stopping_criteria=StoppingCriteriaList([RowLengths(prompts.shape[1], part, device)]),
        )


def run_generate_batch(model: torch.nn.Module, prompts: np.ndarray, lengths: list[int]) -> None:
    """Run transformers' own continuous batching; each request has its own number of tokens."""
    how = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0
    )
    blocks = ContinuousBatchingConfig(num_blocks=CACHE_BLOCKS, max_batch_tokens=CACHE_BATCH_TOKENS)
    with model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=blocks, block=True, timeout=5
    ) as manager:
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt.tolist(), max_new_tokens=length)
        made = 0
        while made < sum(lengths):
            result = manager.get_result(timeout=60)
            assert result is not None, "transformers returned no result for a minute"
            assert result.error is None, result.error
            if result.is_finished():
                made += len(result.generated_tokens)


def run_engine(
    engine: TransformersEngine,
    prompts: np.ndarray,
    lengths: list[int],
    loop: asyncio.AbstractEventLoop,
) -> None:
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=length),
            seed=i,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    made = loop.run_until_complete(engine.generate_many(requests))
    assert [len(g.logprobs) for g in made] == lengths, {g.error for g in made}


def timed(work: Callable[[], None], repeats: int, device: str) -> float:
    """Return the median seconds; on a CPU, CPU seconds, which a busy machine does not stretch."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(clock() - started)
    return statistics.median(times)


def measure_ours(
    args: argparse.Namespace, case: Case, prompts: np.ndarray, loads: dict[str, list[int]]
) -> dict[str, float]:
    options = TransformersOptions(device=args.device, max_slots=case.slots, threads=args.threads)
    engine = TransformersEngine(
        lambda: build(args.model, args.device, "penstock"), fetch=lambda _: [], options=options
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    warm = min(case.slots, case.requests)
    run_engine(engine, prompts[:warm], [4] * warm, loop)
    speeds = {}
    for name, lengths in loads.items():
        seconds = timed(
            lambda lengths=lengths: run_engine(engine, prompts, lengths, loop),
            args.repeats,
            args.device,
        )
        speeds[name] = sum(lengths) / seconds
        print(f"  {name:10} penstock {speeds[name]:10,.0f}", flush=True)
    loop.run_until_complete(engine.close())
    loop.close()
    return speeds


def measure_transformers(
    args: argparse.Namespace, case: Case, prompts: np.ndarray, loads: dict[str, list[int]]
) -> dict[str, dict[str, float]]:
    model = build(args.model, args.device, "sdpa")
    warm = min(case.slots, case.requests)
    run_generate(model, prompts[:warm], [4] * warm, case.slots)
    ways = {
        "generate": lambda lengths: run_generate(model, prompts, lengths, case.slots),
        "generate_batch": lambda lengths: run_generate_batch(model, prompts, lengths),
    }
    speeds: dict[str, dict[str, float]] = {way: {} for way in args.peers}
    for name, lengths in loads.items():
        for way in args.peers:
            seconds = timed(lambda way=way, lengths=lengths: ways[way](lengths), 1, args.device)
            speeds[way][name] = sum(lengths) / seconds
            print(f"  {name:10} {way} {speeds[way][name]:10,.0f}", flush=True)
    return speeds


def measure_vllm(
    args: argparse.Namespace, case: Case, prompts: np.ndarray, loads: dict[str, list[int]]
) -> dict[str, float]:
    """Run the same model and requests in vLLM's own environment, by rollouts_vllm.py."""
    clock = "wall" if args.device.startswith("cuda") else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        build(args.model, args.device, "sdpa").save_pretrained(folder)
        task = {
            "model": folder,
            "dtype": "bfloat16" if args.device.startswith("cuda") else "float32",
            "slots": case.slots,
            "longest": case.prompt_tokens + case.max_tokens + 64,
            "prompts": prompts.tolist(),
            "loads": loads,
            "repeats": args.repeats,
        }
        path = Path(folder) / "task.json"
        path.write_text(json.dumps(task), "utf-8")
        done = subprocess.run(
            [args.vllm, str(Path(__file__).with_name("rollouts_vllm.py")), str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                **os.environ,
                "OMP_NUM_THREADS": str(args.threads),
            },
            check=True,
        )
    speeds = json.loads(done.stdout.strip().splitlines()[-1])
    for name, row in speeds.items():
        print(f"  {name:10} vllm {row['cpu']:10,.0f} ({row['wall']:,.0f} by the clock)", flush=True)
    return {name: row[clock] for name, row in speeds.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(CASES), default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--slots", type=int, default=0, help="requests that run together; 0: the model's case"
    )
    parser.add_argument(
        "--requests", type=int, default=0, help="number of requests; 0: the model's case"
    )
    parser.add_argument("--loads", nargs="*", default=["equal", "lognormal"])
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["generate", "generate_batch"],
        help="transformers' calls to compare",
    )
    parser.add_argument("--no-ours", action="store_true", help="measure only the peers")
    parser.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    return parser.parse_args()


def start_with_threads(threads: int) -> None:
    """Start this program again with OMP_NUM_THREADS set, as Penstock's launcher starts its workers.

    oneDNN on ARM reads the variable when it is loaded and ignores torch.set_num_threads: without it, one
    thread more per core spins, and `generate` makes half as many tokens per CPU second.
    """
    if os.environ.get("OMP_NUM_THREADS") != str(threads):
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    args = arguments()
    start_with_threads(args.threads)
    torch.set_num_threads(args.threads)
    case = CASES[args.model]
    case = replace(case, slots=args.slots or case.slots, requests=args.requests or case.requests)
    prompts = np.random.default_rng(1).integers(2, 60, (case.requests, case.prompt_tokens))
    lengths_of = {
        "equal": [case.equal_tokens] * case.requests,
        "lognormal": lognormal_lengths(case.requests, case.mean_tokens, case.max_tokens),
    }
    loads = {name: lengths_of[name] for name in args.loads}
    speeds: dict[str, dict[str, float]] = {}
    if not args.no_ours:
        speeds["penstock"] = measure_ours(args, case, prompts, loads)
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if args.peers:
        speeds |= measure_transformers(args, case, prompts, loads)
    if args.vllm:
        speeds["vllm"] = measure_vllm(args, case, prompts, loads)
    unit = "tokens/s" if args.device.startswith("cuda") else "tokens per CPU second"
    print(
        f"{args.model} on {args.device}, {case.requests} requests, {case.slots} slots, "
        f"{args.threads} threads; {unit}"
    )
    for load in loads:
        cells = "  ".join(f"{who} {row[load]:,.0f}" for who, row in speeds.items())
        ours = speeds.get("penstock", {}).get(load, float("nan"))
        ratios = "  ".join(
            f"{ours / row[load]:.2f}x {who}" for who, row in speeds.items() if who != "penstock"
        )
        print(f"  {load:10} {cells}  ratios: {ratios}")
    print(json.dumps({"model": args.model, "device": args.device, "speeds": speeds}))


if __name__ == "__main__":
    main()
