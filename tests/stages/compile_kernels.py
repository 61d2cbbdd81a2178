"""Compile the engine's kernels for a GPU that need not be there: `python compile_kernels.py [CASE ...]`.

Runs a decode step and a prompt of each shape with launches that compile and compute nothing; prints each kernel's
shared memory, registers and spilled bytes. Needs no driver: Triton brings the assembler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
ROWS = 64
# widths of real models; layers and vocabularies are small
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "gemma3_text": {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 6},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "pad_token_id": 0},
    "olmo2": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16},
    "qwen3_moe": {"hidden_size": 1024, "moe_intermediate_size": 320, "num_experts": 64, "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64},
    "gpt_oss": {"hidden_size": 640, "intermediate_size": 640, "num_local_experts": 32, "num_experts_per_tok": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip


class NoDriver:
    """What compilation asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install(compiled: dict[str, Any]) -> None:
    """Let launches compile only; `compiled` collects the kernels."""
    driver.set_active(NoDriver())
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        compiled[f"{self.fn.__name__} {kernel.hash[:8]}"] = kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    from penstock.engine.transformers.cuda import cuda_steps
    from penstock.model.kernels import decode_kernels, expert_kernels, row_kernels

    cuda_steps.to_device = lambda array, device: torch.from_numpy(array).to(device)
    for module in (decode_kernels, expert_kernels, row_kernels):
        module.overlapped = lambda device: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]


def run_shape(model_type: str, dtype: torch.dtype) -> None:
    from penstock.engine.transformers.cuda.cuda_decoder import CudaDecoder
    from penstock.engine.transformers.cuda.cuda_steps import PrefillStep, Prompt
    from penstock.engine.transformers.cuda.regions import KVPool
    from penstock.model.families import family_of
    from penstock.model.kernels.decode_kernels import next_rows, sample_rows

    fields = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 4096}
    config = transformers.AutoConfig.for_model(model_type, **(fields | SHAPES[model_type]))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    decoder = CudaDecoder(model, family_of(config, 4096))
    decoder.open(128)
    pool = KVPool.allocate(decoder.shape, 2 * ROWS, torch.device("meta"))
    for rows in (8, ROWS):
        zeros = torch.zeros(rows + 1, dtype=torch.int64, device="meta")
        state = SimpleNamespace(
            token=zeros, position=zeros, start=zeros, index=zeros, min_index=zeros, key=zeros,
            stops=zeros[:, None].expand(-1, 8), temperature=zeros.float(),
        )  # fmt: skip
        slots = zeros[:-1]
        logits = decoder.decode(state, pool, slots)
        sample_rows(logits, *next_rows(logits, slots, state, 1))
    step = PrefillStep(pool, [Prompt(np.zeros(ROWS, np.int64), 0, [0])])
    position = torch.arange(ROWS, device="meta")
    decoder.logits(step, position, position, position[-1:])


def resources(kernel: Any) -> str:
    """Registers and spilled bytes of a kernel, by the assembler's own tool."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"{found[1]:>4} registers {found[2]:>6} B stack" if found else text


def main() -> None:
    compiled: dict[str, Any] = {}
    install(compiled)
    for model_type in sys.argv[1:] or SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            compiled.clear()
            with torch.inference_mode():
                run_shape(model_type, dtype)
            print(f"{model_type} {dtype}")
            for name, kernel in sorted(compiled.items()):
                metadata = kernel.metadata
                print(
                    f"  {name:32} {metadata.shared:>7} B shared {resources(kernel)} "
                    f"{metadata.num_warps} warps"
                )


if __name__ == "__main__":
    main()
