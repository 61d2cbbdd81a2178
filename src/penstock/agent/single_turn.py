"""One prompt, one response: the plain agent loop.

Asks the engine for what is not finished, then the reward for what has no score yet. A fault of one
rollout stays in that rollout. It does not retry: the failure policy of the producing side does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.config import SamplingConfig
from penstock.engine.protocol import Generation, GenerationRequest, InferenceEngine, SamplingParams
from penstock.reward.protocol import Reward
from penstock.types import Rollout, Status

_PASSED_OVER = 31  # groups that are not searched after the engine was found to be the responder
_FINISHED = frozenset({"stop", "length", "tool_calls"})


def annealed_temperature(sampling: SamplingConfig, policy_version: int) -> float:
    """Linear from `temperature` to `anneal.end` over `anneal.steps` updates, then constant."""
    anneal = sampling.anneal
    if anneal.end is None:
        return sampling.temperature
    done = 1.0 if anneal.steps == 0 else min(1.0, policy_version / anneal.steps)
    return sampling.temperature + (anneal.end - sampling.temperature) * done


class SingleTurn:
    """Consumes rollouts to make, produces them generated and scored."""

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        reward: Reward,
        sampling: SamplingConfig,
        decode: Callable[[Sequence[int]], str],
        temperature: Callable[[int], float] | None = None,
    ) -> None:
        self._engine = engine
        self._reward = reward
        self._sampling = sampling
        self._decode = decode
        self._temperature = temperature or (lambda version: annealed_temperature(sampling, version))
        self._running: set[str] = set()
        self._requests = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._searching = asyncio.Lock()  # for a responder, in one group at a time
        self._passed_over: int | None = (
            None  # groups since the engine was the responder; None: it is not
        )

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score what is not finished; each ends COMPLETED, ABORTED or FAILED."""
        todo = [rollout for rollout in rollouts if rollout.status is not Status.COMPLETED]
        for rollout in todo:
            self._prepare(rollout, enable_partial_rollout)
        await self._generate([r for r in todo if r.finish_reason not in _FINISHED])
        finished = [r for r in todo if r.finish_reason in _FINISHED]
        if getattr(self._reward, "needs_group", False):
            await self._score_together(rollouts)
        else:
            await asyncio.gather(*(self._score(rollout) for rollout in finished))
        return rollouts

    async def pause(self) -> None:
        """Abort this loop's own requests; others that share the engine go on."""
        await self._abort(list(self._running))

    def _prepare(self, rollout: Rollout, keep_partial: bool) -> None:
        finished = rollout.finish_reason in _FINISHED  # and waits for the others to be scored with
        if rollout.status is Status.ABORTED and not keep_partial and not finished:
            rollout.restart()
        rollout.move_to(Status.INIT)
        rollout.error = ""
        if rollout.finish_reason not in _FINISHED:
            rollout.finish_reason = ""
        if not len(rollout.response_ids):  # a partial goes on at the temperature it began with
            rollout.temperature = self._temperature(rollout.issued_version)

    async def _generate(self, rollouts: list[Rollout]) -> None:
        if not rollouts:
            return
        by_temperature = {
            temperature: SamplingParams.from_config(self._sampling, temperature=temperature)
            for temperature in {rollout.temperature for rollout in rollouts}
        }  # shared, so that they are sent once
        requests = [self._request(rollout, by_temperature) for rollout in rollouts]
        ids = [request.request_id for request in requests]
        self._running.update(ids)
        try:
            generations = await self._ask_engine(requests)
        except asyncio.CancelledError:
            self._abort_later(ids)  # nobody waits for them: they must not hold the engine
            raise
        finally:
            self._running.difference_update(ids)
        for rollout, generation in zip(rollouts, generations, strict=True):
            if isinstance(generation, BaseException):
                _fail(rollout, f"engine: {type(generation).__name__}: {generation}")
            else:
                self._take(rollout, generation)

    async def _ask_engine(
        self, requests: list[GenerationRequest]
    ) -> Sequence[Generation | BaseException]:
        """All at once, so that they share a prefill; one by one where that raises, to see who did."""
        try:
            made = await self._engine.generate_many(requests)
            self._passed_over = None
            return made
        except Exception as error:
            if len(requests) == 1:
                return [error]
            self._abort_later([request.request_id for request in requests])
            async with self._searching:
                return await self._find_culprit(requests, error)

    async def _find_culprit(
        self, requests: list[GenerationRequest], error: Exception
    ) -> Sequence[Generation | BaseException]:
        """Each alone; where the first two raise as well, the engine is taken for the responder.

        Then the others are not asked, and neither are those of the next groups, until one succeeds.
        """
        if self._passed_over is not None and self._passed_over < _PASSED_OVER:
            self._passed_over += 1
            return [error] * len(requests)
        first = await asyncio.gather(*map(self._ask_alone, requests[:2]), return_exceptions=True)
        if all(isinstance(answer, BaseException) for answer in first):
            self._passed_over = 0
            return [*first, *[error] * len(requests[2:])]
        self._passed_over = None
        rest = await asyncio.gather(*map(self._ask_alone, requests[2:]), return_exceptions=True)
        return [*first, *rest]

    async def _ask_alone(self, request: GenerationRequest) -> Generation:
        request_id = f"{request.request_id}-alone"
        self._running.add(request_id)
        try:
            return await self._engine.generate(replace(request, request_id=request_id))
        except asyncio.CancelledError:
            self._abort_later([request_id])
            raise
        finally:
            self._running.discard(request_id)

    async def _abort(self, request_ids: list[str]) -> None:
        await asyncio.gather(*(self._engine.abort(request_id) for request_id in request_ids))

    def _abort_later(self, request_ids: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(request_ids))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _request(
        self, rollout: Rollout, by_temperature: dict[float, SamplingParams]
    ) -> GenerationRequest:
        self._requests += 1
        return GenerationRequest(
            request_id=f"{rollout.rollout_id}/{self._requests}",
            prompt_ids=rollout.prompt_ids,
            sampling=by_temperature[rollout.temperature],
            seed=rollout.seed,
            response_ids=rollout.response_ids,
        )

    def _take(self, rollout: Rollout, generation: Generation) -> None:
        rollout.append(generation.token_ids, generation.logprobs, generation.segments)
        rollout.finish_reason = generation.finish_reason
        rollout.text = self._decode(rollout.response_ids.tolist())
        if generation.finish_reason == "abort":
            rollout.move_to(Status.ABORTED)
        elif generation.finish_reason not in _FINISHED:
            _fail(rollout, f"engine: {generation.error or generation.finish_reason}")

    async def _score(self, rollout: Rollout) -> None:
        if rollout.score is None:
            assert rollout.prompt is not None, "a group gives its prompt to its rollouts"
            try:
                rollout.score = await self._reward.score(rollout, rollout.prompt)
            except Exception as error:
                _fail(rollout, f"reward: {type(error).__name__}: {error}")
                return
        rollout.move_to(Status.COMPLETED)

    async def _score_together(self, rollouts: list[Rollout]) -> None:
        """A reward that compares the members is asked once, when all of them are finished."""
        if any(rollout.finish_reason not in _FINISHED for rollout in rollouts):
            for rollout in rollouts:
                if rollout.status is Status.INIT:
                    rollout.move_to(Status.ABORTED)  # finished, waiting for the others
            return
        prompts = [rollout.prompt for rollout in rollouts]
        try:
            scores = await self._reward.score_group(rollouts, prompts)  # type: ignore[attr-defined]
        except Exception as error:
            for rollout in rollouts:
                _fail(rollout, f"reward: {type(error).__name__}: {error}")
            return
        for rollout, score in zip(rollouts, scores, strict=True):
            rollout.score = score
            rollout.move_to(Status.COMPLETED)


def _fail(rollout: Rollout, reason: str) -> None:
    rollout.error = reason
    rollout.move_to(Status.FAILED)
