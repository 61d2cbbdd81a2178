"""A tiny random model of every causal LM that transformers knows, made from its config class."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LARGEST = 20_000_000  # parameters

# Set where the config has the field. Windows are shorter than the sequences of the check.
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": 4, "attention_window_size": 4, "attention_chunk_size": 4,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_topk": 2,
    "zero_expert_num": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "mamba_d_ssm": 64, "ssm_state_size": 8, "lru_width": 32, "n_mamba_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4,
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "rotary_dim": 8,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
    "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEEDED = {
    "num_key_value_heads",
    "head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
}  # if None too
TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id"}

# What the rules above do not give.
OWN: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                     "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 4},
    "dots1": {"n_shared_experts": 1},
    "kimi_linear": {"num_local_experts": 16, "num_experts_per_tok": 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip
UNBUILT = {
    "blt": "its patcher alone has 96 million parameters",
    "cohere_compass_text": "its config class has no default rotary parameters",
    "cpmant": "its prompt tokens lie beyond a small vocabulary",
    "dbrx": "its config class has no default rotary parameters",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "a drafter: runs on another model's states",
    "gemma4_unified_assistant": "a drafter: runs on another model's states",
    "musicgen": "a decoder of audio codes behind a text encoder",
    "musicgen_melody": "a decoder of audio codes behind a text encoder",
    "qwen4_exp": "its config class has no default indexer",
    "qwen4_exp_text": "its config class has no default indexer",
    "reformer": "its axial positions and hashes have no small default",
    "xlm": "its vocabulary has another name, 200 million parameters",
    "zamba": "its shared layers cannot be fewer than its default",
}


def names() -> list[str]:
    """Return the model types of every architecture that `AutoModelForCausalLM` loads."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(kind: Any, own: dict[str, Any]) -> Any:
    default = kind()
    known = default.to_dict()
    fields = {
        name: value
        for name, value in SMALL.items()
        if known.get(name) is not None or (name in known and name in NEEDED | TOKENS)
    }
    if "kv_lora_rank" in known:  # latent attention has no groups
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    if types := known.get("layer_types"):
        fields["layer_types"] = (list(dict.fromkeys(types)) * 4)[: SMALL["num_hidden_layers"]]
    for name in getattr(kind, "sub_configs", {}):
        if (part := getattr(default, name, None)) is not None:
            fields[name] = small_config(type(part), {})
    return kind(**(fields | own))


def make(name: str, **fields: Any) -> Any:
    """Return a tiny float32 model in evaluation mode, with weights far from uniform outputs."""
    config = small_config(CONFIG_MAPPING[name], OWN.get(name, {}) | fields)
    build = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model.float().eval()
