"""Which tokens end a response: one answer for engines, trainer, evaluation, agents and `generate`.

A checkpoint names its end in up to four places, which disagree where a chat template was put on a base
model or `model.tokenizer` is another model's. A response ends at any of them. Does not load tokenizers
and renders no templates: `chat.py` does.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_GENERATION, _CONFIG = "generation_config.json", "config.json"


@dataclass(slots=True, frozen=True)
class EndTokens:
    """The ids that end a response, by the source that names them; the tokenizer's own comes first."""

    sources: dict[str, tuple[int, ...]]

    @classmethod
    def find(cls, tokenizer: Any, model: str, end_of_turn: str = "") -> Self:
        """Read the sources of a tokenizer and a model, which is a folder, a hub name or empty.

        `end_of_turn` is what the chat template writes after an answer. Its first token counts if the
        tokenizer marks it as special, unless only special tokens stand between it and an end that
        another source names. So does the id of config.json, which is often a default that nobody meant;
        transformers itself reads it only if the generation config names none.
        """
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        turn = tokenizer(end_of_turn, add_special_tokens=False)["input_ids"] if end_of_turn else []
        generation, config = (_ids_of_file(model, name) for name in (_GENERATION, _CONFIG))
        if generation:
            config = [id_ for id_ in config if id_ in special]
        own = _ids(tokenizer.eos_token_id)
        marks = list(itertools.takewhile(special.__contains__, turn))
        ends_later = not {*own, *generation, *config}.isdisjoint(marks)
        sources = {
            "tokenizer": own,
            "chat template": [] if ends_later else marks[:1],
            _GENERATION: generation,
            _CONFIG: config,
        }
        return cls({name: tuple(ids) for name, ids in sources.items() if ids})

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(id_ for ids in self.sources.values() for id_ in ids))

    def difference(self, tokenizer: Any) -> list[str]:
        """A line for the user if another source names an end that the model's own files lack."""
        own = self.sources.get(_GENERATION) or self.sources.get(_CONFIG)
        if not own or set(own) == set(self.ids):
            return []
        named = "; ".join(
            f"{source}: {', '.join(f'{id_} {tokenizer.convert_ids_to_tokens(id_)!r}' for id_ in ids)}"
            for source, ids in self.sources.items()
        )
        return [f"note: end tokens differ, and a response ends at any of them ({named})"]


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(id_) for id_ in value] if isinstance(value, list | tuple) else [int(value)]


def _ids_of_file(model: str, name: str) -> list[int]:
    """The end ids in a file of a model; none if the model has no such file."""
    if not model:
        return []
    from transformers.utils import cached_file

    try:
        file = cached_file(model, name)
    except (OSError, ValueError):  # no such file, or `model` is neither a folder nor a hub name
        return []
    settings = json.loads(Path(file).read_text("utf-8")) if file else {}
    return _ids(settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id")))
