"""With which arithmetic a trainer computes: its device, its libraries, and whether its bits repeat.

The journal keeps it, so that a redo or a replay elsewhere can say where a run was made.
"""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import Any

import torch

from penstock.types import Arithmetic


def arithmetic_of(model: Any) -> Arithmetic:
    """The arithmetic of a trainer whose model this is. On a CPU the order of additions is fixed."""
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    libraries = {"torch": torch.__version__}
    if device.type != "cuda":
        return Arithmetic(device=device.type, libraries=libraries)
    libraries["CUDA"] = str(torch.version.cuda)
    with contextlib.suppress(metadata.PackageNotFoundError):
        libraries["triton"] = metadata.version("triton")
    return Arithmetic(
        device=torch.cuda.get_device_name(device),
        libraries=libraries,
        doubt="kernels add in varying order",
    )
