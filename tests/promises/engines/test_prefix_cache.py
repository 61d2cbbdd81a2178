"""Keys and values kept between turns change no bit of a response, and a turn computes what is new in it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.engine.transformers.engine import TransformersEngine
from stages import tiny_policy as tiny
from stages.engine_case import run
from stages.tiny_engine import make_engine, same_bits

# (which earlier response to go on from, tokens of it, observed tokens, most tokens, seed)
TURN = st.tuples(
    st.integers(0, 6), st.integers(0, 40), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)
)
WAVES = st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=4)
Turn = tuple[int, int, int, int, int]


async def started(**options: object) -> TransformersEngine:
    engine = make_engine(**options)
    await engine.start()
    if not (await engine.stats()).batch_invariant:
        await engine.close()
        pytest.skip("this machine's matrix library is not row invariant")
    return engine


def turn(name: str, spec: Turn, contexts: list[list[int]]) -> GenerationRequest:
    """A request that goes on from one of `contexts`, or from a part of it."""
    parent, cut, observed, most, seed = spec
    context = contexts[parent % len(contexts)]
    context = context[: len(context) - cut] if cut < len(context) and cut % 3 == 0 else context
    observation = np.random.default_rng([observed, seed]).integers(3, 60, observed).tolist()
    return tiny.request(name, [*context[:300], *observation], seed=seed, max_tokens=most)


def check_waves(waves: list[list[Turn]], share: float) -> None:
    async def main() -> None:
        caching, plain = await started(kv_memory_share=share), await started(kv_memory_share=0)
        contexts: list[list[int]] = [[]]
        for number, wave in enumerate(waves):
            requests = [turn(f"{number}.{i}", spec, contexts) for i, spec in enumerate(wave)]
            together = await asyncio.gather(*map(caching.generate, requests))
            for request, made in zip(requests, together, strict=True):
                assert same_bits(await plain.generate(request), made)
                contexts.append([*request.prompt_ids.tolist(), *made.token_ids.tolist()])
        await caching.close()
        await plain.close()

    run(main)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(waves=WAVES, share=st.sampled_from([0.6, 1e-5]))  # the second keeps few tokens
def test_a_response_has_the_same_bits_with_and_without_the_cache(
    waves: list[list[Turn]], share: float
) -> None:
    check_waves(waves, share)


def test_a_turn_computes_what_is_new_in_it() -> None:
    async def main() -> None:
        engine = await started()
        context, new = list(range(3, 43)), 40
        for number in range(5):
            request = tiny.request(str(number), context, seed=number, max_tokens=8, min_tokens=8)
            made = await engine.generate(request)
            observation = np.random.default_rng(number).integers(3, 60, 30).tolist()
            context = [*context, *made.token_ids.tolist(), *observation]
            new += 31 if number < 4 else 0  # the last token of a response was not computed yet
        assert (await engine.stats()).tokens_prefilled == new
        await engine.close()

    run(main)


def test_new_weights_see_nothing_of_the_old_ones() -> None:
    """Not even of a request that was running when they came."""

    async def main() -> None:
        caching, plain = await started(), await started(kv_memory_share=0)
        first = tiny.request("a", [5, 6, 7, 8], seed=1, max_tokens=300, min_tokens=300)
        running = asyncio.create_task(caching.generate(first))
        while not (await caching.stats()).tokens_generated:
            pass
        await caching.pause("keep")
        for engine in (caching, plain):
            await engine.update_weights(1, tiny.handle(1))
        await caching.resume()
        made: Generation = await running
        again = tiny.request("b", [5, 6, 7, 8, *made.token_ids.tolist()], seed=2, max_tokens=20)
        assert same_bits(await caching.generate(again), await plain.generate(again))
        await caching.close()
        await plain.close()

    run(main)
