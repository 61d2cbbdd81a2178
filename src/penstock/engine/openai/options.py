"""Settings of the openai engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.config import Config


@dataclass(slots=True, frozen=True, kw_only=True)
class OpenAIOptions:
    """[engine.options] of the openai engine."""

    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)
    model: str = ""  # name the server knows the model by; empty: the first it lists
    api_key_variable: str = ""  # environment variable that holds the key
    timeout_s: float = 600.0  # without a token, or without an answer
    retries: int = 3  # further tries of one request
    backoff_s: float = (
        0.5  # before the second try; doubles. Also of tries to take a lost server back
    )
    max_model_len: int = 0  # most tokens of a request; 0: as the server says
    reload_path: str = ""  # e.g. /update_weights_from_disk (SGLang); vLLM servers need none
    weights_folder: str = ""  # where new weights are written; servers must see it too

    @classmethod
    def from_config(cls, config: Config) -> Self:
        given = dict(config.engine.options)
        names = tuple(cls.__dataclass_fields__)
        unknown = sorted(given.keys() - set(names))
        if unknown:
            raise UserError(f"engine.options: got {unknown[0]!r}, allowed: {', '.join(names)}")
        if "urls" in given:
            given["urls"] = tuple(given["urls"])
        return cls(**given)
