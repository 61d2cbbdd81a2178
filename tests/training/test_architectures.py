"""Every architecture that transformers loads trains on its own log-probs, or is refused in one line.

A sample runs with every test; `make test-long` walks through all of them.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from penstock.errors import UserError
from penstock.model import packed_attention
from penstock.model.stored_weights import persistent_buffers
from penstock.training.model_check import check_model
from penstock.training.pack import make_pack
from penstock.training.policy import Policy
from stages.tiny_architectures import UNBUILT, make, names
from stages.training_data import from_disk

CPU = torch.device("cpu")
ONE_BY_ONE = """
axk2 bamba bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom codegen deepseek_v32 deepseek_v4 doge
falcon falcon_h1 falcon_mamba git glm_moe_dsa gpt_neo gpt_neox_japanese gptj granitemoehybrid hy_v4 inkling_text
jamba kimi_linear lfm2 lfm2_moe llama4 llama4_text mamba mamba2 marian mbart minimax moshi mpt mvp nemotron
nemotron_h olmo_hybrid openai-gpt pegasus plbart qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
recurrent_gemma rwkv stablelm trocr whisper xglm xlstm zamba2 zaya
"""
NOT_CAUSAL = """
bert bert-generation big_bird camembert data2vec-text ernie megatron-bert prophetnet roberta roberta-prelayernorm
roc_bert roformer xlm-roberta xlm-roberta-xl xlnet
"""
REFUSED = {
    "tokens see the tokens after them": NOT_CAUSAL,
    "the trainer would miss by": "modernbert-decoder",
    "cannot run on token ids": "electra rembert xmod",
}
SAMPLE = """
qwen3 qwen3_moe gemma2 gpt2 gpt_oss deepseek_v3
lfm2 llama4_text
bert
"""


def test_the_lists_name_what_transformers_has() -> None:
    refused = " ".join(REFUSED.values()).split()
    for listed in (ONE_BY_ONE.split(), refused, UNBUILT, SAMPLE.split()):
        assert set(listed) <= set(names())
    assert not set(ONE_BY_ONE.split()) & set(refused)


def plain_logprobs(model, ids) -> torch.Tensor:
    scores = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0]


def policy_logprobs(policy, rows) -> torch.Tensor:
    """Return the policy's log-probs of all rows, in packs as the trainer makes them."""
    predictors = [np.arange(len(ids) - 1) for ids in rows]
    first = np.cumsum([0, *(len(index) for index in predictors)])
    parts = [range(len(rows))] if policy.packs else [[number] for number in range(len(rows))]
    packs = [make_pack(part, rows, predictors, first, CPU) for part in parts]
    got = torch.cat([policy(pack, torch.ones(len(pack.target_N)))[0] for pack in packs])
    return got[np.argsort(np.concatenate([pack.token_N for pack in packs]))]


def gradients(model) -> torch.Tensor:
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLE.split() else pytest.param(name, marks=pytest.mark.slow)
        for name in names()
        if name not in UNBUILT
    ],
)
def test_log_probs_and_gradients_are_the_models_own(name: str) -> None:
    packed_attention.register()
    model = make(name)
    policy = Policy(model)
    for message, refused in REFUSED.items():
        if name in refused.split():
            with pytest.raises(UserError, match=message):
                check_model(policy, name)
            return
    check_model(policy, name)
    assert policy.packs == (name not in ONE_BY_ONE.split())
    generator = np.random.default_rng(1)
    rows = [generator.integers(3, 32, length) for length in (13, 6, 8, 6, 2)]
    got = policy_logprobs(policy, rows)
    got.square().sum().backward()
    own = gradients(model)
    policy.pack_sequences(False)  # the unchanged model
    wanted = torch.cat([plain_logprobs(model, ids) for ids in rows])
    wanted.square().sum().backward()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    plain = gradients(model)
    assert float((own - plain).norm() / plain.norm()) < 1e-3
    assert float(plain.norm()) > 0


@pytest.mark.parametrize(
    "name",
    [
        name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow)
        for name in names()
        if name
        not in {
            *UNBUILT,
            *" ".join(REFUSED.values()).split(),
            "emu3",
            "mllama",
        }  # their text parts alone are no models
    ],
)
def test_a_saved_model_is_the_one_that_trained(name: str, tmp_path: Path) -> None:
    """Every tensor, also those that are no parameters, and every setting, as transformers reads them back."""
    made = make(name)
    with torch.no_grad():
        for buffer_name, buffer in persistent_buffers(made).items():
            if buffer_name.endswith("correction_bias"):
                buffer.uniform_(0.5, 1.5)
    made.save_pretrained(tmp_path / "before")
    from_disk(tmp_path / "before").snapshot(tmp_path / "after")()
    load = AutoModelForCausalLM.from_pretrained
    before, after = load(tmp_path / "before"), load(tmp_path / "after" / "model")
    wanted, saved = before.state_dict(), after.state_dict()
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)
    own = {"_name_or_path", "transformers_version"}
    settings, expected = (
        {k: v for k, v in m.config.to_dict().items() if k not in own} for m in (after, before)
    )
    assert settings == expected


def test_the_first_stage_of_a_pipeline_writes_the_buffers_of_all_layers(tmp_path: Path) -> None:
    made = make("deepseek_v3")
    made.save_pretrained(tmp_path / "before")
    consumer = from_disk(tmp_path / "before")
    consumer.policy.body.layers = torch.nn.ModuleList()  # they went to other ranks
    consumer.snapshot(tmp_path / "after")()
    with safe_open(tmp_path / "after" / "model" / "model.safetensors", "pt") as file:
        assert persistent_buffers(made).keys() <= set(file.keys())


def test_long_rope_of_a_models_own_code_runs_one_sequence_at_a_time() -> None:
    """In a pack the longest sequence would choose the rotation of all."""
    packed_attention.register()
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4, "original_max_position_embeddings": 12}  # fmt: skip
    model = make("arcee", rope_parameters=rope)
    for longest, packs in ((12, True), (13, False)):
        policy = Policy(copy.deepcopy(model), longest=longest)
        check_model(policy, "arcee")
        assert policy.packs == packs
