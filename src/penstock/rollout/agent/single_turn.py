"""One prompt, one response: the plain agent loop.

Asks the engine for the responses that are not finished, then the reward for the scores that are missing.
An error fails only the rollout it belongs to. Retries are made by the group runner, not here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from penstock.config import SamplingConfig
from penstock.data.chat import ChatTemplate
from penstock.engine.protocol import Generation, GenerationRequest, InferenceEngine, SamplingParams
from penstock.errors import EnginesLost, RewardError
from penstock.reward.protocol import Reward
from penstock.rollout.agent_loop import AgentLoop
from penstock.types import Prompt, Rollout, Status


def annealed_temperature(sampling: SamplingConfig, policy_version: int) -> float:
    """The temperature: linear to `anneal.end` over `anneal.steps` updates, then constant."""
    anneal = sampling.anneal
    if anneal.end is None:
        return sampling.temperature
    done = 1.0 if anneal.steps == 0 else min(1.0, policy_version / anneal.steps)
    return sampling.temperature + (anneal.end - sampling.temperature) * done


async def ask_policy(
    engine: InferenceEngine | None,
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    temperature: float,
) -> tuple[str, str]:
    """(the engine's words on these messages, why they ended); a pause that aborts them is waited for."""
    assert engine is not None, "a run that samples has engines"
    request = GenerationRequest(
        request_id=f"question-{secrets.token_hex(8)}",
        prompt_ids=chat.encode(messages),
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
        seed=secrets.randbits(31),
    )
    while (generation := await engine.generate(request)).finish_reason == "abort":
        pass
    if generation.finish_reason == "error":
        raise RewardError(f"engine: {generation.error}")
    return chat.decode(generation.token_ids), generation.finish_reason


class SingleTurn(AgentLoop):
    """Consumes rollouts to make, produces them generated and scored."""

    def __init__(
        self,
        *,
        engine: InferenceEngine,
        reward: Reward,
        sampling: SamplingConfig,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._engine = engine
        self._reward = reward
        self._sampling = sampling
        self._decode = decode
        self._running: dict[str, None] = {}  # request ids, in the order of their start
        self._requests = 0
        self._newest_params: SamplingParams | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def generate(self, rollout: Rollout, *, enable_partial_rollout: bool = False) -> Rollout:
        """Generate and score one rollout; it ends COMPLETED, ABORTED or FAILED."""
        await self.generate_group([rollout], enable_partial_rollout=enable_partial_rollout)
        return rollout

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        """Generate and score the unfinished rollouts; each ends COMPLETED, ABORTED or FAILED."""
        todo = [rollout for rollout in rollouts if rollout.status is not Status.COMPLETED]
        for rollout in todo:
            self._prepare(rollout, enable_partial_rollout)
        unfinished = [rollout for rollout in todo if not rollout.is_finished]
        requests = [self._request(rollout) for rollout in unfinished]
        ids = [request.request_id for request in requests]
        self._running.update(dict.fromkeys(ids))
        try:  # all at once, to share a prefill
            generations = await self._engine.generate_many(requests) if requests else []
        except EnginesLost:
            raise
        except asyncio.CancelledError:
            self._abort_later(ids)  # the caller was cancelled: free the engine
            raise
        except Exception as error:  # the edge of a group: an engine that raises fails its rollouts
            self._abort_later(ids)
            for rollout in unfinished:
                rollout.fail(f"engine: {type(error).__name__}: {error}")
        else:
            for rollout, generation in zip(unfinished, generations, strict=True):
                self._take(rollout, generation)
        finally:
            for request_id in ids:
                self._running.pop(request_id, None)
        if self._reward.needs_group:
            await self._score_together(rollouts)
        else:
            await self._score_each([rollout for rollout in todo if rollout.is_finished])
        return rollouts

    async def pause(self) -> None:
        """Abort this loop's own requests; other users of the engine are not affected."""
        await self._abort(list(self._running))

    def _prepare(self, rollout: Rollout, keep_partial: bool) -> None:
        # an aborted rollout may be finished: then it waits to be scored together with the others
        if rollout.status is Status.ABORTED and not keep_partial and not rollout.is_finished:
            rollout.restart()
        rollout.move_to(Status.INIT)
        rollout.error = ""
        if not rollout.is_finished:
            rollout.finish_reason = ""
        if not len(rollout.response_ids):  # a partial response keeps the settings it began with
            rollout.temperature = annealed_temperature(self._sampling, rollout.issued_version)
            rollout.min_tokens = self._sampling.min_tokens

    async def _abort(self, request_ids: list[str]) -> None:
        """Abort requests; an abort that fails costs tokens and no more, so its error is not raised."""
        aborts = (self._engine.abort(request_id) for request_id in request_ids)
        await asyncio.gather(*aborts, return_exceptions=True)

    def _abort_later(self, request_ids: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(request_ids))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _request(self, rollout: Rollout) -> GenerationRequest:
        self._requests += 1
        sampling, wanted = self._newest_params, (rollout.temperature, rollout.min_tokens)
        if sampling is None or (sampling.temperature, sampling.min_tokens) != wanted:
            sampling = self._newest_params = SamplingParams.from_config(
                self._sampling, temperature=rollout.temperature, min_tokens=rollout.min_tokens
            )  # one object for equal requests, so that a message has it once
        return GenerationRequest(
            request_id=f"{rollout.rollout_id}/{self._requests}",
            prompt_ids=rollout.prompt_ids,
            sampling=sampling,
            seed=rollout.seed,
            response_ids=rollout.response_ids,
        )

    def _take(self, rollout: Rollout, generation: Generation) -> None:
        rollout.append(
            generation.token_ids, generation.logprobs, generation.segments, generation.choices
        )
        rollout.finish_reason = generation.finish_reason
        rollout.text = self._decode(rollout.response_ids)
        if generation.finish_reason == "abort":
            rollout.move_to(Status.ABORTED)
        elif not rollout.is_finished:
            rollout.fail(f"engine: {generation.error or generation.finish_reason}")

    async def _score_each(self, rollouts: list[Rollout]) -> None:
        """Ask for the scores that are missing, each by itself; an error fails its rollout."""
        missing = [rollout for rollout in rollouts if rollout.score is None]
        prompts = [cast(Prompt, rollout.prompt) for rollout in missing]  # the group has set them
        outcomes = await self._reward.score_each(missing, prompts)
        for rollout, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, Exception):
                rollout.fail(f"reward: {type(outcome).__name__}: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                rollout.score = outcome
        for rollout in rollouts:
            if rollout.score is not None:
                rollout.move_to(Status.COMPLETED)

    async def _score_together(self, rollouts: list[Rollout]) -> None:
        """Ask a reward that compares the members once, when all of them are finished."""
        if not all(rollout.is_finished for rollout in rollouts):
            for rollout in rollouts:
                if rollout.status is Status.INIT:
                    rollout.move_to(Status.ABORTED)  # finished, but it waits for the others
            return
        prompts = [cast(Prompt, rollout.prompt) for rollout in rollouts]
        try:
            scores = await self._reward.score_group(rollouts, prompts)
        except Exception as error:  # the fault of a reward is the outcome of its group
            for rollout in rollouts:
                rollout.fail(f"reward: {type(error).__name__}: {error}")
            return
        for rollout, score in zip(rollouts, scores, strict=True):
            rollout.score = score
            rollout.move_to(Status.COMPLETED)
