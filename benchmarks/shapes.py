"""The models that the benchmarks make with random weights, by name, and the rollouts of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Requests of a model: each with so many new tokens, or log-normal ones with a mean and a maximum."""

    requests: int
    slots: int
    prompt_tokens: int
    equal_tokens: int
    mean_tokens: int
    max_tokens: int


CASES = {
    "demo": Case(256, 64, 16, 64, 48, 400),
    "smollm2": Case(128, 32, 16, 16, 16, 96),
    "qwen0.5b": Case(512, 512, 64, 256, 306, 2048),
    "qwen0.5b-long": Case(128, 128, 64, 8192, 3000, 8192),
    "qwen3-1.7b": Case(256, 256, 64, 512, 306, 2048),
    "gemma3-1b": Case(256, 256, 64, 512, 306, 2048),
    "qwen3-moe-1b": Case(256, 256, 64, 512, 306, 2048),
    "qwen2.5-7b-lora": Case(256, 256, 64, 512, 306, 2048),
}

_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_SMALL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": _SMALL,
    "demo": {**_SMALL, "model_type": "qwen3", "head_dim": 32, "vocab_size": 64},
    "smollm2-shape": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "qwen0.5b": _QWEN,
    "qwen0.5b-long": _QWEN,
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    },
    "qwen3-moe-1b": {  # 0.94 billion weights, of which a token uses 0.28 billion
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 320,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "qwen2.5-3b": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
    "qwen2.5-7b-lora": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
SHAPES["qwen2.5-7b"] = SHAPES["qwen2.5-7b-lora"]
SETTINGS = {"qwen2.5-7b-lora": ["model.lora.rank=32"]}  # further config keys of a model


def make_model(
    name: str, dtype: torch.dtype, device: str, attention: str = "sdpa", **fields: Any
) -> Any:
    """A random model of a shape; `fields` are of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"max_position_embeddings": 32768, **SHAPES[name], **fields})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
