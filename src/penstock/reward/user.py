"""A user's own function as a reward: sync or async, of one rollout or of a whole group.

The function's parameters choose how it is called (`signature.py`); keyword options come from the config.
It runs in a thread, so that slow code does not block the event loop (`call_threads.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.errors import RewardError, UserError
from penstock.reward.call_threads import CallThreads, CallTimeout
from penstock.reward.signature import Shape, read_signature
from penstock.types import Prompt, Rollout, Score

DEFAULT_TIMEOUT_S = 60.0
NUM_THREADS = 8


class UserFunction:
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
        if self.needs_group:
            self.score_group = self._score_group
        self._threads: CallThreads | None = None  # begun by the first call

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Call the function for one rollout."""
        return self.score_of(await self._end(self.begin(rollout, prompt)))

    def begin(self, rollout: Rollout, prompt: Prompt) -> asyncio.Future[Any]:
        """Begin the call for one rollout; `score_of` its result, or `fault_of` its error, is the outcome."""
        return self._begin(self._signature.of_one(rollout, prompt))

    def score_of(self, value: Any) -> Score:
        """Return what the function returned as a score; raise a RewardError if it is none."""
        return _verl_score(value) if self._signature.shape is Shape.VERL else as_score(value)

    async def _score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Call the function once for the whole group; it gives one value per rollout."""
        is_trl = self._signature.shape is Shape.TRL
        if is_trl:
            arguments = self._signature.of_trl(rollouts, prompts[0], is_chat=self._is_chat)
        else:
            arguments = self._signature.of_group(rollouts, prompts[0])
        result = await self._end(self._begin(arguments))
        if callable(to_list := getattr(result, "tolist", None)):  # a tensor or an array
            result = to_list()
        if not isinstance(result, Sequence) or isinstance(result, str):
            raise RewardError(
                f"got {type(result).__name__}, allowed: a list, one value per rollout"
            )
        return [
            Score(value=0.0, note="not judged") if is_trl and value is None else as_score(value)
            for value in result
        ]

    def _begin(self, given: Mapping[str, Any]) -> asyncio.Future[Any]:
        arguments = {**given, **self._options}
        if self._threads is None or self._threads.loop is not asyncio.get_running_loop():
            name = f"reward-{self.name}"
            self._threads = CallThreads(name, NUM_THREADS, self._timeout_s)
        return self._threads.submit(partial(_run, self._function, arguments))

    async def _end(self, call: asyncio.Future[Any]) -> Any:
        try:
            return await call
        except CallTimeout as late:
            raise self.fault_of(late) from None

    def fault_of(self, error: Exception) -> Exception:
        """Return the error of a call in the user's words."""
        if isinstance(error, CallTimeout):
            return RewardError(f"no result after {self._timeout_s:g} s (timeout_s)")
        return error

    async def close(self) -> None:
        """End the threads; a hanging one does not keep the process alive."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        result = function(**arguments)
        return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result
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
