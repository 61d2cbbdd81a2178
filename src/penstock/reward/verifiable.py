"""The weighted sum of named rewards: what an agent loop calls.

Parts are scored at the same time; the Score keeps every part's own value and note. A fault in a part
becomes a `RewardError` with the rollout's id and the part's name, so that it counts as a failure and
never as a zero. Retries are made by the producer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.config import RewardConfig
from penstock.config.plugins import place_of
from penstock.errors import RewardError, UserError
from penstock.reward.protocol import AskPolicy, Reward, check_option_names, read_options
from penstock.reward.user import UserFunction, UserObject, as_score, check_size
from penstock.types import Prompt, Rollout, Score
from penstock.waits import OpenWait, WaitKind, Waits, all_results

CLOSE_TIMEOUT_S = 120.0  # of one part


@dataclass(slots=True, frozen=True)
class Part:
    """One term of the sum."""

    name: str
    weight: float
    reward: Reward


def make_part(
    name: str,
    target: Any,
    config: RewardConfig,
    max_tokens: int,
    ask_policy: AskPolicy | None = None,
    *,
    is_chat: bool = False,
) -> Part:
    """Build one part from what its name stands for: a built-in, the user's class, object or function."""
    reward: Reward
    if isinstance(target, type):
        if issubclass(target, Reward) and target.Options is not None:
            make: Callable[..., Reward] = target
            if target.asks_policy:
                make = partial(make, ask_policy=ask_policy)
            reward = make(read_options(name, target.Options, config.options), max_tokens=max_tokens)
        elif not _has_score(target):
            raise UserError(
                f"reward: got {config.type!r}, allowed: a class with `async def score(rollout, prompt)`"
            )
        else:
            parameters = inspect.signature(target).parameters.values()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                names = [parameter.name for parameter in parameters]
                check_option_names(name, config.options, names)
            reward = target(**config.options)
            reward = reward if isinstance(reward, Reward) else UserObject(reward)
    elif _has_score(target):
        check_option_names(name, config.options, [])
        reward = target if isinstance(target, Reward) else UserObject(target)
    elif callable(target):
        reward = UserFunction(name, target, config.options, is_chat=is_chat)
    else:
        raise UserError(
            f"reward: got {config.type!r}, which is a {type(target).__name__}, "
            "allowed: a function, or a class or an object with `async def score(rollout, prompt)`"
        )
    if config.weight < 0 and reward.lowest_when_truncated:
        raise UserError(f"reward {name}: weight got {config.weight}, allowed: 0 or more")
    return Part(name, config.weight, reward)


def _has_score(target: Any) -> bool:
    """Whether a user's class or object is a reward."""
    return inspect.iscoroutinefunction(getattr(target, "score", None))


class VerifiableReward(Reward):
    """Consumes finished rollouts, produces the weighted sum of its parts."""

    def __init__(
        self, parts: Sequence[Part], *, waits: Waits | None = None, lane: str = "rewards"
    ) -> None:
        """`lane` names this reward in the waits that every score opens."""
        if not parts:
            raise UserError("rewards: got none, allowed: at least one")
        self.parts = tuple(parts)
        self.needs_group = any(part.reward.needs_group for part in parts)
        self._waits, self._lane = waits or Waits(), lane

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Judge one rollout as soon as it is finished."""
        if self.needs_group:
            names = ", ".join(part.name for part in self.parts if part.reward.needs_group)
            raise RewardError(
                f"rollout {rollout.rollout_id}: reward {names} judges whole groups; "
                "call score_group with all rollouts of the group"
            )
        with self._waits.wait(
            self._lane, WaitKind.REWARD, rollout.rollout_id, responder=self._lane
        ):
            if len(self.parts) == 1:
                return self._sum([await _score_part(self.parts[0], rollout, prompt)])
            scores = await all_results(_score_part(part, rollout, prompt) for part in self.parts)
            return self._sum(scores)

    async def score_each(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score | BaseException]:
        """Judge finished rollouts one by one; where one cannot be judged, the error stands in its place.

        One function of the user is called for all of them without an asyncio task for each: hundreds of
        rollouts may end together, and a task costs more than a cheap function.
        """
        pairs = list(zip(rollouts, prompts, strict=True))
        part = self.parts[0]
        if len(self.parts) == 1 and isinstance(part.reward, UserFunction) and not self.needs_group:
            return await self._score_calls(part, part.reward, pairs)
        return await asyncio.gather(*map(self.score, rollouts, prompts), return_exceptions=True)

    async def _score_calls(
        self, part: Part, function: UserFunction, pairs: Sequence[tuple[Rollout, Prompt]]
    ) -> list[Score | BaseException]:
        """Begin all calls, then wait for them in order. Each is listed as a wait until it is answered."""
        calls: list[asyncio.Future[Score]] = []
        outcomes: list[Score | BaseException] = []
        now = self._waits.clock()
        try:
            for rollout, prompt in pairs:
                calls.append(self._begin_call(function, rollout, prompt, now))
            for call, (rollout, _) in zip(calls, pairs, strict=True):
                try:
                    score = _checked(await call)
                except Exception as error:  # the edge of one rollout: a fault is named and isolated
                    outcomes.append(_named(error, part.name, rollout.rollout_id))
                else:
                    outcomes.append(self._sum([score]))
        finally:
            for call in calls:
                call.cancel()  # after a stop; those that are done stay as they are
        return outcomes

    def _begin_call(
        self, function: UserFunction, rollout: Rollout, prompt: Prompt, now: float
    ) -> asyncio.Future[Score]:
        # of no task: it ends with its call, not with what this task opens next
        lane = self._lane
        wait = self._waits.begin(lane, WaitKind.REWARD, rollout.rollout_id, lane, now)
        try:
            call = function.begin(rollout, prompt)
        except Exception as error:  # the edge of one rollout: told where the outcome is awaited
            call = asyncio.get_running_loop().create_future()
            call.set_exception(error)
        call.add_done_callback(partial(_close_wait, wait))
        return call

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Judge the finished rollouts of one group; parts that need the group get all at once."""
        if len(rollouts) != len(prompts):
            raise ValueError(
                f"score_group: got {len(rollouts)} rollouts and {len(prompts)} prompts, "
                "allowed: as many of each"
            )
        detail = f"group of {rollouts[0].rollout_id}" if rollouts else ""
        with self._waits.wait(self._lane, WaitKind.REWARD, detail, responder=self._lane):
            columns = await all_results(
                _score_column(part, rollouts, prompts) for part in self.parts
            )
        return [self._sum([column[row] for column in columns]) for row in range(len(rollouts))]

    def _sum(self, scores: Sequence[Score]) -> Score:
        if len(scores) == 1 and not scores[0].parts:
            part, score = self.parts[0], scores[0]  # as most tasks have it
            verdict = (
                score.format_ok,
                score.answer_ok,
                score.note,
                score.parsed,
                score.tests or (),
            )
            return Score(0.0 + part.weight * score.value, {part.name: score.value}, *verdict)
        value, parts, notes = 0.0, dict[str, float](), list[str]()
        for part, score in zip(self.parts, scores, strict=True):
            value += part.weight * score.value
            parts[part.name] = score.value
            parts.update({f"{part.name}.{name}": term for name, term in score.parts.items()})
            if score.note:
                notes.append(score.note if len(scores) == 1 else f"{part.name}: {score.note}")
        weighed = zip(self.parts, scores, strict=True)
        judges = [score for part, score in weighed if part.weight]  # others are only shown
        return Score(
            value=value,
            parts=parts,
            format_ok=_all_of([score.format_ok for score in judges]),
            answer_ok=_all_of([score.answer_ok for score in judges]),
            note="; ".join(notes),
            parsed=next((score.parsed for score in scores if score.parsed is not None), None),
            tests=next((score.tests for score in scores if score.tests), ()),
        )

    async def probe(self) -> None:
        """Try the parts that ask a server; raise RewardError, in one line, if one does not answer."""
        for part in self.parts:
            try:
                await part.reward.probe()
            except RewardError as error:
                line = " ".join(str(error).split())
                raise RewardError(f"reward {part.name}: {line}") from error

    async def close(self) -> None:
        """End every part's workers, even if ending those of another part raises or does not return."""
        await all_results(_close_part(part) for part in self.parts)


async def _close_part(part: Part) -> None:
    deadline = asyncio.timeout(CLOSE_TIMEOUT_S)
    try:
        async with deadline:
            await part.reward.close()
    except TimeoutError:
        if not deadline.expired():
            raise
        raise RewardError(
            f"reward {part.name}: close() did not return within {CLOSE_TIMEOUT_S:g} s"
        ) from None


def _close_wait(wait: OpenWait, call: asyncio.Future[Any]) -> None:
    fault = asyncio.CancelledError() if call.cancelled() else call.exception()
    wait.__exit__(None if fault is None else type(fault))


def _all_of(judged: Sequence[bool | None]) -> bool | None:
    verdicts = [verdict for verdict in judged if verdict is not None]
    return all(verdicts) if verdicts else None


async def _score_part(part: Part, rollout: Rollout, prompt: Prompt) -> Score:
    try:
        return _checked(await part.reward.score(rollout, prompt))
    except Exception as error:  # the edge of one rollout: a fault is named and isolated
        raise _named(error, part.name, rollout.rollout_id) from error


async def _score_column(
    part: Part, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
) -> list[Score]:
    if not part.reward.needs_group:
        pairs = zip(rollouts, prompts, strict=True)
        return await all_results(_score_part(part, rollout, prompt) for rollout, prompt in pairs)
    ids = " to ".join(dict.fromkeys(rollouts[place].rollout_id for place in (0, -1)))
    try:
        scores = [_checked(score) for score in await part.reward.score_group(rollouts, prompts)]
        if len(scores) != len(rollouts):
            raise RewardError(f"got {len(scores)} scores, allowed: {len(rollouts)}")
    except Exception as error:  # the edge of one group: a fault is named and isolated
        raise _named(error, part.name, ids) from error
    return scores


def _named(error: Exception, part: str, rollout_id: str) -> RewardError:
    ours = isinstance(error, RewardError)
    message = str(error) if ours else f"{type(error).__name__}: {error}{place_of(error)}"
    kind = type(error) if isinstance(error, RewardError) else RewardError
    return kind(f"rollout {rollout_id}: reward {part}: {message}")


def _checked(score: Score) -> Score:
    score = as_score(score)
    check_size("value", score.value)
    return score
