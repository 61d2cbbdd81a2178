"""A user's function or object as a reward.

A function is sync or async, of one rollout or of a whole group; its parameters choose how it is called
(`signature.py`); keyword options come from the config. It runs in a thread, so that slow code does not
block the event loop (`call_threads.py`). An object needs no more than `score` and `close`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.errors import RewardError, UserError
from penstock.reward.call_threads import CallThreads
from penstock.reward.protocol import Reward
from penstock.reward.signature import Shape, read_signature
from penstock.types import Prompt, Rollout, Score

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60.0
NUM_THREADS = 8


class UserObject(Reward):
    """An object with `score` and `close` of a class that is no Reward."""

    def __init__(self, target: Any) -> None:
        self._target = target

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        score: Score = await self._target.score(rollout, prompt)
        return score

    async def close(self) -> None:
        await self._target.close()


class UserFunction(Reward):
    """Consumes rollouts, calls the user's function, produces Scores."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        is_chat: bool = False,
    ) -> None:
        """`is_chat`: the task's data has messages, which a function in TRL's shape gets as they are."""
        self.name = name
        self._function = function
        self._options = dict(options)
        self._timeout_s = _read_timeout(name, self._options.pop("timeout_s", DEFAULT_TIMEOUT_S))
        self._signature = read_signature(name, function, self._options)
        self._is_chat = is_chat
        self.fields = self._signature.reads  # of the data; every record must have them
        self.needs_group = self._signature.shape in (Shape.GROUP, Shape.TRL)
        self._threads: CallThreads | None = None  # begun by the first call

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Call the function for one rollout."""
        return await self.begin(rollout, prompt)

    def begin(self, rollout: Rollout, prompt: Prompt) -> asyncio.Future[Score]:
        """Begin the call for one rollout, in a thread."""
        read = _verl_score if self._signature.shape is Shape.VERL else as_score
        return self._begin(self._signature.of_one(rollout, prompt), read)

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Call the function once for the whole group; it gives one value per rollout."""
        if not self.needs_group:
            return await super().score_group(rollouts, prompts)
        if self._signature.shape is Shape.TRL:
            arguments = self._signature.of_trl(rollouts, prompts[0], is_chat=self._is_chat)
            return await self._begin(arguments, _trl_scores)
        return await self._begin(self._signature.of_group(rollouts, prompts[0]), _scores)

    def _begin(self, given: Mapping[str, Any], read: Callable[[Any], T]) -> asyncio.Future[T]:
        """Begin a call; `read` makes scores of what the function returns."""
        arguments = {**given, **self._options}
        if self._threads is None or self._threads.loop is not asyncio.get_running_loop():
            name = f"reward-{self.name}"
            self._threads = CallThreads(name, NUM_THREADS, self._timeout_s)
        return self._threads.submit(partial(_run, self._function, arguments, read))

    async def close(self) -> None:
        """End the threads; a hanging one does not keep the process alive."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _run(function: Callable[..., Any], arguments: Mapping[str, Any], read: Callable[[Any], T]) -> T:
    try:
        result = function(**arguments)
        return read(asyncio.run(_finish(result)) if inspect.isawaitable(result) else result)
    except Exception:
        raise
    except BaseException as error:  # SystemExit ends the call, not the run
        raise RewardError(type(error).__name__) from error


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _read_timeout(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(
            f"reward {name}: option timeout_s: got {value!r}, allowed: a number above 0"
        )
    return float(value)


def _values(result: Any) -> Sequence[Any]:
    """The values that a function of a whole group returned."""
    if callable(to_list := getattr(result, "tolist", None)):  # a tensor or an array
        result = to_list()
    if not isinstance(result, Sequence) or isinstance(result, str):
        raise RewardError(f"got {type(result).__name__}, allowed: a list, one value per rollout")
    return result


def _scores(result: Any) -> list[Score]:
    return [as_score(value) for value in _values(result)]


def _trl_scores(result: Any) -> list[Score]:
    """The scores of TRL's form: None for a response says nothing of it."""
    silent = Score(value=0.0, note="not judged")
    return [silent if value is None else as_score(value) for value in _values(result)]


def _verl_score(value: Any) -> Score:
    """Return the score of verl's form: a number, or a dict with `score` and other figures."""
    if not isinstance(value, Mapping):
        return as_score(value)
    if not isinstance(value.get("score"), int | float):
        raise RewardError(f"got {value!r}, allowed: a number, or a dict with the number score")
    parts = {k: float(v) for k, v in value.items() if k != "score" and isinstance(v, int | float)}
    verdict = bool(value["acc"]) if "acc" in value else None
    return Score(value=float(value["score"]), parts=parts, answer_ok=verdict)


def as_score(value: Any) -> Score:
    """Return what a function gave as a Score: a number, a bool, a Score or a dict of its fields."""
    if isinstance(value, Score):
        return value
    if isinstance(value, bool):
        return Score(value=float(value), answer_ok=value)
    if type(value) is float:
        return Score(value)
    fields = value if isinstance(value, Mapping) else {"value": value}
    try:
        return Score(**{**fields, "value": float(fields["value"])})
    except (KeyError, TypeError, ValueError):
        raise RewardError(
            f"got {value!r}, allowed: a number, a bool, a Score or a dict of its fields: "
            f"{', '.join(field.name for field in dataclasses.fields(Score))}"
        ) from None
