"""A user's own function as a reward: sync or async, of one rollout or of a whole group.

The function's parameter names choose its arguments; keyword options come from the config. It runs in a
thread, so that slow code does not block the event loop (`call_threads.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.errors import RewardError, UserError
from penstock.reward.call_threads import CallThreads, CallTimeout
from penstock.reward.options import check_option_names
from penstock.types import Prompt, Rollout, Score

ONE = ("rollout", "response")
MANY = ("rollouts", "responses", "prompts")
OF_PROMPT = ("prompt", "gt_answer", "test_cases", "messages", "extra")
DEFAULT_TIMEOUT_S = 60.0
NUM_THREADS = 8


class UserFunction:
    """Consumes rollouts, calls the user's function, produces Scores."""

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name = name
        self._function = function
        self._options = dict(options)
        self._timeout_s = _read_timeout(name, self._options.pop("timeout_s", DEFAULT_TIMEOUT_S))
        self._parameters = _read_parameters(name, function, self._options)
        self.needs_group = any(parameter in MANY for parameter in self._parameters)
        if self.needs_group:
            self.score_group = self._score_group
        self._threads: CallThreads | None = None  # begun by the first call

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Call the function for one rollout."""
        given = {"rollout": rollout, "response": rollout.text, **_of_prompt(prompt)}
        return _as_score(await self._call(given))

    async def _score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Call the function once for the whole group; it gives one value per rollout."""
        given = {
            "rollouts": list(rollouts),
            "responses": [rollout.text for rollout in rollouts],
            "prompts": list(prompts),
            **_of_prompt(prompts[0]),
        }
        result = await self._call(given)
        if not isinstance(result, Sequence) or isinstance(result, str):
            raise RewardError(
                f"got {type(result).__name__}, allowed: a list, one value per rollout"
            )
        return [_as_score(value) for value in result]

    async def _call(self, given: Mapping[str, Any]) -> Any:
        arguments = {name: given[name] for name in self._parameters} | self._options
        if self._threads is None or self._threads.loop is not asyncio.get_running_loop():
            name = f"reward-{self.name}"
            self._threads = CallThreads(name, NUM_THREADS, self._timeout_s)
        try:
            return await self._threads.run(partial(_run, self._function, arguments))
        except CallTimeout:
            raise RewardError(f"no result after {self._timeout_s:g} s (timeout_s)") from None

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


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt} | {name: getattr(prompt, name) for name in OF_PROMPT[1:]}


def _read_timeout(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(
            f"reward {name}: option timeout_s: got {value!r}, allowed: a number above 0"
        )
    return float(value)


def _read_parameters(
    name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the parameters that rollout and prompt fill; the others must be options."""
    parameters = inspect.signature(function).parameters.values()
    known = (*ONE, *MANY, *OF_PROMPT)
    filled = tuple(parameter.name for parameter in parameters if parameter.name in known)
    if not any(parameter in ONE or parameter in MANY for parameter in filled):
        raise UserError(
            f"reward {name}: got a function without a parameter for the rollout, "
            f"allowed: one of {', '.join((*ONE, *MANY))}"
        )
    if any(parameter in ONE for parameter in filled) and any(one in MANY for one in filled):
        raise UserError(
            f"reward {name}: got parameters for one rollout and for a group, allowed: one kind"
        )
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise UserError(f"reward {name}: got positional-only parameters, allowed: named ones")
    own = [p for p in parameters if p.name not in known]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
        check_option_names(name, options, [p.name for p in own] + ["timeout_s"])
    for parameter in own:
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in options:
            raise UserError(
                f"reward {name}: the function's parameter {parameter.name!r} is not filled, "
                f"allowed: an option of that name, or one of {', '.join(known)}"
            )
    return filled


def _as_score(value: Any) -> Score:
    if isinstance(value, Score):
        return value
    if isinstance(value, bool):
        return Score(value=float(value), answer_ok=value)
    if isinstance(value, Mapping):
        return Score(**value)
    try:
        return Score(value=float(value))
    except (TypeError, ValueError):
        raise RewardError(
            f"got {value!r}, allowed: a number, a bool, a Score or a dict of its fields"
        ) from None
