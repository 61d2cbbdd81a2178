"""`penstock version --verbose`: the machine and the libraries, as a bug report needs them."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata

from penstock.reward.sandbox.self_check import check
from penstock.store.space import available_mib

_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "numpy", "pydantic", "triton"),
    *("flash-attn", "vllm", "ray", "wandb", "tensorboard", "peft"),
)


def environment_lines() -> Iterator[str]:
    """Yield a line for each fact: name and value."""
    import torch  # seconds: only who asks for it waits

    yield f"python {platform.python_version()}, {platform.platform()}"
    for name in _LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} not installed"
    memory = available_mib()
    free = "" if memory is None else f", {memory:,.0f} MiB of memory available"
    yield f"cpu: {len(os.sched_getaffinity(0))} cores ({platform.machine()}){free}"
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield f"gpu {number}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "gpu: none that torch can use"
    has_triton = importlib.util.find_spec("triton") is not None and torch.cuda.is_available()
    yield f"kernels: {'triton' if has_triton else 'plain torch'}, CPU {torch.backends.cpu.get_cpu_capability()}"
    yield from check().lines()[:1]
