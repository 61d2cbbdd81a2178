"""Log-probs of the engine on a GPU against the plain model, for a real checkpoint.

PENSTOCK_GPU_MODEL names its folder, such as `benchmarks/smollm2.py` writes; without it a random model of
that shape is used.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.engine.transformers.options import TransformersOptions
from penstock.model.loading import load_causal_lm
from stages import tiny_policy as tiny
from stages.engine_case import run

pytestmark = pytest.mark.gpu
NEW, SLOTS = 96, 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("PENSTOCK_GPU_MODEL")
    if given:
        return given
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,  # so that the distribution is not near uniform
    )
    folder = tmp_path_factory.mktemp("random")
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def requests(vocabulary: int) -> list[GenerationRequest]:
    """More requests than slots, so that graphs of many sizes run; prompts of many lengths."""
    generator = np.random.default_rng(0)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=generator.integers(3, vocabulary, 1 + 7 * number).astype(np.int32),
            sampling=SamplingParams(
                temperature=(1.0, 0.7)[number % 2], max_tokens=8 + number, min_tokens=8
            ),
            seed=number,
        )
        for number in range(NEW)
    ]


def plain_logprobs(model: Any, request: GenerationRequest, made: Generation) -> np.ndarray:
    """Return the plain model's log-probs of a response after its first tokens (min_tokens bans stops)."""
    ids = np.concatenate([request.prompt_ids, made.token_ids]).astype(np.int64)
    row = torch.from_numpy(ids)[None].cuda()
    with torch.no_grad():
        logits = model(row).logits[0, len(request.prompt_ids) - 1 : -1].float()
    scores = (logits / request.sampling.temperature).log_softmax(-1)
    chosen = row[0, len(request.prompt_ids) :, None]
    return scores.gather(1, chosen)[8:, 0].cpu().numpy()


@pytest.mark.timeout(500)
@pytest.mark.parametrize("how", ["graphs", "no graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_engine_has_the_log_probs_of_the_plain_model(
    checkpoint: str, dtype: torch.dtype, how: str
) -> None:
    """In a half format the engine is as far from the float32 model as the plain model is."""
    from transformers import AutoModelForCausalLM

    options = TransformersOptions(
        path=checkpoint,
        device="cuda:0",
        dtype=dtype,
        max_slots=SLOTS,
        max_tokens_in_flight=SLOTS * 800,
        cuda_graphs=how != "no graphs",
    )

    def load() -> Any:
        device = torch.device("cuda:0")
        return load_causal_lm(
            checkpoint,
            dtype=dtype,
            device=device,
            trust_remote_code=False,
            attention=IMPLEMENTATION,
        )

    made: list[Generation] = []
    asked: list[GenerationRequest] = []

    async def main() -> None:
        engine = TransformersEngine(load, fetch=tiny.fetch, options=options)
        await engine.start()
        asked.extend(requests(engine._live_runner.vocabulary))
        made.extend(await engine.generate_many(asked))
        await engine.close()

    run(main)
    same = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).cuda().eval()
    exact = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).float().cuda().eval()
    own, plain = [], []
    for request, one in zip(asked, made, strict=True):
        assert one.finish_reason in ("stop", "length"), one.error
        wanted = plain_logprobs(exact, request, one)
        own.append(np.abs(one.logprobs[8:] - wanted))
        plain.append(np.abs(plain_logprobs(same, request, one) - wanted))
    off, plain_off = np.concatenate(own), np.concatenate(plain)
    assert len(off) > NEW
    if dtype == torch.float32:
        assert off.max() < 2e-3
    else:
        assert off.mean() < 1.5 * plain_off.mean() + 1e-3
        assert off.max() < 3 * plain_off.max() + 1e-2
