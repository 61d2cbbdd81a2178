"""A tiny random model of every decoder family, with windows and original lengths shorter than its sequences."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from penstock.model.decoder_check import kinds_end
from penstock.model.families import family_of

LENGTH = 60  # longer than every window and every original length below
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [2.0, 3.0, 5.0], "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75}  # fmt: skip
EVERY_SECOND = ["sliding_attention", "full_attention"] * 2
# model type, and what differs from `SMALL`
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
    "llama with linear": ("llama", {"rope_parameters": LINEAR}),
    "llama with dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "ministral": ("ministral", {"sliding_window": 12, "layer_types": EVERY_SECOND}),
    "qwen 2": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen 3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}),
    "gemma 2": ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "gemma 3": ("gemma3_text", {"sliding_window": 9, "layer_types": EVERY_SECOND, "final_logit_softcapping": 3.0}),
    "phi 3": ("phi3", {"sliding_window": 9}),
    "phi 4 mini": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo3", {"sliding_window": 9, "layer_types": EVERY_SECOND, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    "granite": ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    "gpt oss": ("gpt_oss", {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("mixtral", {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen 3 moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}),
    "qwen 3 moe, renormalised": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 9}),
}  # fmt: skip


def make_decoder(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model with eager attention, all of whose weights differ."""
    model_type, fields = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | fields))
    return randomise(
        transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        ),
        dtype,
    )


def randomise(model: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
            parameter.data = parameter.to(dtype)  # rotation frequencies stay in float32
    return model.eval()


def shorten(model: Any, least: int = 2) -> Any:
    """Keep the first layers, as many as hold every kind and at least two: Triton's interpreter is slow."""
    config, body = model.config.get_text_config(), model.get_decoder()
    count = max(least, kinds_end(family_of(model.config, LENGTH)))
    body.layers, config.num_hidden_layers = body.layers[:count], count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    return model


def make_image_model() -> Any:
    """Return a random Gemma 3 that reads images too."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.AutoConfig.for_model(
        "gemma3",
        text_config=SMALL | CASES["gemma 3"][1],
        vision_config=vision,
        mm_tokens_per_image=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return randomise(model, torch.float32)
