"""Many model families: engine, trainer and the unchanged model agree on every log-prob."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import UserError
from penstock.model import packed_attention as attention
from penstock.training.pack import make_pack
from penstock.training.policy import Policy
from stages import tiny_policy as tiny
from stages.engine_case import run

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3Moe": MOE,
    "Mistral": {"sliding_window": 12},
    "Gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0},
    "Gemma3": {"sliding_window": 12},
    "GptOss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {},
    "Granite": {"logits_scaling": 3.0},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Cohere": {},
    "DeepseekV3": LATENT,
}
# experts, windows with a cap, sinks, layers without positions, latent attention
QUICK = {"Qwen3Moe", "Gemma2", "GptOss", "SmolLM3", "DeepseekV3"}
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 17]


def make_model(family: str, implementation: str) -> Any:
    """Return a random float32 model of a family, scaled so that its output is not near uniform."""
    settings = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | FAMILIES.get(family, {})
    config_class = getattr(transformers, f"{family}TextConfig", None)
    config = (config_class or getattr(transformers, f"{family}Config"))(**settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model.float().eval()


def whole_logprobs(model: Any, prompt: list[int], response: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def trainer_logprobs(policy: Policy, prompt: list[int], response: np.ndarray) -> np.ndarray:
    ids = np.concatenate([prompt, response]).astype(np.int32)
    predictor = np.arange(len(prompt) - 1, len(ids) - 1)
    bounds = np.array([0, len(predictor)])
    pack = make_pack([0], [ids], [predictor], bounds, torch.device("cpu"))
    with torch.no_grad():
        return policy(pack, torch.ones(len(predictor)))[0].numpy()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow])
        for family in FAMILIES
    ],
)
def test_engine_and_trainer_agree_with_the_unchanged_model(family: str, device: str) -> None:
    tolerance = 1e-4 if device == "cpu" else 1e-3

    async def main() -> None:
        engine = TransformersEngine(
            lambda: make_model(family, "penstock").to(device),
            fetch=tiny.fetch,
            options=TransformersOptions(max_slots=4, max_tokens_in_flight=1024, device=device),
            text_of=tiny.text_of,
        )
        await engine.start()
        asked = [
            tiny.request(f"{n}", prompt, seed=n, max_tokens=30) for n, prompt in enumerate(PROMPTS)
        ]
        made = await engine.generate_many(asked)
        begun = made[1].token_ids[:11]
        half = tiny.request("half", PROMPTS[1], seed=1, max_tokens=30, response=begun)
        rest = await engine.generate(half)
        await engine.close()
        attention.register()
        plain, packed = make_model(family, "eager"), Policy(make_model(family, "eager"))
        for prompt, one in zip(PROMPTS, made, strict=True):
            assert len(one.token_ids) == 30, one.error
            wanted = whole_logprobs(plain, prompt, one.token_ids)
            assert np.abs(one.logprobs - wanted).max() < tolerance
            assert np.abs(trainer_logprobs(packed, prompt, one.token_ids) - wanted).max() < 1e-4
        assert np.array_equal(rest.token_ids, made[1].token_ids[11:])

    run(main)


@pytest.mark.parametrize("family", ["Mamba", pytest.param("Qwen3Next", marks=pytest.mark.slow)])
def test_a_decoder_with_another_kind_of_state_is_refused_in_one_line(family: str) -> None:
    async def main() -> None:
        engine = TransformersEngine(lambda: make_model(family, "penstock"), fetch=tiny.fetch)
        with pytest.raises(UserError, match="use engine vllm for this model"):
            await engine.start()

    run(main)
