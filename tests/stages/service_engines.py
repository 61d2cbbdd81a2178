"""Requests of two adapters, of all weights and of the base to a service, and one of its engines that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import penstock
from penstock import AdamParams, Datum, SamplingParams
from penstock.errors import WorkerDied

IDS = [1, 5, 6, 7, 8, 9, 10, 11]
REQUESTS = 6  # of each sampler


class Asking:
    """A service with samplers of two adapters, of a model with all weights, and of the base."""

    def __init__(self, folder: Path, **launch: Any) -> None:
        settings = {f"launch.{key}": value for key, value in launch.items()}
        settings["produce.strategy"] = "sync"  # no engine is left behind with older weights
        self.service = penstock.Service("demo", folder=folder, settings=settings)
        self.samplers = [self._trained(rank) for rank in (2, 3, 0)]
        self.samplers.append(self.service.create_sampling_client())

    def _trained(self, rank: int) -> Any:
        trainer = self.service.create_lora_training_client(rank=rank, seed=rank)
        datum = Datum(IDS[:-1], {"target_tokens": IDS[1:], "weights": [1.0] * 7})
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=3e-2, eps=1e-8))
        return trainer.save_weights_and_get_sampling_client()

    def ask(self, samplers: list[Any] | None = None) -> list[Any]:
        """Futures: of each sampler some requests, interleaved."""
        return [
            sampler.sample(IDS[: 2 + n], 2, SamplingParams(max_tokens=40, seed=n, stop=[]))
            for n in range(REQUESTS)
            for sampler in samplers or self.samplers
        ]

    def answers(self) -> list[Any]:
        return [future.result() for future in self.ask()]

    def answers_with_a_kill(self) -> list[Any]:
        """Kill the busiest engine when the first answer of the adapters and of the base has come."""
        adapters = self.ask([*self.samplers[:2], self.samplers[3]])
        adapters[0].result()
        engines = self.service._core._engines.pool._engines  # type: ignore[union-attr]
        self.killed = max(engines, key=lambda engine: engine.requests).supervised
        self._lost = self.killed.worker
        os.kill(self._lost.pid, signal.SIGKILL)
        return [future.result() for future in adapters]

    def engine(self, name: str) -> Any:
        """The supervised engine."""
        return self.service._core._engines.supervised[name]  # type: ignore[union-attr]

    def until_back(self) -> int:
        """Wait until the engine that was killed serves again; how often it was started again."""

        async def wait() -> None:
            await self._lost.ended()
            with contextlib.suppress(WorkerDied):
                await self.killed.call("stats")
            await self.killed.ready()

        self.service._call(wait())
        return int(self.killed.restarts)

    def holding(self) -> set[str]:
        """The engines whose workers of now hold adapters; none is in use."""
        tables = self.service._core.adapters.held
        assert not any(sum(table.users.values()) for table in tables.values())
        return {name for name, table in tables.items() if table.worker is self.engine(name).worker}
