"""The vLLM part of rollouts.py, which runs it in vLLM's environment: read a task, print one JSON line.

    python benchmarks/rollouts_vllm.py TASK.json

The task names a saved model, the requests and the loads. Reports tokens per CPU second (this process and
those that vLLM starts) and per second of wall time; the start is not counted.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.options import VllmOptions


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that it started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def requests_of(prompts: list[list[int]], lengths: list[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=length),
            seed=i,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def measure(task: dict[str, Any]) -> dict[str, dict[str, float]]:
    options = VllmOptions(
        path=task["model"],
        dtype=task["dtype"],
        max_slots=task["slots"],
        max_model_len=task["longest"],
        gpu_memory_utilization=0.5,
        extra={"skip_tokenizer_init": True, "enable_prefix_caching": False},
    )
    engine = VllmEngine(options, fetch=lambda _: [])
    await engine.start()
    warm = min(task["slots"], len(task["prompts"]))
    await engine.generate_many(requests_of(task["prompts"][:warm], [4] * warm))
    speeds: dict[str, dict[str, float]] = {}
    for name, lengths in task["loads"].items():
        cpu, wall = [], []
        for _ in range(task["repeats"]):
            cpu_start, start = cpu_seconds(), time.perf_counter()
            made = await engine.generate_many(requests_of(task["prompts"], lengths))
            cpu.append(cpu_seconds() - cpu_start)
            wall.append(time.perf_counter() - start)
            assert [len(g.logprobs) for g in made] == lengths, {g.error for g in made}
        speeds[name] = {
            "cpu": sum(lengths) / statistics.median(cpu),
            "wall": sum(lengths) / statistics.median(wall),
        }
    await engine.close()
    return speeds


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(json.loads(Path(sys.argv[1]).read_text("utf-8"))))))
