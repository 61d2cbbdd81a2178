"""Adapters of several models in one batch: the samples of engines that hold one each, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine.protocol import Generation, GenerationRequest
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from penstock.errors import DigestMismatch, EngineError, UserError
from stages import tiny_policy as tiny
from stages.random_adapters import Adapter, handle_of, merged, random_adapter

MODEL = tiny.reference(0)
ADAPTERS = {
    "a": random_adapter(MODEL, 4, 1),
    "b": random_adapter(MODEL, 33, 2),
    "c": random_adapter(MODEL, 1, 3, parts="self_attn"),
    "": {},
}
OPTIONS = TransformersOptions(max_slots=8, adapters=True)


def requests() -> list[GenerationRequest]:
    """Two of each adapter and of none; some share a prompt, which they may not share."""
    made = []
    for number, name in enumerate([*ADAPTERS, *ADAPTERS]):
        prompt = [5, 6, 7, 8, 9, 10, 11][: 4 + 3 * (number % 2)]
        request = tiny.request(f"{name}{number}", prompt, seed=number, max_tokens=6 + number)
        made.append(replace(request, adapter=name))
    return made


def sample(
    asked: list[GenerationRequest], adapters: Mapping[str, Adapter], turns: int = 1
) -> list[Generation]:
    """The answers of an engine that holds these adapters, asked so many times."""

    async def run() -> list[Generation]:
        engine = TransformersEngine(
            lambda: tiny.tiny_model(0, "penstock"),
            fetch=lambda source: ADAPTERS[source.location].items(),
            options=OPTIONS,
        )
        await engine.start()
        try:
            assert (await engine.stats()).most_adapters
            for name, adapter in adapters.items():
                if name:
                    await engine.hold_adapter(name, handle_of(name, adapter))
            for _ in range(turns):
                made = await engine.generate_many(asked)
            return made
        finally:
            await engine.close()

    return asyncio.run(run())


def test_adapters_in_one_batch_give_the_samples_of_an_engine_for_each() -> None:
    asked = requests()
    together = sample(asked, ADAPTERS)
    for name, adapter in ADAPTERS.items():
        mine = [request for request in asked if request.adapter == name]
        for alone, one in zip(
            sample(mine, {name: adapter}),
            [g for g, request in zip(together, asked, strict=True) if request.adapter == name],
            strict=True,
        ):
            assert alone.token_ids.tolist() == one.token_ids.tolist()
            assert alone.logprobs.tobytes() == one.logprobs.tobytes()
    # a second time prompts and responses are in the prefix tree, and none is another adapter's
    again = sample(asked, ADAPTERS, turns=2)
    assert [g.logprobs.tobytes() for g in again] == [g.logprobs.tobytes() for g in together]


@pytest.mark.parametrize("name", ADAPTERS)
def test_log_probs_are_those_of_the_merged_model(name: str) -> None:
    model = merged(MODEL, ADAPTERS[name])
    [request] = [r for r in requests() if r.adapter == name][:1]
    [made] = sample([request], ADAPTERS)
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, made.token_ids]).astype(np.int64))
    with torch.no_grad():
        scores = model(ids[None]).logits[0].log_softmax(-1)
    start = len(request.prompt_ids)
    wanted = scores[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
    np.testing.assert_allclose(made.logprobs, wanted, atol=1e-4)


def test_what_an_engine_cannot_hold_is_refused_and_room_is_made_by_dropping() -> None:
    async def run() -> None:
        engine = TransformersEngine(
            lambda: tiny.tiny_model(0, "penstock"),
            fetch=lambda source: ADAPTERS["a"].items(),
            options=OPTIONS,
        )
        await engine.start()
        try:
            good = handle_of("a", ADAPTERS["a"])
            with pytest.raises(DigestMismatch):
                await engine.hold_adapter("a", replace(good, digest="other"))
            for number in range(16):
                await engine.hold_adapter(str(number), good)
            with pytest.raises(EngineError, match="allowed: 16 at once"):
                await engine.hold_adapter("16", good)
            await engine.drop_adapter("3")
            await engine.hold_adapter("16", good)
            asked = replace(tiny.request("x"), adapter="3")
            with pytest.raises(UserError, match="got adapter '3', allowed: one that is held"):
                await engine.generate(asked)
            assert len((await engine.generate(replace(asked, adapter="16"))).token_ids)
        finally:
            await engine.close()

    asyncio.run(run())
