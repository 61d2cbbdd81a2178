"""Checkpoints as people have them: a family, a tokenizer and a setting drawn at random, trained, exported and sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config import Config
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.inspection.export import export_run
from penstock.workers.inline import opened_engine
from stages.chat_policy import FORGETFUL, NO_END, chat_tokenizer, spaced_tokenizer
from stages.command_runs import train
from stages.decoder_cases import CASES, SMALL, randomise

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "demo": lambda: load_tokenizer("demo"),
    "letters": chat_tokenizer,
    "letters that forget": lambda: chat_tokenizer(FORGETFUL),
    "letters without an end": lambda: chat_tokenizer(NO_END),
    "spaced": spaced_tokenizer,
}
# where the rotation depends on the length, Penstock chooses it for the longest sequence of a run
FAMILIES = [name for name in CASES if name not in ("phi 4 mini", "llama with dynamic")]
ADAPTERS, EXACT = "model.lora.rank=4", "model.arithmetic=exact"
SETTINGS: list[list[str]] = [[], [ADAPTERS], [EXACT], ["model.dtype=bfloat16"]]


def save(folder: Path, family: str, tokenizer: Any, draw: random.Random) -> None:
    """A model with more rows than its tokenizer has tokens, in several files, in one of three formats."""
    model_type, fields = CASES[family]
    rows = len(tokenizer) + draw.choice([0, 7])
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(model_type, **(SMALL | fields | ends | {"vocab_size": rows}))
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    model = randomise(AutoModelForCausalLM.from_config(config), dtype)
    model.save_pretrained(folder, max_shard_size=draw.choice(["30KB", "1GB"]))
    tokenizer.save_pretrained(folder)


async def sample(folder: Path, prompt: np.ndarray) -> Generation:
    config = Config.model_validate({"model": {"path": str(folder), "dtype": "float32"}})
    request = GenerationRequest(
        request_id="0", prompt_ids=prompt, sampling=SamplingParams(max_tokens=24), seed=0
    )
    async with opened_engine(config) as engine:
        return (await engine.generate_many([request]))[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_what_is_trained_is_exported_and_sampled_as_transformers_computes_it(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    family, name = draw.choice(FAMILIES), draw.choice(list(TOKENIZERS))
    settings, tokenizer = draw.choice(SETTINGS), TOKENIZERS[name]()
    save(tmp_path / "model", family, tokenizer, draw)
    overrides = [f"model.path={tmp_path / 'model'}", "produce.max_staleness=0", "engine.threads=1"]
    overrides.append("tasks.train.max_prompt_tokens=32")
    run = train(tmp_path, "run", *overrides, "train.steps=2", *settings)
    case = f"{family}, {name}, {settings}"
    assert run.code == 0, f"{case}: {run.told}"
    if "model.dtype=bfloat16" not in settings:
        assert max(line["mismatch/kl"] for line in run.metrics) < 1e-6, case
    out = export_run(run.folder, tmp_path / "out")
    chat = ChatTemplate(load_tokenizer(out))
    assert chat.tokenizer.get_vocab() == tokenizer.get_vocab()
    prompt = chat.encode([{"role": "user", "content": "12+34"}])
    generation = asyncio.run(sample(out, prompt))
    plain = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    ids_T = torch.from_numpy(np.concatenate([prompt, generation.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits_TV = plain(input_ids=ids_T[None], use_cache=False).logits[0]
    rows_TV = logits_TV.double().log_softmax(-1)[len(prompt) - 1 : -1]
    wanted = rows_TV.gather(1, ids_T[len(prompt) :, None])[:, 0].numpy()
    np.testing.assert_allclose(generation.logprobs, wanted, rtol=0, atol=2e-5, err_msg=case)
