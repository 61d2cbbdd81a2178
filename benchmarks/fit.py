"""The memory that a run needs on one GPU: as `penstock check` computes it, and as trainer and engine have it.

    python benchmarks/fit.py [NAME:GIB ...]

For each shape of `shapes.py` and GPU of so many GiB (a limit of this process): the settings that are chosen, two
updates of 8,192 tokens, then the engine, which takes its turn or stands beside the trainer. Prints computed and
measured peaks of allocated tensors, and the seconds of an update. Weights are random and made on the GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import shapes
import torch
from train_step import make_batch, make_lengths

from penstock.config import Config
from penstock.config.memory import ModelShape
from penstock.config.source import load_config
from penstock.engine.transformers.cuda.cuda_runner import CudaRunner
from penstock.engine.transformers.engine import IMPLEMENTATION
from penstock.engine.transformers.options import TransformersOptions
from penstock.model import packed_attention
from penstock.run.fit import Fit, Machine, fitted
from penstock.store.space import available_mib
from penstock.training.adapters import add_adapters
from penstock.training.consumer import Consumer

GIB = 2**30
CASES = (
    "qwen0.5b:24",
    "qwen2.5-1.5b:24",
    "qwen3-1.7b:40",
    "qwen2.5-3b:40",
    "qwen2.5-7b-lora:24",
    "qwen2.5-7b:139",
)
LENGTH, REQUESTS = 256, 16
WORDS = [
    "model.device=cuda",
    "model.dtype=bfloat16",
    "train.micro_batch_tokens=2048",
    "tasks.addition.max_prompt_tokens=6",
    f"sampling.max_tokens={LENGTH - 6}",
]


def chosen(name: str, gib: int) -> tuple[Fit, ModelShape]:
    fields = {"max_position_embeddings": 32768, **shapes.SHAPES[name]}
    shape = ModelShape.of(fields)
    words = [*WORDS, *shapes.SETTINGS.get(name, [])]
    left = available_mib()
    host = None if left is None else int(left * 2**20)
    machine = Machine(gpus=(gib * GIB,), host=host)
    return fitted(load_config(None, words).config, machine, shape), shape


def peak() -> float:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def make_consumer(name: str, config: Config) -> Consumer:
    packed_attention.register()
    adapted = config.model.lora.rank > 0
    dtype = torch.bfloat16 if adapted else torch.float32
    model = shapes.make_model(name, dtype, "cuda", eos_token_id=0)
    if adapted:
        add_adapters(model, config.model.lora)
    return Consumer(config, model, total_steps=9)


def engine_peak(name: str, shape: ModelShape) -> tuple[float, float]:
    """GiB that the weights and a KV cache of `REQUESTS` requests take, computed and measured."""
    before = torch.cuda.memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    model = shapes.make_model(
        name, torch.bfloat16, "cuda", eos_token_id=0, attention=IMPLEMENTATION
    )
    options = TransformersOptions(
        dtype=torch.bfloat16,
        device="cuda",
        max_slots=REQUESTS,
        max_tokens_in_flight=REQUESTS * LENGTH,
        cuda_graphs=False,
    )
    CudaRunner(model, options, lambda ids: "")
    computed = shape.parameters * 2 + REQUESTS * LENGTH * shape.kv_bytes(2)
    return computed / GIB, peak() - before


def one_case(name: str, gib: int) -> dict[str, Any]:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    fit, shape = chosen(name, gib)
    print(f"{name} on {gib} GiB:", "; ".join(map(str, fit.devices)), flush=True)
    for choice in fit.choices:
        print(f"    {choice}", flush=True)
    consumer = make_consumer(name, fit.config)
    lengths = make_lengths("equal", LENGTH, 8192)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in (1, 2):
        started = time.perf_counter()
        consumer.train(make_batch(lengths, shape.vocabulary, step))
        seconds.append(time.perf_counter() - started)
    trainer = peak()
    part = fit.devices[0].parts[0]
    published = 0 if fit.config.launch.colocate else 2 * shape.parameters  # not made here
    computed = (part.total - part.sizes["other"] - published) / GIB
    if fit.config.launch.colocate:
        consumer.offload()
    stays = torch.cuda.memory_allocated() / GIB
    engine = engine_peak(name, shape)
    return {
        "case": f"{name}:{gib}",
        "trainer": [round(computed, 2), round(trainer, 2), round(trainer / computed, 3)],
        "engine": [*(round(size, 2) for size in engine), round(engine[1] / engine[0], 3)],
        "trainer beside the engine": round(stays, 2),
        "seconds": [round(second, 2) for second in seconds],
    }


def main() -> None:
    for case in sys.argv[1:] or CASES:
        name, _, gib = case.partition(":")
        print(json.dumps(one_case(name, int(gib))), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
