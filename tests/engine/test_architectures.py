"""Every architecture that transformers loads samples with its own log-probs on the CPU engine, or is refused in one line.

A sample runs with every test; `make test-long` walks through all of them. Their trainer's side is
tests/training/test_architectures.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol import GenerationRequest, SamplingParams
from penstock.engine.transformers.cpu.cpu_runner import CpuRunner
from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.transformers.sequences import Sequence
from penstock.errors import UserError
from penstock.model.loading import load_causal_lm
from penstock.run.preflight import WITH_STATE
from stages.tiny_architectures import UNBUILT, make, names

# what needs its own kind of cache, or attention that ours is not
REFUSED = """
axk2 bamba bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small bloom camembert codegen
data2vec-text deepseek_v32 deepseek_v4 diffllama electra emu3 ernie falcon falcon_h1 falcon_mamba gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text git glm_moe_dsa gpt_neo gpt_neox_japanese gptj granitemoehybrid hy_v4
inkling_text jamba kimi_linear lfm2 lfm2_moe llama4 llama4_text mamba mamba2 marian mbart megatron-bert mimo_v2_flash
minimax mllama mpt mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart prophetnet qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr whisper xglm
xlm-roberta xlm-roberta-xl xlnet xlstm xmod zamba2 zaya
"""
SAMPLE = "gpt2 deepseek_v3 llama4_text diffllama bert falcon"
MESSAGE = r"^(engine transformers: got \w+[, ]|model\.path: got ).*allowed: [^\n]*$"
END, NEW = 2, 9  # the end token's id, and the sampled tokens of a response


def load(folder: Path, attention: str) -> Any:
    """The model as an engine loads it."""
    return load_causal_lm(
        str(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        trust_remote_code=False,
        attention=attention,
    )


def sample(model: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt, sampled ids, log-probs) of three requests; one prompt is longer than every window and chunk."""
    runner = CpuRunner(model, TransformersOptions(max_slots=4, max_tokens_in_flight=256), str)
    generator = np.random.default_rng(1)
    sequences = [
        Sequence(
            GenerationRequest(
                request_id=str(length),
                prompt_ids=generator.integers(3, 32, length).astype(np.int32),
                sampling=SamplingParams(min_tokens=NEW, max_tokens=NEW),
                seed=length,
            ),
            lambda _: None,
        )
        for length in (13, 2, 6)
    ]
    assert all(runner.admit(sequence, sequence.request.num_tokens) for sequence in sequences)
    finished = runner.step(sequences, set())
    while not finished:
        finished = runner.step([], set())
    assert {reason for _, reason in finished} == {"length"}
    return [
        (sequence.request.prompt_ids, *runner.table.output(sequence.slot)) for sequence in sequences
    ]


def eager_logprobs(model: Any, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """The log-probs of the unchanged model, without the end token."""
    ids_T = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].double()
    logits_TV[:, END] = -torch.inf
    rows_TV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows_TV.gather(1, ids_T[len(prompt) :, None])[:, 0].numpy()


def test_the_lists_name_what_transformers_has() -> None:
    assert set(REFUSED.split()) | set(SAMPLE.split()) <= set(names()) - set(UNBUILT)
    assert set(REFUSED.split()) >= WITH_STATE


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLE.split() else pytest.param(name, marks=pytest.mark.slow)
        for name in names()
        if name not in UNBUILT
    ],
)
def test_an_engine_samples_with_the_models_own_log_probs(name: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    with torch.inference_mode():
        if name in REFUSED.split():
            with pytest.raises(UserError, match=MESSAGE):
                sample(load(tmp_path, IMPLEMENTATION))
            return
        samples = sample(load(tmp_path, IMPLEMENTATION))
        plain = load(tmp_path, "eager")
        for prompt, response, logprobs in samples:
            wanted = eager_logprobs(plain, prompt, response)
            np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=2e-5)
