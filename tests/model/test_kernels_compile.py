"""The engine's kernels compile for a GPU, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STAGE = Path(__file__).parents[1] / "stages" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss"])
def test_no_kernel_of_a_real_width_spills(model_type: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(STAGE), model_type],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert any("_attend" in row for row in rows)
    assert [row for row in rows if " 0 B stack" not in row] == []
