"""What every agent loop does."""

from __future__ import annotations

from typing import Protocol

from penstock.types import Rollout


class AgentLoop(Protocol):
    """Consumes rollouts to make, produces them generated and scored. May live in another process."""

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score what is not finished; each ends COMPLETED, ABORTED or FAILED.

        Finished members are left as they are. With `enable_partial_rollout` an aborted member goes on
        from its tokens, else from its prompt. Faults of one rollout stay in that rollout.
        """

    async def pause(self) -> None:
        """Abort what is running: `generate_group` calls return soon, with partial tokens kept."""
