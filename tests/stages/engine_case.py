"""An engine under test: how to build it, what it lacks, and the event loop of its checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from penstock.engine.protocol import InferenceEngine
from stages import tiny_policy as tiny

TIMEOUT_S = 60.0

CAPABILITIES = {
    "stop strings": "stop strings end a response",
    "weight updates": "new weights while it runs",
    "digest": "confirms the digest of what it loaded",
    "hold": "pause `keep`: running responses go on under new weights",
    "partials": "an aborted response comes back with its tokens so far",
    "live tokens": "token counts while a response is being made",
    "same bits": "a rollout has the same bits in any batch",
}

# engine -> what it cannot do; for openai also by server
LACKS: dict[str, frozenset[str]] = {
    "transformers": frozenset(),
    "vllm": frozenset({"same bits"}),
    "openai, vLLM serves": frozenset({"same bits"}),
    "openai, others": frozenset({"digest", "same bits"}),
}


@dataclass
class EngineCase:
    """How to build the engine under test, and how it may differ from others."""

    name: str
    make: Callable[[], InferenceEngine]
    lacks: frozenset[str] = field(default_factory=frozenset)
    logprob_tolerance: float = 1e-4
    held_tokens: int = 200  # length of a response that must still run when it is held
    timeout_s: float = TIMEOUT_S  # limit of one check
    kill: Callable[[InferenceEngine], Awaitable[None] | None] | None = None  # kills its process
    shared: InferenceEngine | None = None  # for an engine that starts slowly: all checks share it
    loop: asyncio.Runner | None = None  # the event loop of the shared engine

    @property
    def live(self) -> bool:
        return "live tokens" not in self.lacks

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        run(main, self.loop, self.timeout_s)

    def needs(self, capability: str) -> None:
        if capability in self.lacks:
            pytest.skip(f"{self.name} lacks {capability}")


@asynccontextmanager
async def started(case: EngineCase) -> AsyncIterator[InferenceEngine]:
    if case.shared is not None:
        yield case.shared
        await case.shared.resume()
        if (await case.shared.stats()).policy_version:
            await case.shared.update_weights(0, tiny.handle(0))
        return
    engine = case.make()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def run(
    main: Callable[[], Awaitable[None]],
    loop: asyncio.Runner | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await main()

    if loop is None:
        asyncio.run(bounded())
    else:
        loop.run(bounded())
