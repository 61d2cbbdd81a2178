"""Which of four shapes a user's reward function has, told by its parameters, and its arguments.

    one response    response or rollout; prompt, gt_answer, test_cases, messages, extra
    a whole group   responses or rollouts, and the same of the prompt; returns one value for each
    TRL             completions, prompts, completion_ids, and fields of the data, all as lists
    verl            compute_score: data_source, solution_str, ground_truth, extra_info

Every other parameter is an option of the reward, or a field of the data. Calls nothing (`user.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.data.dataset import ground_truth
from penstock.errors import RewardError, UserError
from penstock.reward.options import check_option_names
from penstock.types import Prompt, Rollout

OF_PROMPT = ("prompt", "gt_answer", "test_cases", "messages", "extra")


class Shape(StrEnum):
    """How a function is called."""

    ONE = "one response"
    GROUP = "a whole group"
    TRL = "TRL"
    VERL = "verl"


OWN_NAMES: dict[Shape, tuple[str, ...]] = {  # parameters that the system fills
    Shape.ONE: ("rollout", "response", *OF_PROMPT),
    Shape.GROUP: ("rollouts", "responses", "prompts", *OF_PROMPT),
    Shape.TRL: (
        *("prompts", "completions", "completion_ids"),
        *("trainer_state", "log_extra", "log_metric"),
    ),
    Shape.VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
_READ = {"gt_answer": "gt_answer", "test_cases": "test_cases", "ground_truth": "gt_answer"}


@dataclass(slots=True, frozen=True)
class Signature:
    """The parameters of a reward function, sorted by who fills them."""

    shape: Shape
    own: tuple[str, ...]  # filled by the system
    fields: tuple[str, ...]  # parameters that are fields of the data
    optional: tuple[str, ...]  # TRL: parameters with a default, filled if the data has the field
    takes_all: bool  # TRL: `**kwargs` gets every field of the data
    reads: tuple[str, ...]  # fields that every record must have

    def of_one(self, rollout: Rollout, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments for one rollout (the shapes ONE and VERL)."""
        if self.shape is Shape.VERL:
            given = {
                "data_source": prompt.extra.get("data_source", ""),
                "solution_str": rollout.text,
                "ground_truth": ground_truth(prompt.gt_answer, prompt.extra),
                "extra_info": prompt.extra.get("extra_info") or {},
            }
            return self._choose(given, prompt)
        own = {"rollout": rollout, "response": rollout.text, "prompt": prompt}
        chosen = {name: own[name] if name in own else getattr(prompt, name) for name in self.own}
        for name in self.fields:
            chosen[name] = _field(prompt, name)
        return chosen

    def of_group(self, rollouts: Sequence[Rollout], prompt: Prompt) -> dict[str, Any]:
        """Return the arguments for all rollouts of a group (the shape GROUP)."""
        given = {
            "rollouts": list(rollouts),
            "responses": [rollout.text for rollout in rollouts],
            "prompts": [prompt] * len(rollouts),
            **_of_prompt(prompt),
        }
        return self._choose(given, prompt)

    def of_trl(
        self, rollouts: Sequence[Rollout], prompt: Prompt, *, is_chat: bool
    ) -> dict[str, Any]:
        """Return the arguments for a group as TRL gives them: each one a list with a value per rollout.

        `is_chat`: prompts and completions are lists of messages, because the data has messages.
        """
        asked: Any = prompt.messages[-1]["content"] if prompt.messages else ""
        said: list[Any] = [rollout.text for rollout in rollouts]
        if is_chat:
            asked = list(prompt.messages)
            said = [[{"role": "assistant", "content": text}] for text in said]
        given = {
            "prompts": [asked] * len(rollouts),
            "completions": said,
            "completion_ids": [rollout.response_ids.tolist() for rollout in rollouts],
            "trainer_state": None,
            "log_extra": _ignore,
            "log_metric": _ignore,
        }
        known = _fields_of(prompt)
        named = list(known) if self.takes_all else [n for n in self.optional if n in known]
        columns = {name: _field(prompt, name) for name in (*self.fields, *named)}
        repeated = {name: [value] * len(rollouts) for name, value in columns.items()}
        return {name: given[name] for name in self.own} | repeated

    def _choose(self, given: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
        return {name: given[name] for name in self.own} | {
            name: _field(prompt, name) for name in self.fields
        }


def read_signature(
    name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Signature:
    """Return the function's signature; raise a UserError if its parameters do not tell its shape."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            f"reward {name}: got {function!r}, whose parameters cannot be read, allowed: a function"
        ) from None
    shape = _shape_of(name, [parameter.name for parameter in parameters])
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise UserError(f"reward {name}: got positional-only parameters, allowed: named ones")
    own = [p for p in parameters if p.name in OWN_NAMES[shape]]
    others = [p for p in parameters if p.name not in OWN_NAMES[shape]]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in others)
    named = [p for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not takes_all:
        check_option_names(name, options, [p.name for p in named] + ["timeout_s"])
    fields = [p for p in named if p.default is p.empty and p.name not in options]
    reads = [_READ[p.name] for p in own if p.name in _READ and p.default is p.empty]
    return Signature(
        shape=shape,
        own=tuple(p.name for p in own),
        fields=tuple(p.name for p in fields),
        optional=tuple(p.name for p in named if p not in fields and p.name not in options),
        takes_all=takes_all and shape is Shape.TRL,
        reads=(*reads, *(p.name for p in fields)),
    )


def _shape_of(name: str, parameters: Sequence[str]) -> Shape:
    if "solution_str" in parameters:
        return Shape.VERL
    if "completions" in parameters:
        return Shape.TRL
    one = any(parameter in ("rollout", "response") for parameter in parameters)
    many = any(parameter in ("rollouts", "responses", "prompts") for parameter in parameters)
    if one and many:
        raise UserError(
            f"reward {name}: got parameters for one rollout and for a group, allowed: one kind"
        )
    if not one and not many:
        raise UserError(
            f"reward {name}: got a function of ({', '.join(parameters)}), allowed: a parameter "
            "named rollout or response (one response), rollouts or responses (a whole group), "
            "completions (as TRL calls it) or solution_str (as verl calls it)"
        )
    return Shape.ONE if one else Shape.GROUP


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt} | {name: getattr(prompt, name) for name in OF_PROMPT[1:]}


def _fields_of(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of the prompt's record, as the data names them; the prompt itself apart."""
    judged = {"gt_answer": prompt.gt_answer, "test_cases": prompt.test_cases}
    return {**{name: v for name, v in judged.items() if v is not None}, **prompt.extra}


def _field(prompt: Prompt, name: str) -> Any:
    try:
        return _fields_of(prompt)[name]
    except KeyError:
        raise RewardError(f"prompt {prompt.prompt_id} has no field {name!r}") from None


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for TRL's logging callbacks."""
