"""A whole decoder layer as one autograd function, for a trainer that changes all weights on one GPU.

The layer's own code makes a launch, an autograd node and a gradient in half precision for every small
operation and every parameter, and the GPU waits for them. Here one function runs a layer forward and one
runs it backward, by hand: q, k and v are one product, gate and up another, and the gradients of weights are
added straight into the float32 gradients of their masters. Covers Llama's architecture and its relatives
(SmolLM2, Mistral without a window, Qwen2 and its biases, Qwen3 and its norms of queries and keys).
`install` compares each layer with its own output; a layer that does not match keeps its own code.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.model.attention import fits_flash
from penstock.model.kernels.layer_kernels import is_close
from penstock.model.kernels.layer_steps import Heads
from penstock.model.kernels.norm_kernels import LARGEST
from penstock.model.layer_form import is_silu
from penstock.model.norms import epsilon
from penstock.model.packed_attention import Block, PackLayout

_ALIGN = 16  # bytes: kernels read a parameter's first bytes in words of this size


class Joint:
    """Parameters of equal width that lie end to end in memory, as one, and the masters of each."""

    def __init__(self, parts: Sequence[nn.Parameter], masters: Mapping[int, nn.Parameter]) -> None:
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
            self._values = self._join() if len(self._parts) > 1 else self._parts[0].detach()
            self._addresses = [part.data_ptr() for part in self._parts]
        return self._values

    def _join(self) -> Tensor:
        whole = _adjacent(self._parts)
        if whole is None:
            whole = torch.cat([part.detach() for part in self._parts])
            for part, place in zip(self._parts, self._places, strict=True):
                part.data = whole[place]
        return whole

    def add(self, step: Callable[..., Tensor], *operands: Tensor) -> None:
        """Call step(gradient so far or None, *operands), which returns the new gradient of the masters."""
        before = self._gradient()
        after = step(before, *operands)
        if after is not before:
            for master, place in zip(self._masters, self._places, strict=True):
                master.grad = after[place] if len(self._masters) > 1 else after

    def drop_gradients(self) -> None:
        """Set the gradients of the masters to None."""
        for master in self._masters:
            master.grad = None

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


def _adjacent(parts: Sequence[nn.Parameter]) -> Tensor | None:
    """Parameters that lie end to end already as one tensor."""
    at = parts[0].data_ptr()
    storage = parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage:
            return None
        at += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return parts[0].detach().as_strided(shape, parts[0].stride())


def _add_sum(total: Tensor | None, values: Tensor) -> Tensor:
    return values if total is None else total.add_(values)


@dataclass(slots=True, eq=False)
class HeadNorm:
    """The norm of each query, or of each key, before the rotation; these take some columns of the joint product."""

    steps: Any
    weight: Joint
    eps: float
    columns: slice
    size: int

    def forward(self, joint_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the heads by their norms; return what they were, and 1 / root mean square."""
        part_TC = joint_TC[:, self.columns]
        heads_RD = part_TC.clone(memory_format=torch.contiguous_format).view(-1, self.size)
        normed_RD, inverse = self.steps.norm(heads_RD, self.weight.values(), self.eps)
        part_TC.copy_(normed_RD.view(part_TC.shape))
        return heads_RD, inverse

    def backward(self, grad_TC: Tensor, heads_RD: Tensor, inverse: Tensor) -> None:
        """Replace the gradient of the norms by that of the heads; add the weight's to its master."""
        part_TC = grad_TC[:, self.columns]
        part_RD = part_TC.reshape(-1, self.size)
        heads_grad_RD, weight_grad_D = self.steps.norm_back(
            part_RD, heads_RD, self.weight.values(), inverse
        )
        self.weight.add(_add_sum, weight_grad_D)
        part_TC.copy_(heads_grad_RD.view(part_TC.shape))


@dataclass(slots=True, eq=False, kw_only=True)
class LayerPass:
    """The weights of one layer, and the steps between their products (`layer_steps.py` or its kernels)."""

    steps: Any
    heads: Heads
    first_norm: Joint
    first_eps: float
    projections: Joint  # q, k and v
    biases: Joint | None  # of q, k and v
    head_norms: list[HeadNorm]
    output: Joint
    second_norm: Joint
    second_eps: float
    gate_up: Joint
    down: Joint

    def forward(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: PackLayout
    ) -> tuple[Tensor, list[Tensor]]:
        """The layer's output and what its backward pass needs."""
        steps = self.steps
        normed_TD, inverse = steps.norm(x_TD, self.first_norm.values(), self.first_eps)
        bias = None if self.biases is None else self.biases.values()
        joint_TC = linear(normed_TD, self.projections.values(), bias)
        heads = [tensor for norm in self.head_norms for tensor in norm.forward(joint_TC)]
        steps.rotate_(joint_TC, cos, sin, self.heads)
        attended = steps.attend(joint_TC, layout, self.heads)
        projected_TD = linear(attended[0], self.output.values())
        middle_TD, second_TD, second_inverse = steps.add_norm(
            x_TD, projected_TD, self.second_norm.values(), self.second_eps
        )
        both_TF = linear(second_TD, self.gate_up.values())
        output_TD = middle_TD + linear(steps.gate(both_TF), self.down.values())
        saved = [x_TD, normed_TD, inverse, joint_TC, middle_TD, second_TD, second_inverse, both_TF]
        return output_TD, [*saved, cos, sin, *heads, *attended]

    def backward(self, grad_TD: Tensor, saved: Sequence[Tensor], layout: PackLayout) -> Tensor:
        """Add the gradients of the weights to their masters; return that of the layer's input."""
        steps, add_product = self.steps, self.steps.add_product
        x_TD, normed_TD, inverse, joint_TC, middle_TD, second_TD, second_inverse, both_TF = saved[
            :8
        ]
        cos, sin, *others = saved[8:]
        split = 2 * len(self.head_norms)
        heads, attended = others[:split], others[split:]
        both_grad_TF, active_TF = steps.gate_back(grad_TD @ self.down.values(), both_TF)
        self.down.add(add_product, grad_TD, active_TF)
        del active_TF
        self.gate_up.add(add_product, both_grad_TF, second_TD)
        middle_grad_TD, weight_grad_D = steps.norm_back(
            both_grad_TF @ self.gate_up.values(),
            middle_TD,
            self.second_norm.values(),
            second_inverse,
            grad_TD,
        )
        del both_grad_TF
        self.second_norm.add(_add_sum, weight_grad_D)
        self.output.add(add_product, middle_grad_TD, attended[0])
        joint_grad_TC = steps.attend_back(
            middle_grad_TD @ self.output.values(),
            joint_TC,
            tuple(attended),
            layout,
            self.heads,
            cos,
            sin,
        )
        for number, norm in enumerate(self.head_norms):
            norm.backward(joint_grad_TC, *heads[2 * number : 2 * number + 2])
        self.projections.add(add_product, joint_grad_TC, normed_TD)
        if self.biases is not None:
            exact = torch.promote_types(joint_grad_TC.dtype, torch.float32)
            self.biases.add(_add_sum, joint_grad_TC.sum(0, dtype=exact))
        x_grad_TD, weight_grad_D = steps.norm_back(
            joint_grad_TC @ self.projections.values(),
            x_TD,
            self.first_norm.values(),
            inverse,
            middle_grad_TD,
        )
        self.first_norm.add(_add_sum, weight_grad_D)
        return x_grad_TD

    def probe(self) -> tuple[Tensor, Tensor, Tensor, PackLayout]:
        """Inputs of `forward`: two short sequences, small beside what the layer adds to them."""
        weight = self.first_norm.values()
        options = {"device": weight.device, "dtype": weight.dtype}

        def draw(*shape: int) -> Tensor:
            count = int(torch.tensor(shape).prod())
            return torch.linspace(-2, 2 + count % 7, count, device=weight.device).sin().view(shape)

        x_TD = (draw(7, len(weight)) / 64).to(**options)
        turns = [draw(1, 7, self.heads.size).add(shift).cos().to(**options) for shift in (0, 1)]
        layout = PackLayout(
            blocks=(Block(1, 3), Block(1, 4)),
            bounds_S1=torch.tensor([0, 3, 7], dtype=torch.int32, device=weight.device),
            longest=4,
        )
        return x_TD, *turns, layout

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copy of the model runs its own code, because the masters are not its own."""

    def drop_gradients(self) -> None:
        """Set the gradients of all masters to None."""
        joints = [self.first_norm, self.projections, self.output, self.second_norm, self.gate_up]
        joints += [self.down, *(norm.weight for norm in self.head_norms)]
        for joint in joints if self.biases is None else [*joints, self.biases]:
            joint.drop_gradients()


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: PackLayout, layer: LayerPass
    ) -> Tensor:
        output_TD, saved = layer.forward(x[0], cos, sin, layout)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.layer = layout, layer
        return output_TD[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad_TD = grads[0][0].contiguous()
        x_grad_TD = ctx.layer.backward(grad_TD, ctx.saved_tensors, ctx.layout)
        return x_grad_TD[None], None, None, None, None


# ---- installing it


def install(model: nn.Module, masters: Mapping[int, nn.Parameter], steps: Any) -> int:
    """Run every layer that matches as one function; return how many.

    `masters` gives the master of each parameter by the parameter's id: itself if it has no other.
    """
    count = 0
    for module in model.modules():
        layer = _read(module, masters, steps)
        if layer is not None and _matches(module, layer):
            module.layer_pass = layer
            module.forward = types.MethodType(_forward, module)
            count += 1
    return count


def restore(model: nn.Module) -> None:
    """Undo `install`: every layer runs its own code again. Joint weights stay where they are."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
            del module.forward, module.layer_pass


def warm_up(model: nn.Module) -> None:
    """Compile what the first update needs, with one layer's passes; its masters have no gradients yet."""
    layer = next(
        (module.layer_pass for module in model.modules() if hasattr(module, "layer_pass")), None
    )
    if layer is None:
        return
    with torch.no_grad():
        x_TD, cos, sin, layout = layer.probe()
        output_TD, saved = layer.forward(x_TD, cos, sin, layout)
        layer.backward(output_TD, saved, layout)
    layer.drop_gradients()


def _forward(module: Any, hidden_states: Tensor, *inputs: Any, **keywords: Any) -> Tensor:
    layout: Any = keywords.get("pack_layout")
    turns: Any = keywords.get("position_embeddings")
    layer: LayerPass | None = module.layer_pass  # None: the module is a copy
    fits = layer is not None and turns is not None and not inputs and bool(hidden_states.numel())
    if not fits or not _can_run(layout, hidden_states):
        output: Tensor = type(module).forward(module, hidden_states, *inputs, **keywords)
        return output
    cos, sin = turns
    output = _LayerFunction.apply(
        hidden_states.contiguous(), cos.contiguous(), sin.contiguous(), layout, layer
    )
    return output


def _can_run(layout: PackLayout | None, hidden_states: Tensor) -> bool:
    """Whether all keys are in the pack, and a backward pass will come through here."""
    if (
        layout is None
        or layout.gather is not None
        or (layout.shared is not None and layout.shared.copies is None)
    ):
        return False
    return hidden_states.requires_grad or not torch.is_grad_enabled()


_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")


def _read(module: nn.Module, masters: Mapping[int, nn.Parameter], steps: Any) -> LayerPass | None:
    """The weights of a layer that `LayerPass` can compute; None if its architecture is another."""
    if set(module._modules) != _PARTS or getattr(module, "gradient_checkpointing", False):
        return None
    attention: Any = module.self_attn
    mlp: Any = module.mlp
    norms: list[Any] = [module.input_layernorm, module.post_attention_layernorm]
    norms += [getattr(attention, n) for n in _HEAD_NORMS if n in attention._modules]
    products: list[Any] = [getattr(attention, name, None) for name in _PROJECTIONS]
    products += [getattr(mlp, name, None) for name in _MLP]
    if not all(type(product) is nn.Linear for product in products):
        return None
    if any(getattr(norm, "weight", None) is None or epsilon(norm) is None for norm in norms):
        return None
    parameters = [module.weight for module in (*products, *norms)]
    parameters += [product.bias for product in products[:3] if product.bias is not None]
    if len(parameters) - len(products) - len(norms) not in (0, 3) or not _can_join(
        parameters, masters
    ):
        return None
    if {id(p) for p in parameters} != {id(p) for p in module.parameters()}:
        return None  # it has weights that are not known here
    heads = _heads(attention, norms[2:])
    if heads is None or not hasattr(mlp, "act_fn") or not is_silu(mlp.act_fn):
        return None
    q, k, v, out, gate, up, down = products
    eps: list[Any] = [epsilon(norm) for norm in norms]
    columns = slice(0, q.out_features), slice(q.out_features, heads.rotated)
    return LayerPass(
        steps=steps,
        heads=heads,
        first_norm=Joint([norms[0].weight], masters),
        first_eps=eps[0],
        projections=Joint([q.weight, k.weight, v.weight], masters),
        biases=None if q.bias is None else Joint([q.bias, k.bias, v.bias], masters),
        head_norms=[
            HeadNorm(steps, Joint([norm.weight], masters), norm_eps, place, heads.size)
            for norm, norm_eps, place in zip(norms[2:], eps[2:], columns, strict=False)
        ],
        output=Joint([out.weight], masters),
        second_norm=Joint([norms[1].weight], masters),
        second_eps=eps[1],
        gate_up=Joint([gate.weight, up.weight], masters),
        down=Joint([down.weight], masters),
    )


def _can_join(parameters: Sequence[nn.Parameter], masters: Mapping[int, nn.Parameter]) -> bool:
    """Whether all have masters and one format, begin aligned when joined, and fit the kernels."""
    return (
        all(id(parameter) in masters for parameter in parameters)
        and len({parameter.dtype for parameter in parameters}) == 1
        and not any(
            parameter.numel() * parameter.element_size() % _ALIGN for parameter in parameters
        )
        and all(parameter.ndim > 1 or len(parameter) <= LARGEST for parameter in parameters)
    )


def _heads(attention: Any, norms: Sequence[Any]) -> Heads | None:
    """The heads of an attention layer; None if it has a window or heads that do not fit."""
    size: Any = getattr(attention, "head_dim", None)
    config: Any = getattr(attention, "config", None)
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    if window is not None or not isinstance(size, int) or size % 2 or not fits_flash(size, size):
        return None
    if len(norms) == 1 or any(norm.weight.shape != (size,) for norm in norms):
        return None
    return Heads(
        queries=attention.q_proj.out_features // size,
        keys=attention.k_proj.out_features // size,
        size=size,
        scale=float(getattr(attention, "scaling", size**-0.5)),
    )


def _matches(module: Any, layer: LayerPass) -> bool:
    """Whether the layer's own code, for two short sequences, gives the same up to rounding."""
    with torch.no_grad():
        x_TD, cos, sin, layout = layer.probe()
        try:
            expected = module(
                x_TD[None],
                attention_mask=None,
                position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=x_TD.device),
                position_embeddings=(cos, sin),
                pack_layout=layout,
            )
        except (TypeError, ValueError, RuntimeError):
            return False  # another signature
        if not isinstance(expected, Tensor):
            return False
        actual_TD, _ = layer.forward(x_TD, cos, sin, layout)
    return is_close(actual_TD, expected[0])
