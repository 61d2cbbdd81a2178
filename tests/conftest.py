"""Before anything imports Triton: where there is no GPU its kernels are interpreted."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
