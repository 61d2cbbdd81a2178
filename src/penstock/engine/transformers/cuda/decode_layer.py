"""A decoder layer's decode step in ten launches instead of sixteen.

For layers of the usual form: norm, attention with rotary positions, residual, norm, gated activation,
residual. Rotary embedding and KV store are one kernel, and the products add to the residual. A layer of a known
class is compared with its own output before its code is replaced. Prefills run the layer's own code.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional

from penstock.engine.transformers.cuda.cuda_steps import DecodeStep
from penstock.engine.transformers.cuda.regions import KVPool
from penstock.engine.transformers.kv_attention import KVShape, StepCache, current_step, running
from penstock.models.layer_kernels import is_close, is_silu, silu_gate

_KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")


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
    own = _joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    return own is not None and gates is not None and gates[1] is None and is_silu(layer.mlp.act_fn)


def _window(attention: Any) -> int | None:
    """Return the sliding window; some classes keep it in the config only."""
    own = getattr(attention.config, "sliding_window", None)
    window: int | None = getattr(attention, "sliding_window", own)
    return window


def _joined(*parts: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight and bias that `fuse_projections` gave these layers, else None."""
    weight, bias = parts[0].weight, parts[0].bias
    rows, wanted = 0, (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    for part in parts:
        place = (part.weight.data_ptr(), 0 if part.bias is None else part.bias.data_ptr())
        if place != wanted:
            return None
        rows += len(part.weight)
        wanted = (
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
    return _decode(layer, step, hidden_states[0], (turn[0][0], turn[1][0]))[None]


def _decode(
    layer: Any, step: DecodeStep, x_BD: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the layer's output; may overwrite its input."""
    attention, mlp = layer.self_attn, layer.mlp
    joined, gates = (
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        _joined(mlp.gate_proj, mlp.up_proj),
    )
    assert joined is not None
    assert gates is not None
    product_BN = functional.linear(layer.input_layernorm(x_BD), *joined)
    mixed_BHD = step.turn_and_attend(
        attention.layer_idx, product_BN, turn, attention.scaling, _window(attention)
    )
    x_BD = _add_product(x_BD, mixed_BHD.flatten(1), attention.o_proj)
    gates_BF = functional.linear(layer.post_attention_layernorm(x_BD), *gates)
    return _add_product(x_BD, silu_gate(*gates_BF.chunk(2, dim=1)), mlp.down_proj)


def _add_product(total_BD: torch.Tensor, x_BK: torch.Tensor, linear: Any) -> torch.Tensor:
    """Add a linear layer's output to the total, in place and in one kernel."""
    total_BD.addmm_(x_BK, linear.weight.t())
    return total_BD if linear.bias is None else total_BD.add_(linear.bias)


def _computes_the_same(layer: Any, rotary: Any, shape: KVShape) -> bool:
    """Compare two steps of three rows, the second with a token before it, with the layer's own.

    The inputs are small, so that what the layer adds to them counts.
    """
    weight = layer.self_attn.q_proj.weight
    device, width = weight.device, weight.shape[1]

    rows = 3

    def steps(*, own: bool) -> list[torch.Tensor]:
        pool, outputs = KVPool.allocate(shape, 2 * rows, device), []
        inputs = torch.linspace(-9, 9, 2 * rows * width, device=device).sin() / 256
        for position, x_BD in enumerate(inputs.to(weight.dtype).view(2, rows, width)):
            position_B = torch.full((rows,), position, device=device)
            turn = rotary(x_BD[None], position_B[None])
            step = DecodeStep(pool, 2 * torch.arange(rows, device=device), position_B)
            with running(step):
                if own:
                    made = layer(
                        x_BD[None],
                        position_embeddings=turn,
                        past_key_values=StepCache(),
                        use_cache=True,
                    )
                    outputs.append((made[0] if isinstance(made, tuple) else made)[0])
                else:
                    outputs.append(_decode(layer, step, x_BD, (turn[0][0], turn[1][0])))
        return outputs

    probe = torch.zeros(1, rows, width, device=device, dtype=weight.dtype)
    turn = rotary(probe, torch.arange(rows, device=device)[None])
    if tuple(turn[0].shape) != (1, rows, shape.key_size):
        return False  # positions turn a part of each head
    return all(map(is_close, steps(own=False), steps(own=True)))
