# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""AdamW over all parameters in one launch: scales the gradient, steps, and rounds the masters into the model.

torch takes three passes over the parameters for it (clip, AdamW, copy), and its host must know first whether the
gradient is finite. Here a tensor on the device decides, so that the host does not wait. The arithmetic is that of
torch's fused AdamW. Moments may be bfloat16 numbers, rounded at random as in `training/dither.py`, and they may lie
in the host's memory, which the programs then read and write over the bus. Imported only if the model is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from penstock.model.kernels.row_tiles import cdiv
from penstock.model.transfer import to_device

_CHUNK = 8192  # elements of a program
_BLOCK = 1024  # of them at once
_ALIGN = 16  # bytes, of every tensor's address
_COUNT = 8  # divides the number of elements of every tensor
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _numbers(Address, KIND: tl.constexpr):
    return tl.multiple_of(tl.load(Address).to(tl.pointer_type(KIND)), 16)


@triton.jit
def _mix(bits):
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= -2073254261
    bits ^= (bits >> 16) & 0xFFFF
    return bits


@triton.jit
def _stored(exact, at, width, key, SHORT: tl.constexpr):
    """A moment as it is kept."""
    if SHORT:
        row, column = (at // width).to(tl.int32), (at % width).to(tl.int32)
        random = _mix(_mix(row ^ key) + column * -1640531527)
        bits = (exact.to(tl.int32, bitcast=True) + (random & 0xFFFF)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return exact


@triton.jit
def _adamw(
    Table, Chunks, Decision, Corrections, Decay, Keys, rate, keep_first, new_first, keep_second,
    new_second, eps, KIND: tl.constexpr, MOMENT: tl.constexpr, SHORT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(Decision) > 0:
        scale = tl.load(Decision + 1)
        tensor = tl.load(Chunks + 2 * tl.program_id(0))
        begin = tl.load(Chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        row = Table + 7 * tensor
        Master, Grad = _numbers(row, tl.float32), _numbers(row + 1, tl.float32)
        First, Second = _numbers(row + 2, MOMENT), _numbers(row + 3, MOMENT)
        rounded = tl.load(row + 4)
        Rounded = tl.multiple_of(rounded.to(tl.pointer_type(KIND)), 16)
        count = tl.multiple_of(tl.load(row + 5), 8)
        width = tl.load(row + 6)
        first_key, second_key = tl.load(Keys + 2 * tensor), tl.load(Keys + 2 * tensor + 1)
        step_size = rate / tl.load(Corrections + 2 * tensor)
        root = tl.load(Corrections + 2 * tensor + 1)
        shrink = rate * tl.load(Decay + tensor)
        for first in range(0, CHUNK, BLOCK):
            at = begin + first + tl.arange(0, BLOCK)
            inside = at < count
            grad = tl.load(Grad + at, mask=inside, other=0.0) * scale
            master = tl.load(Master + at, mask=inside, other=0.0)
            mean = tl.load(First + at, mask=inside, other=0.0).to(tl.float32)
            square = tl.load(Second + at, mask=inside, other=0.0).to(tl.float32)
            mean = keep_first * mean + new_first * grad
            square = keep_second * square + new_second * grad * grad
            master = master - shrink * master
            master = master - step_size * mean / (tl.sqrt(square) / root + eps)
            tl.store(First + at, _stored(mean, at, width, first_key, SHORT), mask=inside)
            tl.store(Second + at, _stored(square, at, width, second_key, SHORT), mask=inside)
            tl.store(Master + at, master, mask=inside)
            if rounded != 0:
                tl.store(Rounded + at, master.to(KIND), mask=inside)


class Optimizer(Protocol):
    """AdamW that keeps its moments in a way of its own (`training/moments.py`)."""

    param_groups: list[dict[str, Any]]

    def moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]: ...

    def rounding_keys(self, parameter: nn.Parameter) -> list[int]: ...

    def keys_of_steps(self, keys: Tensor, steps: Tensor) -> Tensor: ...


class AdamWStep:
    """Steps of an AdamW optimizer whose parameters are float32 and on one device."""

    def __init__(self, optimizer: Optimizer, rounded: dict[nn.Parameter, nn.Parameter]) -> None:
        """`rounded` gives the model's parameter of each master that is not itself the model's."""
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._rounded = [rounded.get(parameter) for parameter in self._parameters]
        decay = [group["weight_decay"] for group in groups for _ in group["params"]]
        self._device = self._parameters[0].device
        self._kind = next(iter(_kinds(self._rounded)), tl.bfloat16)
        self._decay = torch.tensor(decay, dtype=torch.float32, device=self._device)
        counts = [cdiv(parameter.numel(), _CHUNK) for parameter in self._parameters]
        tensor = np.repeat(np.arange(len(counts)), counts)
        chunk = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks = np.stack([tensor, chunk], axis=1).astype(np.int32)
        self._chunks = torch.from_numpy(chunks).to(self._device)
        keys = [optimizer.rounding_keys(parameter) or [0, 0] for parameter in self._parameters]
        self._is_short = bool(optimizer.rounding_keys(self._parameters[0]))
        self._keys_P2 = torch.tensor(keys, dtype=torch.int32, device=self._device)

    @staticmethod
    def fits(optimizer: Optimizer, rounded: dict[nn.Parameter, nn.Parameter]) -> bool:
        """Whether the kernel covers these parameters."""
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        return (
            bool(parameters)
            and len({parameter.device for parameter in parameters}) == 1
            and len(_kinds(list(rounded.values()))) <= 1
            and all(parameter.dtype == torch.float32 for parameter in parameters)
            and all(parameter.numel() % _COUNT == 0 for parameter in parameters)
            and all(parameter.is_contiguous() for parameter in [*parameters, *rounded.values()])
        )

    def table(self) -> Tensor | None:
        """Addresses and size of every parameter; None: the kernel cannot read one of the gradients."""
        rows = []
        for parameter, rounded in zip(self._parameters, self._rounded, strict=True):
            grad = parameter.grad
            if grad is None or grad.dtype != torch.float32 or not grad.is_contiguous():
                return None
            state = self._optimizer.moments_of(parameter)
            tensors = (parameter, grad, state["exp_avg"], state["exp_avg_sq"])
            addresses = [tensor.data_ptr() for tensor in tensors]
            model = 0 if rounded is None else rounded.data_ptr()
            count = parameter.numel()
            rows.append((*addresses, model, count, count // len(parameter)))
        array = np.array(rows, dtype=np.int64)
        return None if (array[:, :5] % _ALIGN).any() else to_device(array, self._device)

    def launch(self, table: Tensor, norm: Tensor, loss: Tensor, max_norm: float) -> None:
        """Queue a step of the gradients, scaled down to `max_norm`, unless norm or loss forbid it.

        A norm or loss that is not finite, and a norm of zero, leave everything as it is.
        """
        keep_first, keep_second = self._optimizer.param_groups[0]["betas"]
        applies = norm.isfinite() & loss.isfinite() & (norm > 0)
        decision = torch.stack([applies, (max_norm / (norm + 1e-6)).clamp(max=1.0)]).float()
        steps = [self._optimizer.moments_of(parameter)["step"] for parameter in self._parameters]
        torch._foreach_add_(steps, [applies.float()] * len(steps))  # for a single tensor it waits
        steps_P = torch.stack(steps).double()
        first_P = 1 - torch.pow(keep_first, steps_P)
        second_P = (1 - torch.pow(keep_second, steps_P)).sqrt()
        keys_P2 = self._optimizer.keys_of_steps(self._keys_P2, steps_P[:, None])
        self._run(table, decision, torch.stack([first_P, second_P], dim=1).float(), keys_P2)

    def warm_up(self) -> None:
        """Compile the kernel, by a step that is not applied."""
        count = len(self._parameters)
        table = torch.zeros(count, 7, dtype=torch.int64, device=self._device)
        nothing = torch.zeros(2, device=self._device)
        self._run(table, nothing, torch.ones(count, 2, device=self._device), self._keys_P2)

    def _run(
        self, table: Tensor, decision: Tensor, corrections_P2: Tensor, keys_P2: Tensor
    ) -> None:
        group = self._optimizer.param_groups[0]
        keep_first, keep_second = group["betas"]
        kernel: Any = _adamw
        kernel[(len(self._chunks),)](
            table, self._chunks, decision, corrections_P2, self._decay, keys_P2, group["lr"],
            keep_first, 1 - keep_first, keep_second, 1 - keep_second, group["eps"],
            KIND=self._kind, MOMENT=tl.bfloat16 if self._is_short else tl.float32,
            SHORT=self._is_short, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def _kinds(rounded: Sequence[nn.Parameter | None]) -> set[Any]:
    return {_KINDS[parameter.dtype] for parameter in rounded if parameter is not None}
