"""Turns the `options` table of a reward into its checked settings.

Every mistake is one line that names the reward, the option, what was given and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.config import Section
from penstock.errors import UserError

S = TypeVar("S", bound=Section)


def read_options(reward: str, model: type[S], options: Mapping[str, Any]) -> S:
    """Return the settings of a reward; raise a UserError for the first mistake."""
    check_option_names(reward, options, model.model_fields)
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if first["type"] == "value_error":
            raise UserError(f"reward {reward}: {message}") from None
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"reward {reward}: option {name}: got {first['input']!r}, allowed: {message}"
        ) from None


def check_option_names(reward: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse an option that the reward does not have, naming the nearest that it has."""
    names = sorted(allowed)
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"reward {reward}: got the unknown option {option!r}, "
                f"allowed: {', '.join(names) or 'none'}{hint}"
            )
