"""What engines answer with arrives as it was sent."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from penstock.engine.protocol import Generation, Generations
from penstock.types import VersionSegment


def generation(name: str, tokens: int, *versions: int) -> Generation:
    share = tokens // max(1, len(versions))
    return Generation(
        request_id=name,
        token_ids=np.arange(tokens, dtype=np.int32) + 7,
        logprobs=np.linspace(-3, 0, tokens, dtype=np.float32),
        segments=tuple(VersionSegment(version, share) for version in versions),
        finish_reason="stop" if tokens else "error",
        error="" if tokens else "no distribution",
    )


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [generation("a", 4, 2)],
        [
            generation("a", 4, 2),
            generation("b", 0),
            generation("c", 4, 2),
            generation("d", 6, 1, 2),
        ],
    ],
)
def test_generations_arrive_as_they_were_sent(sent: list[Generation]) -> None:
    got = pickle.loads(pickle.dumps(Generations(sent)))
    assert len(got) == len(sent)
    for one, own in zip(got, sent, strict=True):
        for name in ("request_id", "segments", "finish_reason", "error"):
            assert getattr(one, name) == getattr(own, name)
        for name in ("token_ids", "logprobs"):
            mine, theirs = getattr(one, name), getattr(own, name)
            assert mine.dtype is theirs.dtype
            assert mine.tolist() == theirs.tolist()
            assert not mine.flags.writeable  # so a rollout keeps it without a copy
