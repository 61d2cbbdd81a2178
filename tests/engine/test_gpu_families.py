"""Every decoder family on the engine of a GPU: log-probs of the eager model, equal texts with and without graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.protocol import Generation
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import Load, TransformersOptions
from stages import tiny_policy as tiny
from stages.decoder_cases import CASES, make_decoder, make_image_model
from stages.engine_case import run

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
# a dynamic rotation changes only beyond the model's positions, where no request goes
SERVED = [*(case for case in CASES if case != "llama with dynamic"), "image"]
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 17, [5, 6, 7], [8] * 17, *([n] * n for n in range(4, 40))]  # fmt: skip


def make(case: str, dtype: torch.dtype) -> Any:
    if case != "image":
        return make_decoder(case, dtype).cuda()
    model = make_image_model()
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)  # rotation frequencies stay in float32
    return model.cuda()


def generate(model: Any, dtype: torch.dtype, **options: Any) -> list[Generation]:
    made: list[Generation] = []

    async def main() -> None:
        engine = TransformersEngine(
            lambda: model,
            fetch=tiny.fetch,
            options=TransformersOptions(
                device="cuda:0", dtype=dtype, max_slots=24, max_tokens_in_flight=4096, load=Load(longest=80), **options
            ),
            text_of=tiny.text_of,
        )  # fmt: skip
        await engine.start()
        requests = [
            tiny.request(str(n), prompt, seed=n, max_tokens=20 + n % 7)
            for n, prompt in enumerate(PROMPTS)
        ]
        made.extend(await engine.generate_many(requests))
        await engine.close()

    run(main)
    assert not any(generation.error for generation in made)
    return made


def eager_logprobs(model: Any, prompt: list[int], response: np.ndarray, filler: int) -> np.ndarray:
    """The eager model's log-probs; `filler` tokens after the response make the sequence as long as the run's."""
    ids = torch.tensor([*prompt, *response.tolist()], device="cuda")
    padded = torch.nn.functional.pad(ids, (0, filler), value=3)
    with torch.no_grad():
        scores = model(padded[None], use_cache=False).logits[0].float().log_softmax(-1)
    rows = scores[len(prompt) - 1 : len(ids) - 1]
    return rows.gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_log_probs_are_the_eager_models(case: str, dtype: torch.dtype) -> None:
    """More requests than slots, so that graphs of many sizes run; many rows in prompts, few at the end.

    In bfloat16 the engine is as far from the float32 model as the eager model is.
    """
    made = generate(make(case, dtype), dtype)
    filler = 40 if case == "phi 4 mini" else 0

    def logprobs(model: Any) -> np.ndarray:
        return np.concatenate(
            [
                eager_logprobs(model, prompt, one.token_ids, filler)
                for prompt, one in zip(PROMPTS, made, strict=True)
            ]
        )

    actual, exact = np.concatenate([one.logprobs for one in made]), make(case, dtype).float()
    gap = np.abs(actual - logprobs(exact))
    if dtype is torch.float32:
        assert gap.max() < 1e-4
    else:
        plain = np.abs(logprobs(make(case, dtype)) - logprobs(exact))
        assert gap.mean() < 1.5 * plain.mean() + 1e-3


@pytest.mark.parametrize("case", SERVED)
def test_texts_are_the_same_without_graphs_and_with_prompts_in_parts(case: str) -> None:
    with_graphs = generate(make(case, torch.float32), torch.float32)
    without = generate(make(case, torch.float32), torch.float32, cuda_graphs=False, prefill_rows=16)
    for one, other in zip(with_graphs, without, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4
