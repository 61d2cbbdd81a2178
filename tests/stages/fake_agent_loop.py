"""An agent loop that holds every group until the test decides its outcome."""

from __future__ import annotations

import asyncio

import numpy as np

from penstock.types import Rollout, Status, VersionSegment
from stages.rollouts import finish_rollout


class FakeAgentLoop:
    """Holds every group until the test decides: finish, fail, abort, raise."""

    def __init__(self) -> None:
        self.version = 0
        self.held: dict[str, tuple[list[Rollout], asyncio.Future[None]]] = {}
        self.calls = 0
        self.pauses = 0
        self.deaf = False  # ignores aborts

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        self.calls += 1
        group_id = rollouts[0].rollout_id.rpartition(".")[0]
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held[group_id] = (rollouts, decided)
        try:
            await decided
        finally:
            self.held.pop(group_id, None)
        return rollouts

    def finish(self, group_id: str, *, num_tokens: int = 4, reward: float = 1.0) -> None:
        rollouts, decided = self.held.pop(group_id)
        for rollout in rollouts:
            if rollout.status is not Status.COMPLETED:
                finish_rollout(rollout, version=self.version, num_tokens=num_tokens, reward=reward)
        decided.set_result(None)

    def fail(self, group_id: str, *, members: int = 1, reason: str = "broken") -> None:
        rollouts, decided = self.held.pop(group_id)
        for number, rollout in enumerate(rollouts):
            if rollout.status is Status.COMPLETED:
                continue
            if number < members:
                rollout.error = reason
                rollout.move_to(Status.FAILED)
            else:
                finish_rollout(rollout, version=self.version)
        if not any(rollout.status is Status.FAILED for rollout in rollouts):
            rollouts[0].move_to(Status.FAILED)
        decided.set_result(None)

    def raise_in(self, group_id: str) -> None:
        _, decided = self.held.pop(group_id)
        decided.set_exception(RuntimeError("the agent loop raised"))

    def abort(self, group_id: str, *, partial_tokens: int = 2) -> None:
        """Finish every second rollout; the others keep `partial_tokens` more tokens."""
        rollouts, decided = self.held.pop(group_id)
        for number, rollout in enumerate(rollouts):
            if rollout.status is Status.COMPLETED:
                continue
            if number % 2:
                finish_rollout(rollout, version=self.version)
                continue
            if partial_tokens:
                rng = np.random.default_rng(rollout.seed)
                rollout.append(
                    rng.integers(1, 100, partial_tokens),
                    -rng.random(partial_tokens),
                    [VersionSegment(version=self.version, length=partial_tokens)],
                )
            rollout.finish_reason = "abort"
            rollout.move_to(Status.ABORTED)
        decided.set_result(None)

    async def pause(self) -> None:
        self.pauses += 1
        if not self.deaf:
            for group_id in list(self.held):
                self.abort(group_id)
