"""A transformers engine over the tiny policy."""

from __future__ import annotations

import numpy as np

from penstock.engine.protocol import Generation
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import TransformersOptions
from stages import tiny_policy as tiny


def make_engine(device: str = "cpu", **options: object) -> TransformersEngine:
    chosen = TransformersOptions(
        device=device, **{"max_slots": 4, "max_tokens_in_flight": 4096, **options}
    )
    return TransformersEngine(
        lambda: tiny.tiny_model(0, "penstock").to(device),
        fetch=tiny.fetch,
        options=chosen,
        text_of=tiny.text_of,
    )


def same_bits(a: Generation, b: Generation) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(
        a.logprobs.view(np.int32), b.logprobs.view(np.int32)
    )
