"""Adapters of several models at once: the gradients and samples of a server for each, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock import AdamParams, Datum, SamplingParams
from penstock.engine.transformers import adapters
from penstock.service import samplers
from penstock.service.turns import Seats

IDS = [1, 5, 6, 7, 8, 9, 10, 11]
STEP = AdamParams(learning_rate=3e-2, eps=1e-8)
RANKS = (1, 3, 4)


def train(service: penstock.Service, rank: int) -> Any:
    """A trained model and what its clients were told; nothing is waited for."""
    trainer = service.create_lora_training_client(rank=rank, seed=rank)
    datum = Datum(IDS[:-rank], {"target_tokens": IDS[1 : len(IDS) - rank + 1], "weights": [1.0] * (len(IDS) - rank)})  # fmt: skip
    told = []
    for _ in range(2):
        told.append(trainer.forward_backward([datum, datum], "cross_entropy"))
        told.append(trainer.optim_step(STEP))
    return trainer, told


def ask(trainer: Any) -> list[Any]:
    sampler = trainer.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=12, seed=3, stop=[])
    return [sampler.sample(IDS[:length], 2, params) for length in (3, 5)]


def heard(told: list[Any], asked: list[Any]) -> list[Any]:
    """Gradients are told by their norms, weights by the log-probs of what is sampled."""
    answers = [future.result() for future in told]
    plain = [(a.metrics, *(o["logprobs"].tolist() for o in getattr(a, "loss_fn_outputs", ()))) for a in answers]  # fmt: skip
    return [*plain, *(future.result() for future in asked)]


@pytest.mark.slow
@pytest.mark.parametrize("room", [16, 2])
def test_models_in_one_batch_have_the_gradients_and_samples_of_servers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """`room`: with two places in the engine the third waits for one."""
    monkeypatch.setattr(adapters, "MOST_ADAPTERS", room)
    with penstock.Service("demo", folder=tmp_path / "all") as service:
        models = [train(service, rank) for rank in RANKS]
        asked = [ask(trainer) for trainer, _ in models]
        base = service.create_sampling_client().sample(
            IDS[:3], 1, SamplingParams(max_tokens=3, seed=1)
        )
        together = [heard(told, futures) for (_, told), futures in zip(models, asked, strict=True)]
        base.result()
        assert len({str(told) for told in together}) == len(RANKS)
        most = service._core.adapters.held["engine-0"].users
        assert len(most) == min(room, len(RANKS))
        assert not any(most.values())
    if room == 16:
        for number, rank in enumerate(RANKS):
            with penstock.Service("demo", folder=tmp_path / str(rank)) as service:
                trainer, told = train(service, rank)
                assert heard(told, ask(trainer)) == together[number]


def test_a_request_that_is_given_up_as_its_turn_begins_leaves_the_turn() -> None:
    class GivenUp(samplers.Samplers):
        """Cancels a request between the moment that admits it and its first step."""

        victim: asyncio.Task[None] | None = None

        def _advance(self) -> None:
            if self.victim is not None and self._running:
                self.victim.cancel()
                self.victim = None
            super()._advance()

    async def load(*_: Any) -> None: ...

    async def main() -> None:
        pool = SimpleNamespace(update_weights=load)
        engines: Any = SimpleNamespace(pool=pool, publish=lambda *_: None)
        source = SimpleNamespace(weights=None)

        async def in_trainer(*_: Any) -> Any:
            return source

        models: Any = SimpleNamespace(scorer=None)
        turns = GivenUp(models, engines, in_trainer, Seats(lambda _: None), holds_adapters=True)

        async def take(folder: str) -> None:
            async with turns._turn(folder, "digest", None):
                pass

        turns.victim = asyncio.create_task(take("first"))
        with pytest.raises(asyncio.CancelledError):
            await turns.victim
        async with asyncio.timeout(10):
            await take("second")

    asyncio.run(main())


def test_requests_that_come_together_for_a_checkpoint_of_all_weights_get_their_turns() -> None:
    """The second once ended the turns of all, for ever."""

    async def nothing(*_: Any) -> Any:
        return SimpleNamespace(weights=None)

    async def main() -> None:
        pool = SimpleNamespace(update_weights=nothing)
        engines: Any = SimpleNamespace(pool=pool, publish=lambda *_: None)
        models: Any = SimpleNamespace(scorer=None)
        turns = samplers.Samplers(
            models, engines, nothing, Seats(lambda _: None), holds_adapters=True
        )
        served = []

        async def take(folder: str) -> None:
            async with turns._turn(folder, "digest", None):
                served.append(folder)

        async with asyncio.timeout(10):
            await asyncio.gather(*(take(folder) for folder in ("a", "a", "b", "a")))
        assert sorted(served) == ["a", "a", "a", "b"]

    asyncio.run(main())


@pytest.mark.slow
def test_adapters_are_sampled_from_after_a_model_of_all_weights(tmp_path: Path) -> None:
    """The engine has the base again then, which has another digest than the adapters."""
    with penstock.Service("demo", folder=tmp_path) as service:
        adapters, whole = (service.create_lora_training_client(rank=rank) for rank in (1, 0))
        first = [future.result().sequences for future in ask(adapters)]
        assert all(future.result().sequences for future in ask(whole))
        assert [future.result().sequences for future in ask(adapters)] == first
