"""Every decoder family on the CPU engine: log-probs of the eager model, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.kv_attention import IMPLEMENTATION
from penstock.engine.transformers.options import Load, TransformersOptions
from penstock.errors import UserError
from stages import tiny_policy as tiny
from stages.decoder_cases import CASES, make_decoder, make_image_model
from stages.engine_case import run
from stages.tiny_engine import same_bits

QUICK = {"llama", "gemma 2", "gpt oss", "mixtral"}
# a dynamic rotation changes only beyond the model's positions, where no request goes
SERVED = [*(case for case in CASES if case != "llama with dynamic"), "image"]
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 17, [5, 6, 7], [8] * 17]


def make_engine(model: Any, **options: Any) -> TransformersEngine:
    return TransformersEngine(
        lambda: model,
        fetch=tiny.fetch,
        options=TransformersOptions(max_slots=4, max_tokens_in_flight=1024, **options),
        text_of=tiny.text_of,
    )


def eager_logprobs(model: Any, prompt: list[int], response: np.ndarray, filler: int) -> np.ndarray:
    """The eager model's log-probs; `filler` tokens after the response make the sequence as long as the run's."""
    ids = torch.tensor([*prompt, *response.tolist()])
    padded = torch.cat([ids, torch.full((filler,), 3)])
    with torch.no_grad():
        scores = model(padded[None], use_cache=False).logits[0].log_softmax(-1)
    rows = scores[len(prompt) - 1 : len(ids) - 1]
    return rows.gather(1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in SERVED]
)
def test_log_probs_are_the_eager_models_and_have_the_same_bits_in_any_batch(case: str) -> None:
    def make() -> Any:
        return make_image_model() if case == "image" else make_decoder(case)

    async def main() -> None:
        engine = make_engine(make())
        await engine.start()
        invariant = (await engine.stats()).batch_invariant
        requests = [
            tiny.request(str(n), prompt, seed=n, max_tokens=20 + 2 * n)
            for n, prompt in enumerate(PROMPTS)
        ]
        together = await engine.generate_many(requests)
        plain, filler = make(), 40 if case == "phi 4 mini" else 0
        for request, made, prompt in zip(requests, together, PROMPTS, strict=True):
            wanted = eager_logprobs(plain, prompt, made.token_ids, filler)
            assert np.abs(made.logprobs - wanted).max() < 1e-5
            if invariant:
                assert same_bits(await engine.generate(request), made)
        await engine.close()
        if not invariant:
            pytest.skip("this machine's matrix library is not row invariant")

    run(main)


def test_a_model_that_computes_something_else_is_refused_with_the_difference() -> None:
    model = make_decoder("llama")
    model.model.layers[0].register_forward_hook(lambda layer, inputs, output: output + 0.1)

    async def main() -> None:
        with pytest.raises(UserError, match=r"LlamaForCausalLM, whose log-probs differ by [0-9.]+"):
            await make_engine(model).start()

    run(main)


def test_long_rope_of_a_models_own_code_is_refused_where_rows_would_change_each_other() -> None:
    def start(longest: int) -> None:
        async def main() -> None:
            model = make_decoder("phi 4 mini")
            model.set_attn_implementation(IMPLEMENTATION)
            engine = make_engine(model, fuse=False, load=Load(longest=longest))
            await engine.start()
            await engine.close()

        run(main)

    start(32)
    with pytest.raises(UserError, match=r"at most 32 tokens; use engine vllm for longer ones$"):
        start(33)
