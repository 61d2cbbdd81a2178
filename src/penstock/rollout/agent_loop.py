"""The agent loop: what a producer calls to have a group of rollouts made.

The loops that ship are in `agent/`; a user's own is a subclass, or any object with these methods.
"""

from __future__ import annotations

import asyncio

from penstock.errors import EnginesLost
from penstock.types import Rollout, Status
from penstock.waits import all_results


class AgentLoop:
    """Consumes rollouts to make, produces them generated and scored. May live in another process.

    A subclass defines `generate` for one rollout, or `generate_group` and `pause` for all of a group.
    """

    async def generate(self, rollout: Rollout, *, enable_partial_rollout: bool = False) -> Rollout:
        """Generate and score one rollout; it ends COMPLETED, ABORTED or FAILED.

        With `enable_partial_rollout` an aborted rollout continues from its tokens, otherwise from its
        prompt. What is raised fails this rollout only.
        """
        raise NotImplementedError

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score the unfinished rollouts at the same time; finished ones stay as they are."""
        running = self._running_samples()

        async def isolated(rollout: Rollout) -> Rollout:
            task = asyncio.create_task(
                self.generate(rollout, enable_partial_rollout=enable_partial_rollout)
            )
            running.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is not None and caller.cancelling():
                    raise  # not a pause: the whole call was cancelled
                rollout.finish_reason = "abort"
                rollout.move_to(Status.ABORTED)
            except EnginesLost:
                raise
            except Exception as error:  # the fault of one rollout is its outcome
                rollout.fail(f"agent: {type(error).__name__}: {error}")
            finally:
                running.discard(task)
            return rollout

        unfinished = [rollout for rollout in rollouts if rollout.status is not Status.COMPLETED]
        # each has ended when this returns, whatever another raised
        made = await all_results(map(isolated, unfinished))
        by_id = {rollout.rollout_id: rollout for rollout in made}
        return [by_id.get(rollout.rollout_id, rollout) for rollout in rollouts]

    async def pause(self) -> None:
        """Abort what is running: `generate_group` calls return soon and keep partial tokens."""
        for task in self._running_samples():
            task.cancel()

    def _running_samples(self) -> set[asyncio.Task[Rollout]]:
        running: set[asyncio.Task[Rollout]] = self.__dict__.setdefault("_samples", set())
        return running
