"""A decoder layer's decode step in few launches: six to nine for few rows, ten for many, instead of sixteen.

For layers of the usual form: norm, attention with rotary positions, residual, norm, gated activation,
residual. With many rows, rotary embedding and KV store are one kernel, and the products add to the residual; with few
rows, products are kernels with their neighbours (`row_kernels.py`). A layer of a known
class is compared with its own output before its code is replaced. `prefill` is the same for packed prompts; `decode_model.py`
calls it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from penstock.engine.transformers.cuda.cuda_steps import DecodeStep, PrefillStep
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.kv_attention import KVShape, StepCache, current_step, running
from penstock.model.kernels import row_tiles
from penstock.model.kernels.layer_kernels import gate_values, is_close, rotate_
from penstock.model.kernels.row_kernels import add_product, gate_product, norm_rows
from penstock.model.layer_form import is_silu, window_of
from penstock.model.norms import epsilon

_KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
Norm = tuple[torch.Tensor, float]  # weight and epsilon
Linear = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias


@dataclass(slots=True, frozen=True, kw_only=True)
class LayerParts:
    """What a step needs of a layer. Its modules are read once, because a prefill waits while the host reads them.

    Valid until the weights move to other memory.
    """

    number: int
    scale: float
    window: int | None
    first_norm: Norm
    heads: Linear  # q, k and v
    turned: int  # columns of q and k
    out: Linear
    second_norm: Norm
    gates: torch.Tensor  # gate and up
    down: Linear

    @classmethod
    def of(cls, layer: Any) -> LayerParts:
        attention, mlp = layer.self_attn, layer.mlp
        heads = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        gates = _joined(mlp.gate_proj, mlp.up_proj)
        assert heads is not None
        assert gates is not None
        return cls(
            number=attention.layer_idx,
            scale=attention.scaling,
            window=window_of(attention),
            first_norm=norm_parts(layer.input_layernorm),
            heads=heads,
            turned=attention.q_proj.out_features + attention.k_proj.out_features,
            out=(attention.o_proj.weight, attention.o_proj.bias),
            second_norm=norm_parts(layer.post_attention_layernorm),
            gates=gates[0],
            down=(mlp.down_proj.weight, mlp.down_proj.bias),
        )


def fuse_decode(model: Any, shape: KVShape) -> int:
    """Install the decode step in the layers that compute the same with it; return how many."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or shape.key_size != shape.value_size or shape.key_size % 2:
        return 0
    count = 0
    with torch.no_grad():
        for layer in model.modules():
            if _has_usual_form(layer) and _computes_the_same(layer, rotary, shape):
                layer.forward = types.MethodType(_forward, layer)
                count += 1
    return count


def _has_usual_form(layer: Any) -> bool:
    if type(layer).__name__ not in _KNOWN:
        return False
    gates = _joined(layer.mlp.gate_proj, layer.mlp.up_proj)
    projections = _joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if projections is None or gates is None or any(epsilon(norm) is None for norm in norms):
        return False
    return gates[1] is None and is_silu(layer.mlp.act_fn)


def _joined(*parts: Any) -> Linear | None:
    """The weight and bias that `fuse_projections` gave these layers, else None."""
    weight, bias = parts[0].weight, parts[0].bias
    rows, expected = 0, (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    for part in parts:
        place = (part.weight.data_ptr(), 0 if part.bias is None else part.bias.data_ptr())
        if place != expected:
            return None
        rows += len(part.weight)
        expected = (
            place[0] + part.weight.numel() * weight.element_size(),
            0 if part.bias is None else place[1] + part.bias.numel() * part.bias.element_size(),
        )
    inputs = weight.shape[1]
    return (
        weight.detach().as_strided((rows, inputs), (inputs, 1)),
        None if bias is None else bias.detach().as_strided((rows,), (1,)),
    )


def _forward(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    turn = kwargs.get("position_embeddings")
    if args or not isinstance(step, DecodeStep) or not isinstance(turn, tuple):
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    return decode(LayerParts.of(layer), step, hidden_states[0], (turn[0][0], turn[1][0]))[None]


def decode(
    layer: LayerParts, step: DecodeStep, x_BD: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The layer's output; may overwrite its input."""
    query_BHD = _project(layer, step, x_BD, turn)
    mixed_BHD = step.mix(layer.number, query_BHD, layer.scale, layer.window)
    return _after_attention(layer, x_BD, mixed_BHD.flatten(1))


def prefill(
    layer: LayerParts,
    step: PrefillStep,
    x_RD: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The layer's output for packed prompts; may overwrite its input."""
    size = turn[0].shape[-1]
    joint_RC = functional.linear(norm_rows(x_RD, layer.first_norm), *layer.heads)
    rotate_(joint_RC, layer.turned // size, size, *turn)
    mixed_RHD = step.mix(layer.number, joint_RC, layer.scale, layer.window)
    return _after_attention(layer, x_RD, mixed_RHD.flatten(1))


def _after_attention(layer: LayerParts, x_BD: torch.Tensor, mixed_BC: torch.Tensor) -> torch.Tensor:
    x_BD = _add_product("out", x_BD, mixed_BC, layer.out)
    gated_BF = _gate(layer.second_norm, x_BD, layer.gates)
    return _add_product("down", x_BD, gated_BF, layer.down)


def _project(
    layer: LayerParts, step: DecodeStep, x_BD: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Store the rows' keys and values; return their queries."""
    tiles = row_tiles.choose("heads", x_BD, layer.heads[0])
    if tiles is None:
        product_BN = functional.linear(norm_rows(x_BD, layer.first_norm), *layer.heads)
        return step.turn(layer.number, product_BN, turn)
    return step.project(layer.number, x_BD, layer.first_norm, layer.heads, turn, tiles)


def _gate(norm: Norm, x_BD: torch.Tensor, weight_FD: torch.Tensor) -> torch.Tensor:
    tiles = row_tiles.choose("gate", x_BD, weight_FD)
    if tiles is None:
        product_BF = functional.linear(norm_rows(x_BD, norm), weight_FD)
        return gate_values(*product_BF.chunk(2, dim=1))
    return gate_product(x_BD, norm, weight_FD, tiles)


def norm_parts(norm: Any) -> Norm:
    """The weight and epsilon of an RMS norm."""
    eps = epsilon(norm)
    assert eps is not None
    return norm.weight, eps


def _add_product(
    product: row_tiles.Product, total_BD: torch.Tensor, x_BK: torch.Tensor, linear: Linear
) -> torch.Tensor:
    """Add a linear layer's output to the total, in place and in one kernel."""
    weight, bias = linear
    tiles = row_tiles.choose(product, x_BK, weight)
    if tiles is not None:
        return add_product(total_BD, x_BK, weight, bias, tiles)
    total_BD.addmm_(x_BK, weight.t())
    return total_BD if bias is None else total_BD.add_(bias)


def _computes_the_same(layer: Any, rotary: Any, shape: KVShape) -> bool:
    """Whether two decode steps give what the layer's own code gives, for few rows and for many.

    The second step has a token before it. The inputs are small, so that what the layer adds to them counts.
    """
    weight = layer.self_attn.q_proj.weight
    device, width = weight.device, weight.shape[1]

    def steps(rows: int, *, fused: bool) -> list[torch.Tensor]:
        pool, outputs = KVPool.allocate(shape, 2 * rows, device), []
        inputs = torch.linspace(-9, 9, 2 * rows * width, device=device).sin() / 256
        for position, x_BD in enumerate(inputs.to(weight.dtype).view(2, rows, width)):
            position_B = torch.full((rows,), position, device=device)
            turn = rotary(x_BD[None], position_B[None])
            step = DecodeStep.at(pool, 2 * torch.arange(rows, device=device), position_B)
            with running(step):
                if not fused:
                    output = layer(
                        x_BD[None],
                        position_embeddings=turn,
                        past_key_values=StepCache(),
                        use_cache=True,
                    )
                    outputs.append((output[0] if isinstance(output, tuple) else output)[0])
                else:
                    parts = LayerParts.of(layer)
                    outputs.append(decode(parts, step, x_BD, (turn[0][0], turn[1][0])))
        return outputs

    probe = torch.zeros(1, 3, width, device=device, dtype=weight.dtype)
    turn = rotary(probe, torch.arange(3, device=device)[None])
    if tuple(turn[0].shape) != (1, 3, shape.key_size):
        return False  # positions turn a part of each head
    return all(
        all(map(is_close, steps(rows, fused=True), steps(rows, fused=False)))
        for rows in (3, row_tiles.MOST_ROWS + 1)
    )
