"""Parts of a layer whose backward passes are written by hand, as one autograd function.

Autograd would make a node, and keep inputs, for each small operation. A `Step` computes one part and keeps what it
chooses; `run` joins neighbouring steps. A part that is no step, such as a linear layer with adapters, stands
between two functions and runs under autograd as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Masters = Mapping[int, nn.Parameter]  # of parameters, by their ids
Part = Callable[[Tensor], Tensor]


class Step:
    """One part of a layer; the gradients of its matrices are added to their masters in `backward`."""

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """Weights whose gradients `backward` returns."""
        return ()

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and what the backward pass needs; an owned input may be overwritten."""
        raise NotImplementedError

    def forward_onto(
        self, x: Tensor, residual: Tensor, scale: float, *, owned: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same, with residual + scale x output."""
        output, saved = self.forward(x, owned=owned)
        return add_scaled_(output, residual, scale), saved

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The gradient of the input, plus `added`, and those of the vectors in float32."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        return run({}, [self], x)


def add_scaled_(output: Tensor, residual: Tensor, scale: float) -> Tensor:
    """Residual + scale x output, in the memory of the output."""
    return (output if scale == 1.0 else output.mul_(scale)).add_(residual)


@dataclass(slots=True, frozen=True)
class _Plan:
    """The steps of one function, and its residual: of another tensor, of its own input, or none."""

    steps: tuple[Step, ...]
    masters: Masters
    scale: float
    keeps_input: bool  # the input is the residual


def run(
    masters: Masters,
    parts: Sequence[Part],
    x: Tensor,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The output of the parts, one after another; with a residual, residual + scale x output."""
    groups = _groups(parts)
    output = x
    for number, (is_step, group) in enumerate(groups):
        if not is_step:
            for part in group:
                output = part(output)
            continue
        steps: Any = tuple(group)
        vectors = [vector for step in steps for vector in step.vectors]
        is_last = number == len(groups) - 1
        added = residual if is_last else None
        plan = _Plan(steps, masters, scale, keeps_input=added is not None and added is output)
        output = _Chain.apply(plan, output, None if plan.keeps_input else added, *vectors)
    if residual is None or groups[-1][0]:
        return output
    return residual + (output if scale == 1.0 else output * scale)


def _groups(parts: Sequence[Part]) -> list[tuple[bool, Sequence[Part]]]:
    """Neighbouring parts that are steps, and those that are not."""
    if all(isinstance(part, Step) for part in parts):
        return [(True, parts)]
    groups = itertools.groupby(parts, lambda part: isinstance(part, Step))
    return [(is_step, list(group)) for is_step, group in groups]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, x: Tensor, residual: Tensor | None, *vectors: Tensor
    ) -> Tensor:
        ctx.plan, ctx.has_residual = plan, residual is not None or plan.keeps_input
        residual = x if plan.keeps_input else residual
        kept: list[tuple[Tensor, ...]] = []
        for number, step in enumerate(plan.steps):
            owned = number > 0
            if residual is not None and number == len(plan.steps) - 1:
                x, saved = step.forward_onto(x, residual, plan.scale, owned=owned)
            else:
                x, saved = step.forward(x, owned=owned)
            kept.append(saved)
        ctx.counts = [len(saved) for saved in kept]
        ctx.save_for_backward(*itertools.chain.from_iterable(kept))
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, list(ctx.saved_tensors)
        whole = grads[0].contiguous()
        grad = whole * plan.scale if ctx.has_residual and plan.scale != 1.0 else whole
        vector_grads: list[Tensor | None] = []
        for number in reversed(range(len(plan.steps))):
            step, count = plan.steps[number], ctx.counts[number]
            kept = saved[len(saved) - count :]
            del saved[len(saved) - count :]
            added = whole if plan.keeps_input and number == 0 else None
            grad, found = step.backward(grad, kept, added)
            pairs = zip(step.vectors, found, strict=True)
            vector_grads[:0] = [_deliver(plan.masters, *pair) for pair in pairs]
        residual = whole if ctx.has_residual and not plan.keeps_input else None
        return None, grad, residual, *vector_grads


def _deliver(masters: Masters, vector: Tensor, grad: Tensor | None) -> Tensor | None:
    """Add a gradient to the master; return it, for autograd, if there is none."""
    if grad is None or not vector.requires_grad:
        return None
    master = masters.get(id(vector))
    if master is None:
        return grad.to(vector.dtype)
    add_to(master, grad)
    return None


def add_to(master: nn.Parameter, grad: Tensor) -> None:
    """Add a gradient to that of a master, in float32."""
    master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
