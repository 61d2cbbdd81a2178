"""How a process computes on a GPU: the same work gives the same bits, or in the fastest order.

Trainer and engine call `use_arithmetic` when their model is loaded, before its first matrix product. On a CPU
nothing changes: with the same number of threads the order of additions is always the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from penstock.errors import RunError
from penstock.model.families import family_of
from penstock.types import Arithmetic

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_ORDER = "does not have a deterministic implementation"  # torch's words


def use_threads(count: int) -> None:
    """Compute with so many CPU threads in this thread, whatever others set for theirs.

    A thread takes over what was set last, by whichever thread, at its first computation: so that comes first.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def use_arithmetic(kind: str, model: Any) -> None:
    """Compute as `model.arithmetic` says from now on, in all of this process.

    Operations without a fixed order are refused, which also selects flash attention's deterministic backward
    pass: torch keeps the other one if it may only warn. The experts of models without a row in the table of
    families count their tokens with such an operation, so there torch warns.
    """
    if _device(model).type != "cuda":
        return
    # Torch gives cuBLAS a workspace for each stream, so its bits repeat without this variable; where it is set,
    # torch parses it in every matrix product, which then takes the host 55 to 150 us instead of 13.
    os.environ.pop(_WORKSPACE, None)
    torch.use_deterministic_algorithms(kind != "fast", warn_only=_has_foreign_experts(model))
    torch.utils.deterministic.fill_uninitialized_memory = False


def arithmetic_of(kind: str, model: Any, *, ranks: int) -> Arithmetic:
    """The arithmetic of a trainer with so many ranks, and why it may not repeat its bits."""
    device, libraries = _device(model), {"torch": torch.__version__}
    if device.type != "cuda":
        return Arithmetic(device=device.type, libraries=libraries)
    libraries["CUDA"] = str(torch.version.cuda)
    with contextlib.suppress(metadata.PackageNotFoundError):
        libraries["triton"] = metadata.version("triton")
    reasons = {
        "model.arithmetic is fast": kind == "fast",
        f"the experts of {type(model).__name__} add in no fixed order": _has_foreign_experts(model),
        f"sums over {ranks} trainer ranks have no fixed order": ranks > 1,
    }
    return Arithmetic(
        device=torch.cuda.get_device_name(device),
        libraries=libraries,
        doubt=next((reason for reason, holds in reasons.items() if holds), ""),
    )


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Operations inside have one result in any order: torch's deterministic form would sort for nothing."""
    chosen = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(chosen, warn_only=warns)


@contextlib.contextmanager
def explain_refusal() -> Iterator[None]:
    """Turn torch's refusal of an operation without a fixed order into one line that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if _NO_ORDER not in str(error):
            raise
        raise RunError(
            f"trainer: {str(error).partition(_NO_ORDER)[0].strip()} has no deterministic form on a GPU, which "
            "model.arithmetic deterministic needs, allowed for this model: model.arithmetic=fast"
        ) from error


def has_experts(model: Any) -> bool:
    """Whether layers route tokens to experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(model.config, name, None) for name in names)


def _has_foreign_experts(model: Any) -> bool:
    """Whether experts run the model's own code instead of the decoder's."""
    return has_experts(model) and family_of(model.config) is None


def _device(model: Any) -> torch.device:
    device: torch.device = next(p.device for p in model.parameters() if not p.is_meta)
    return device
