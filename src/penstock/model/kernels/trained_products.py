"""Products of a trainer that changes weights on one GPU: several matrices as one, and gradients without detours.

q, k and v are one product, gate and up another, the experts of a layer one launch. By itself each parameter would
get a gradient in half precision that is then added to that of its float32 master; here it is added there at once.
Parameters keep their names and classes: they become views of the joint tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.model.decoder_weights import Linear, ModuleProducts
from penstock.model.kernels.chains import Masters, Step, add_scaled_, add_to

_ALIGN = 16  # bytes: kernels read a parameter's first bytes in words of this size
_modules = ModuleProducts()


class Joint:
    """Parameters of equal width that lie end to end in memory, as one, and the masters of each."""

    def __init__(self, parts: Sequence[nn.Parameter], masters: Masters) -> None:
        self._parts = tuple(parts)
        self._masters = tuple(masters[id(part)] for part in parts)
        ends = list(itertools.accumulate(len(part) for part in parts))
        self._places = tuple(slice(*pair) for pair in itertools.pairwise([0, *ends]))
        self._addresses: list[int] = []
        self._values = parts[0].detach()
        self.values()

    def values(self) -> Tensor:
        """All parameters as one tensor; the parameters themselves are views of it."""
        addresses = [part.data_ptr() for part in self._parts]
        if addresses != self._addresses:
            self._values = self._parts[0].detach()
            if len(self._parts) > 1:
                self._values = torch.cat([part.detach() for part in self._parts])
                for part, place in zip(self._parts, self._places, strict=True):
                    part.data = self._values[place]
            self._addresses = [part.data_ptr() for part in self._parts]
        return self._values

    def add(self, step: Callable[..., Tensor], *operands: Tensor) -> None:
        """Call step(gradient so far or None, *operands), which returns the new gradient of the masters."""
        before = self._gradient()
        after = step(before, *operands)
        if after is not before:
            for master, place in zip(self._masters, self._places, strict=True):
                master.grad = after[place] if len(self._masters) > 1 else after

    def _gradient(self) -> Tensor | None:
        """The masters' gradients as one tensor of which they are views; None: they have none."""
        first = self._masters[0].grad
        if len(self._masters) == 1 or all(master.grad is None for master in self._masters):
            return first
        base = None if first is None else first._base
        if base is not None and all(
            master.grad is not None and master.grad._base is base for master in self._masters
        ):
            return base
        gradients = [m.grad if m.grad is not None else torch.zeros_like(m) for m in self._masters]
        joined = torch.cat(gradients).detach()
        for master, place in zip(self._masters, self._places, strict=True):
            master.grad = joined[place]
        return joined


def add_product(total: Tensor | None, left_TO: Tensor, right_TI: Tensor) -> Tensor:
    """Total + left^T right in float32; the total changes in place."""
    left_OT = left_TO.t()
    if left_TO.dtype is torch.float32:
        return left_OT @ right_TI if total is None else total.addmm_(left_OT, right_TI)
    if total is None:
        return torch.mm(left_OT, right_TI, out_dtype=torch.float32)
    if adds_in_float32(left_TO.device, left_TO.dtype):
        return torch.addmm(total, left_OT, right_TI, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(left_OT, right_TI, out_dtype=torch.float32))


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix in place; tried once."""
    left, total = torch.eye(16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, left, 2 * left, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 1 + 2 * left.float()).all())


def _add_sum(total: Tensor | None, values: Tensor) -> Tensor:
    return values if total is None else total.add_(values)


# ---- products


class Product(Step):
    """A product with trained or frozen matrices."""

    @property
    def trains(self) -> bool:
        """Whether the matrices are trained."""
        return True

    def multiply(self, x: Tensor) -> Tensor:
        """The output."""
        raise NotImplementedError

    def multiply_onto(self, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        """Residual + scale x output."""
        return add_scaled_(self.multiply(x), residual, scale)

    def multiply_back(self, grad: Tensor) -> Tensor:
        """The gradient of the input."""
        raise NotImplementedError

    def add_gradients(self, grad: Tensor, x: Tensor) -> None:
        """Add the gradients of the weights to those of their masters."""
        raise NotImplementedError

    def forward(self, x: Tensor, *, owned: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.multiply(x), (x,) if self.trains else ()

    def forward_onto(
        self, x: Tensor, residual: Tensor, scale: float, *, owned: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.multiply_onto(x, residual, scale), (x,) if self.trains else ()

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], added: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        if self.trains:
            self.add_gradients(grad, saved[0])
        x_grad = self.multiply_back(grad)
        return x_grad if added is None else x_grad.add_(added), ()


@dataclass(slots=True, eq=False)
class JointProduct(Product):
    """The product of linear layers that have the same input, their outputs side by side."""

    weight: Joint
    bias: Joint | None

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.values(), None if self.bias is None else self.bias.values())

    def multiply_onto(self, x: Tensor, residual: Tensor, scale: float) -> Tensor:
        if self.bias is None and scale == 1.0:  # one launch
            return torch.addmm(residual, x, self.weight.values().t())
        return add_scaled_(self.multiply(x), residual, scale)

    def multiply_back(self, grad: Tensor) -> Tensor:
        return grad @ self.weight.values()

    def add_gradients(self, grad: Tensor, x: Tensor) -> None:
        self.weight.add(add_product, grad, x)
        if self.bias is not None:
            self.bias.add(_add_sum, grad.sum(0, dtype=torch.float32))


@dataclass(slots=True, frozen=True, eq=False)
class SortedRows:
    """The rows of tokens, one for each of their experts, sorted by expert; no count is known to the host."""

    place_M: Tensor  # of each sorted row among tokens x choices
    back_M: Tensor  # the sorted row of each of them
    expert_M: Tensor
    ends_E: Tensor  # int32
    choices: int

    @classmethod
    def of(cls, expert_RC: Tensor, count: int) -> SortedRows:
        expert_M, place_M = expert_RC.flatten().sort(stable=True)
        numbers_E = torch.arange(count, device=expert_M.device)
        return cls(
            place_M=place_M,
            back_M=place_M.argsort(),
            expert_M=expert_M,
            ends_E=torch.searchsorted(expert_M, numbers_E, right=True, out_int32=True),
            choices=expert_RC.shape[1],
        )

    def spread(self, x_RD: Tensor) -> Tensor:
        """A row for each expert of each token."""
        spread_MD: Tensor = _Permute.apply(
            x_RD, self.place_M // self.choices, self.back_M, self.choices
        )
        return spread_MD

    def collect(self, output_MD: Tensor) -> Tensor:
        """The outputs [tokens, choices, size]."""
        collected: Tensor = _Permute.apply(output_MD, self.back_M, self.place_M, 1)
        return collected.unflatten(0, (-1, self.choices))


class _Permute(torch.autograd.Function):
    """Rows by their numbers; `back_M` says where the copies of each row went, one after another."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, number_M: Tensor, back_M: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back_M)
        ctx.copies = copies
        return rows_RD.index_select(0, number_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad_MD = grads[0].index_select(0, ctx.saved_tensors[0])
        if ctx.copies > 1:
            grad_MD = grad_MD.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad_MD, None, None, None


@dataclass(slots=True, eq=False)
class Stack(Sequence[Linear]):
    """The matrices of all experts; `of` gives the product with sorted rows, one launch for all experts."""

    weight_EOI: nn.Parameter  # or [experts, inputs, outputs]
    bias_EO: nn.Parameter | None
    transposed: bool
    masters: Masters

    def __getitem__(self, index: Any) -> Any:
        weight = self.weight_EOI.transpose(1, 2) if self.transposed else self.weight_EOI
        return _modules.stacked(weight, self.bias_EO)[index]

    def __len__(self) -> int:
        return len(self.weight_EOI)

    def of(self, rows: SortedRows) -> Product:
        """The product of the stack with rows sorted by their experts."""
        return _GroupedProduct(self, rows)


@dataclass(slots=True, eq=False)
class _GroupedProduct(Product):
    stack: Stack
    rows: SortedRows

    @property
    def trains(self) -> bool:
        return self.stack.weight_EOI.requires_grad

    def multiply(self, x: Tensor) -> Tensor:
        stack = self.stack
        weight = stack.weight_EOI.detach()
        weight_EIO = weight if stack.transposed else weight.transpose(1, 2)
        output_MO = torch._grouped_mm(x, weight_EIO, offs=self.rows.ends_E)
        if stack.bias_EO is not None:
            output_MO += stack.bias_EO.detach().index_select(0, self.rows.expert_M)
        return output_MO

    def multiply_back(self, grad: Tensor) -> Tensor:
        weight = self.stack.weight_EOI.detach()
        weight_EOI = weight.transpose(1, 2) if self.stack.transposed else weight
        return torch._grouped_mm(grad, weight_EOI, offs=self.rows.ends_E)

    def add_gradients(self, grad: Tensor, x: Tensor) -> None:
        stack, ends_E = self.stack, self.rows.ends_E
        left, right = (x, grad) if stack.transposed else (grad, x)
        product = torch._grouped_mm(left.t(), right, offs=ends_E)
        # an expert without rows: its part of the output was never written
        empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        product.masked_fill_(empty_E[:, None, None], 0)
        add_to(stack.masters[id(stack.weight_EOI)], product)
        if stack.bias_EO is not None:
            chosen_ME = self.rows.expert_M[:, None] == torch.arange(len(stack), device=grad.device)
            sums_EO = add_product(None, chosen_ME.to(grad.dtype), grad)
            add_to(stack.masters[id(stack.bias_EO)], sums_EO)


# ---- how a trainer reads a model


class TrainProducts:
    """Joint products of plain linear layers and stacks of experts; anything else through its own module."""

    def __init__(self, masters: Masters, kind: type[JointProduct] = JointProduct) -> None:
        self._masters, self._kind = masters, kind
        self._products: dict[tuple[int, ...], JointProduct] = {}

    def joint(self, modules: list[Any]) -> Linear:
        """The outputs of linear layers of one input, side by side."""
        if not all(type(module) is nn.Linear for module in modules):
            return _modules.joint(modules)
        weights = [module.weight for module in modules]
        key = tuple(map(id, weights))
        if key not in self._products:
            biases = [module.bias for module in modules if module.bias is not None]
            if not self._fits(weights, biases):
                return _modules.joint(modules)
            self._products[key] = self._kind(
                Joint(weights, self._masters), Joint(biases, self._masters) if biases else None
            )
        return self._products[key]

    def stacked(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> Sequence[Linear]:
        """One product for each of stacked weights."""
        whole: Any = weight_EOI if weight_EOI._base is None else weight_EOI._base
        bias: Any = bias_EO
        known = all(
            not p.requires_grad or id(p) in self._masters for p in (whole, bias) if p is not None
        )
        if whole.ndim != 3 or not known:  # a router, or gradients that autograd must deliver
            return _modules.stacked(weight_EOI, bias_EO)
        return Stack(whole, bias, weight_EOI.stride() != whole.stride(), self._masters)

    def adder(self, weight: nn.Parameter) -> Callable[[Tensor, Tensor], None] | None:
        """A function that adds left^T right to the gradient of a weight's master; None: it has none."""
        if id(weight) not in self._masters:
            return None
        return functools.partial(Joint([weight], self._masters).add, add_product)

    def _fits(self, weights: list[nn.Parameter], biases: list[nn.Parameter]) -> bool:
        """Whether all have masters and one format, and begin aligned when joined."""
        parameters = [*weights, *biases]
        return (
            len(biases) in (0, len(weights))
            and all(id(p) in self._masters for p in parameters)
            and len({p.dtype for p in parameters}) == 1
            and not any(p.numel() * p.element_size() % _ALIGN for p in parameters)
        )
