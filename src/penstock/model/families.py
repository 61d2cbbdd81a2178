"""The decoder families: each is a row of data that `decoder.py` computes.

A row is made from a transformers config, read through its class, whose defaults carry facts. What differs
from layer to layer (window, rotation, experts) is resolved once. Where rotation frequencies depend on the
length (long rope, dynamic), they are chosen for the longest sequence of the run, so that a token's log-prob
does not depend on what else is in the batch. A model type without a row runs transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rope:
    """Rotary positions: the first 2 x len(frequencies) numbers of a head turn in halves."""

    frequencies: torch.Tensor  # float32
    factor: float = 1.0  # of cosine and sine
    changes_at: int | None = None  # sequences longer than this turn otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What differs from layer to layer."""

    window: int | None  # tokens that a token sees, itself included; None: all before it
    rope: str | None  # key of `Family.ropes`; None: no positions
    experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How tokens choose experts, and what an expert computes."""

    router: str  # name of the router in the mlp
    count: int  # experts per token
    renormalises: bool = True  # the chosen weights add up to one
    router_in_float32: bool = True  # its softmax; else in the model's format
    weights_in_float32: bool = False  # products of the chosen weights
    transposed: bool = False  # weights are [inputs, outputs], gate and up alternate
    clamp: tuple[float, float] | None = None  # alpha and limit of a clamped swiglu


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """One decoder; biases are where the checkpoint has them."""

    heads: int
    kv_heads: int
    head_size: int
    layers: tuple[Layer, ...]
    ropes: dict[str, Rope]
    # before attention, after it, before the mlp, after it; None: no norm there
    norms: tuple[str | None, str | None, str | None, str | None]
    epsilon: float
    norm_adds_one: bool  # the weight is an offset from one
    norm_rounds_late: bool  # weight x rounded, else the product is rounded
    head_norms: Literal["none", "head", "whole"]  # of queries and keys, before the rotation
    turns_in_float32: bool
    scale: float  # of attention scores
    softcap: float | None  # of attention scores
    has_sinks: bool
    activation: str
    experts: Experts | None
    embedding_scale: float | None = None
    embedding_scale_rounds: bool = False  # to the model's format, before the product
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


_LLAMA_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The facts of a model type that its config does not say."""

    windows: Literal["none", "all", "by type"] = "none"
    norms: tuple[str | None, str | None, str | None, str | None] = _LLAMA_NORMS
    norm_adds_one: bool = False
    norm_rounds_late: bool = True
    head_norms: Literal["none", "head", "whole"] = "none"
    turns_in_float32: bool = False
    rope_by_type: bool = False  # own rotary parameters per layer type
    has_sinks: bool = False
    activation_key: str = "hidden_act"
    scale: Callable[[Any], float] | None = None  # None: head size ** -0.5
    softcap: bool = False  # the config's attn_logit_softcapping counts
    experts: Callable[[Any], Experts] | None = None
    extra: dict[str, Callable[[Any], Any]] = field(default_factory=dict)  # further fields


def _gpt_oss_experts(config: Any) -> Experts:
    return Experts(
        router="router",
        count=config.num_experts_per_tok,
        router_in_float32=False,
        transposed=True,
        clamp=(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)),
    )


def _mixtral_experts(config: Any) -> Experts:
    return Experts(router="gate", count=config.num_experts_per_tok, weights_in_float32=True)


def _qwen_experts(config: Any) -> Experts:
    return Experts(
        router="gate", count=config.num_experts_per_tok, renormalises=config.norm_topk_prob
    )


def _gemma_scale(config: Any) -> float:
    return float(config.query_pre_attn_scalar**-0.5)


def _gemma(head_norms: Literal["none", "head"], **facts: Any) -> _Kind:
    return _Kind(
        windows="by type",
        norms=_GEMMA_NORMS,
        norm_adds_one=True,
        norm_rounds_late=False,
        head_norms=head_norms,
        activation_key="hidden_activation",
        scale=_gemma_scale,
        extra={
            "embedding_scale": lambda config: config.hidden_size**0.5,
            "embedding_scale_rounds": lambda _: True,
            "logit_cap": lambda config: config.final_logit_softcapping,
        },
        **facts,
    )


def _olmo(**facts: Any) -> _Kind:
    return _Kind(
        norms=_POST_NORMS,
        norm_rounds_late=False,
        head_norms="whole",
        turns_in_float32=True,
        **facts,
    )


_KINDS: dict[str, _Kind] = {
    "llama": _Kind(),  # SmolLM2 too
    "mistral": _Kind(windows="all"),
    "ministral": _Kind(windows="by type"),
    "qwen2": _Kind(windows="by type"),
    "qwen3": _Kind(windows="by type", head_norms="head"),
    "smollm3": _Kind(windows="by type"),
    "gemma2": _gemma("none", softcap=True),
    "gemma3_text": _gemma("head", rope_by_type=True),
    "phi3": _Kind(windows="all"),
    "olmo2": _olmo(),
    "olmo3": _olmo(windows="by type", rope_by_type=True),
    "granite": _Kind(
        scale=lambda config: float(config.attention_multiplier),
        extra={
            "embedding_scale": lambda config: config.embedding_multiplier,
            "residual_scale": lambda config: config.residual_multiplier,
            "logit_scale": lambda config: 1 / config.logits_scaling,
        },
    ),
    "gpt_oss": _Kind(
        windows="by type", norm_rounds_late=False, has_sinks=True, experts=_gpt_oss_experts
    ),
    "mixtral": _Kind(windows="all", experts=_mixtral_experts),
    "qwen3_moe": _Kind(windows="all", head_norms="head", experts=_qwen_experts),
}
FAMILIES = tuple(_KINDS)


def family_of(config: Any, longest: int | None = None) -> Family | None:
    """The row of a model's config, or of the text part of an image model; None: its type has no row.

    `longest` is the longest sequence that the run can have; None: the model's positions.
    """
    text = config.get_text_config()
    kind = _KINDS.get(text.model_type)
    if kind is None or getattr(text, "use_bidirectional_attention", False):
        return None
    if longest is None:
        longest = text.max_position_embeddings
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fields = {name: read(text) for name, read in kind.extra.items()}
    if text is not config:  # image models do not cap their logits
        fields["logit_cap"] = None
    return Family(
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads or text.num_attention_heads,
        head_size=size,
        layers=tuple(_layer(text, kind, index) for index in range(text.num_hidden_layers)),
        ropes=_ropes(text, kind, size, longest),
        norms=kind.norms,
        epsilon=text.rms_norm_eps,
        norm_adds_one=kind.norm_adds_one,
        norm_rounds_late=kind.norm_rounds_late,
        head_norms=kind.head_norms,
        turns_in_float32=kind.turns_in_float32,
        scale=size**-0.5 if kind.scale is None else kind.scale(text),
        softcap=text.attn_logit_softcapping if kind.softcap else None,
        has_sinks=kind.has_sinks,
        activation=getattr(text, kind.activation_key),
        experts=None if kind.experts is None else kind.experts(text),
        **fields,
    )


def long_rope_from(config: Any, longest: int) -> int | None:
    """The length beyond which a sequence of a run of `longest` turns all rows of its pass otherwise; None: none does.

    So it is in transformers' own code for long rope; `family_of` chooses once for the run.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            length = each.get("original_max_position_embeddings") or text.max_position_embeddings
            return int(length) if length < longest else None
    return None


def _layer(config: Any, kind: _Kind, index: int) -> Layer:
    layer_type = config.layer_types[index] if kind.windows == "by type" else "full_attention"
    window = None
    if kind.windows == "all" or layer_type == "sliding_attention":
        window = config.sliding_window
    if not getattr(config, "use_sliding_window", True):
        window = None
    # SmolLM3 writes 1 where positions are used
    has_rope = config.no_rope_layers[index] if config.model_type == "smollm3" else True
    experts = kind.experts is not None
    if config.model_type == "qwen3_moe":
        experts = (
            index not in config.mlp_only_layers
            and config.num_experts > 0
            and (index + 1) % config.decoder_sparse_step == 0
        )
    key = layer_type if kind.rope_by_type else ""
    return Layer(window=window, rope=key if has_rope else None, experts=experts)


def _ropes(config: Any, kind: _Kind, size: int, longest: int) -> dict[str, Rope]:
    if not kind.rope_by_type:
        return {"": _rope(config, None, config.rope_parameters, size, longest)}
    return {
        layer_type: _rope(config, layer_type, config.rope_parameters[layer_type], size, longest)
        for layer_type in sorted(set(config.layer_types))
    }


def _rope(
    config: Any, layer_type: str | None, parameters: dict[str, Any], size: int, longest: int
) -> Rope:
    """The frequencies of one kind of layer; those of scaled types are transformers' own."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = parameters["rope_type"]
    if rope_type == "default":
        share = parameters.get("partial_rotary_factor", 1.0) if config.model_type == "phi3" else 1.0
        turned = int(size * share)
        exponents = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
        return Rope(frequencies=1.0 / parameters["rope_theta"] ** exponents)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](
        config, torch.device("cpu"), seq_len=longest, layer_type=layer_type
    )
    changes_at = None
    if rope_type == "longrope":
        changes_at = parameters["original_max_position_embeddings"]
    elif rope_type == "dynamic":
        changes_at = config.max_position_embeddings
    return Rope(frequencies=frequencies, factor=factor, changes_at=changes_at)
