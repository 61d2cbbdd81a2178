"""A user's function or object as a reward.

The parameters of a function tell which of five shapes it has:

    one response    response or rollout; prompt, gt_answer, test_cases, messages, extra
    a whole group   responses or rollouts, and the same of the prompt; returns one value for each
    TRL             completions, prompts, completion_ids, and fields of the data, all as lists
    verl            compute_score: data_source, solution_str, ground_truth, extra_info
    OpenRLHF        reward_func: queries (prompt and response), prompts, labels, all as lists

Every other parameter is an option of the reward, or a field of the data. A function is sync or async, and runs in
a thread, so that slow code does not block the event loop (`call_threads.py`). An object needs no more than
`score`; `close` is called if it has one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from penstock.data.dataset import ground_truth
from penstock.errors import RewardError, UserError
from penstock.reward.call_threads import CallThreads
from penstock.reward.protocol import Reward, check_option_names
from penstock.types import Prompt, Rollout, Score

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60.0
NUM_THREADS = 8
_LARGEST = 1e18  # of a value: its square is far inside every number format


class UserObject(Reward):
    """An object with `score` of a class that is no Reward."""

    def __init__(self, target: Any) -> None:
        self._target = target

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        return as_score(await self._target.score(rollout, prompt))

    async def close(self) -> None:
        if hasattr(self._target, "close"):
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
        value = self._options.pop("timeout_s", DEFAULT_TIMEOUT_S)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UserError(
                f"reward {name}: option timeout_s: got {value!r}, allowed: a number above 0"
            )
        self._timeout_s = float(value)
        self._signature = read_signature(name, function, self._options)
        self._is_chat = is_chat
        self.fields = self._signature.reads  # of the data; every record must have them
        self.needs_group = self._signature.shape in (Shape.GROUP, Shape.TRL, Shape.OPENRLHF)
        self._threads: CallThreads | None = None  # begun by the first call

    async def score(self, rollout: Rollout, prompt: Prompt) -> Score:
        """Call the function for one rollout."""
        return await self.begin(rollout, prompt)

    def begin(self, rollout: Rollout, prompt: Prompt) -> asyncio.Future[Score]:
        """Begin the call for one rollout, in a thread."""
        read = _verl_score if self._signature.shape is Shape.VERL else as_score
        return self._begin(self._signature.arguments([rollout], prompt), read)

    async def score_group(
        self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[Score]:
        """Call the function once for the whole group; it gives one value per rollout."""
        if not self.needs_group:
            return await super().score_group(rollouts, prompts)
        read = _trl_scores if self._signature.shape is Shape.TRL else _scores
        arguments = self._signature.arguments(rollouts, prompts[0], is_chat=self._is_chat)
        return await self._begin(arguments, read)

    def _begin(self, values: Mapping[str, Any], read: Callable[[Any], T]) -> asyncio.Future[T]:
        """Begin a call; `read` makes scores of what the function returns."""
        arguments = {**values, **self._options}
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


def _values(result: Any) -> Sequence[Any]:
    """The values that a function of a whole group returned; OpenRLHF's may be in a dict."""
    if isinstance(result, Mapping):
        result = result.get("rewards")
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
    """The score of verl's form: a number, or a dict with `score` and other figures."""
    if not isinstance(value, Mapping):
        return as_score(value)
    try:
        score = float(value["score"])
    except (KeyError, TypeError, ValueError):
        raise RewardError(
            f"got {value!r}, allowed: a number, or a dict with the number score"
        ) from None
    parts = {k: float(v) for k, v in value.items() if k != "score" and isinstance(v, Real)}
    verdict = bool(value["acc"]) if "acc" in value else None
    return Score(value=score, parts=parts, answer_ok=verdict)


def check_size(what: str, value: float) -> None:
    """Raise RewardError for a value with which a group's deviation cannot be computed."""
    if not abs(value) <= _LARGEST:
        raise RewardError(
            f"got the {what} {value}, allowed: a finite number, at most {_LARGEST:g} in size"
        )


def as_score(value: Any) -> Score:
    """What a function gave as a Score: a number, a bool, a Score or a dict of its fields."""
    if isinstance(value, bool):
        return Score(value=float(value), answer_ok=value)
    if type(value) is float:
        return Score(value)
    fields = value if isinstance(value, Mapping) else {"value": value}
    try:
        return _plain(value if isinstance(value, Score) else Score(**fields))
    except (AttributeError, TypeError, ValueError):
        raise RewardError(
            f"got {value!r}, allowed: a number, a bool, a Score or a dict of its fields: "
            f"{', '.join(field.name for field in dataclasses.fields(Score))}"
        ) from None


def _plain(score: Score) -> Score:
    """The score in Python's own types, as the journal and the metrics need it; numpy's and torch's become them."""
    return Score(
        float(score.value),
        {str(name): float(term) for name, term in (score.parts or {}).items()},
        _verdict(score.format_ok),
        _verdict(score.answer_ok),
        str(score.note or ""),
        None if score.parsed is None else str(score.parsed),
        tuple(map(int, score.tests or ())),
    )


def _verdict(value: Any) -> bool | None:
    if isinstance(value, str):
        raise TypeError("a text is no verdict: bool('no') is True")
    return None if value is None else bool(value)


# -- shapes of functions ------------------------------------------------------------------------------

OF_PROMPT = ("prompt", "gt_answer", "test_cases", "messages", "extra")


class Shape(StrEnum):
    """How a function is called."""

    ONE = "one response"
    GROUP = "a whole group"
    TRL = "TRL"
    VERL = "verl"
    OPENRLHF = "OpenRLHF"


SYSTEM_NAMES: dict[Shape, tuple[str, ...]] = {  # parameters that the system fills
    Shape.ONE: ("rollout", "response", *OF_PROMPT),
    Shape.GROUP: ("rollouts", "responses", "prompts", *OF_PROMPT),
    Shape.TRL: (
        *("prompts", "completions", "completion_ids"),
        *("trainer_state", "log_extra", "log_metric"),
    ),
    Shape.VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
    Shape.OPENRLHF: ("queries", "prompts", "labels"),
}
_READ = {
    "test_cases": "test_cases",
    **dict.fromkeys(("gt_answer", "ground_truth", "labels"), "gt_answer"),
}


@dataclass(slots=True, frozen=True)
class Signature:
    """The parameters of a reward function, sorted by who fills them."""

    shape: Shape
    system: tuple[str, ...]  # filled by the system
    fields: tuple[str, ...]  # parameters that are fields of the data
    optional: tuple[str, ...]  # TRL: parameters with a default, filled if the data has the field
    takes_all: bool  # TRL: `**kwargs` gets every field of the data
    reads: tuple[str, ...]  # fields that every record must have

    def arguments(
        self, rollouts: Sequence[Rollout], prompt: Prompt, *, is_chat: bool = False
    ) -> dict[str, Any]:
        """The arguments of a call for these rollouts, which is one in the shapes ONE and VERL.

        `is_chat`: TRL's prompts and completions are lists of messages, because the data has messages.
        """
        count, texts = len(rollouts), [rollout.text for rollout in rollouts]
        asks = prompt.messages and self.shape in (Shape.TRL, Shape.OPENRLHF)
        question: Any = prompt.messages[-1]["content"] if asks else ""
        values: dict[str, Any]
        if self.shape is Shape.VERL:
            values = {
                "data_source": prompt.extra.get("data_source", ""),
                "solution_str": texts[0],
                "ground_truth": ground_truth(prompt.gt_answer, prompt.extra),
                "extra_info": prompt.extra.get("extra_info") or {},
            }
        elif self.shape is Shape.OPENRLHF:
            values = {
                "queries": [question + text for text in texts],
                "prompts": [question] * count,
                "labels": [ground_truth(prompt.gt_answer, prompt.extra)] * count,
            }
        elif self.shape is Shape.TRL:
            answers = [[{"role": "assistant", "content": text}] for text in texts]
            values = {
                "prompts": [list(prompt.messages) if is_chat else question] * count,
                "completions": answers if is_chat else texts,
                "completion_ids": [rollout.response_ids.tolist() for rollout in rollouts],
                "trainer_state": None,
                "log_extra": _ignore,
                "log_metric": _ignore,
            }
        else:
            values = {
                "rollout": rollouts[0],
                "response": texts[0],
                "rollouts": list(rollouts),
                "responses": texts,
                "prompts": [prompt] * count,
                "prompt": prompt,
                **{name: getattr(prompt, name) for name in OF_PROMPT[1:]},
            }
        columns = {name: _field(prompt, name) for name in self.fields}
        if self.shape is Shape.TRL:
            available = _fields_of(prompt)
            more = available if self.takes_all else [n for n in self.optional if n in available]
            columns |= {name: available[name] for name in more}
            columns = {name: [value] * count for name, value in columns.items()}
        return {name: values[name] for name in self.system} | columns


def read_signature(
    name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Signature:
    """The function's signature; raise a UserError if its parameters do not tell its shape."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            f"reward {name}: got {function!r}, whose parameters cannot be read, allowed: a function"
        ) from None
    shape = _shape_of(name, [parameter.name for parameter in parameters])
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise UserError(f"reward {name}: got positional-only parameters, allowed: named ones")
    system = [p for p in parameters if p.name in SYSTEM_NAMES[shape]]
    others = [p for p in parameters if p.name not in SYSTEM_NAMES[shape]]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in others)
    keywords = [p for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not takes_all:
        check_option_names(name, options, [p.name for p in keywords] + ["timeout_s"])
    fields = [p for p in keywords if p.default is p.empty and p.name not in options]
    reads = [_READ[p.name] for p in system if p.name in _READ and p.default is p.empty]
    return Signature(
        shape=shape,
        system=tuple(p.name for p in system),
        fields=tuple(p.name for p in fields),
        optional=tuple(p.name for p in keywords if p not in fields and p.name not in options),
        takes_all=takes_all and shape is Shape.TRL,
        reads=(*reads, *(p.name for p in fields)),
    )


def _shape_of(name: str, parameters: Sequence[str]) -> Shape:
    if "solution_str" in parameters:
        return Shape.VERL
    if "completions" in parameters:
        return Shape.TRL
    if "queries" in parameters:
        return Shape.OPENRLHF
    takes_one = any(parameter in ("rollout", "response") for parameter in parameters)
    takes_many = any(parameter in ("rollouts", "responses", "prompts") for parameter in parameters)
    if takes_one and takes_many:
        raise UserError(
            f"reward {name}: got parameters for one rollout and for a group, allowed: one kind"
        )
    if not takes_one and not takes_many:
        raise UserError(
            f"reward {name}: got a function of ({', '.join(parameters)}), allowed: a parameter "
            "named rollout or response (one response), rollouts or responses (a whole group), "
            "completions (as TRL calls it), solution_str (as verl calls it) or queries (OpenRLHF)"
        )
    return Shape.ONE if takes_one else Shape.GROUP


def _fields_of(prompt: Prompt) -> dict[str, Any]:
    """The fields of the prompt's record, as the data names them, without the prompt itself."""
    judged = {"gt_answer": prompt.gt_answer, "test_cases": prompt.test_cases}
    return {**{name: v for name, v in judged.items() if v is not None}, **prompt.extra}


def _field(prompt: Prompt, name: str) -> Any:
    try:
        return _fields_of(prompt)[name]
    except KeyError:
        raise RewardError(f"prompt {prompt.prompt_id} has no field {name!r}") from None


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for TRL's logging callbacks."""
