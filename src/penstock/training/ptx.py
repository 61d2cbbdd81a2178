"""The text stream of the auxiliary language-modelling loss (PTX).

Reads a JSONL file in order and begins again at its end. The cursor counts texts since the start of
the run, so a resumed run continues with the next text. The loss covers all of a line with `text`, which
begins with the tokenizer's beginning-of-sequence token, if it adds one; and only the last message of a
line with `messages`. The texts of an update are demonstrations, a part of the loss like any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config, PtxConfig
from penstock.data.chat import ChatTemplate
from penstock.data.demonstration import answer_ids
from penstock.errors import UserError
from penstock.training.parallel.ranks import Ranks, rank_share
from penstock.types import Group, Prompt, Rollout, Score, VersionSegment


def text_group(token_ids: np.ndarray, num_given: int = 1) -> Group:
    """A text as a demonstration, whose first tokens are given and whose other tokens are learned."""
    ids = token_ids.astype(np.int32)
    learned = ids[num_given:]
    text = Rollout(
        rollout_id="text.0",
        prompt_ids=ids[:num_given],
        seed=0,
        response_ids=learned,
        logprobs=np.zeros(len(learned), np.float32),
        loss_mask=np.ones(len(learned), np.bool_),
        segments=(VersionSegment(0, len(learned)),),
        score=Score(1.0),
    )
    prompt = Prompt("text", (), text.prompt_ids)
    return Group(group_id="text", task="", cursor=0, prompt=prompt, rollouts=[text])


class TextStream:
    """Texts in file order, repeated without end."""

    def __init__(self, texts: Sequence[Group]) -> None:
        self._texts = texts
        self.cursor = 0  # texts taken since the start of the run

    @classmethod
    def from_config(cls, config: Config) -> TextStream | None:
        """The stream of `train.ptx`; None if its coefficient is 0."""
        if config.train.ptx.coefficient == 0:
            return None
        return cls(read_texts(config.train.ptx, ChatTemplate.from_config(config.model)))

    def peek(self, offset: int, count: int, ranks: Ranks) -> list[Group]:
        """This rank's share of the `count` texts that begin `offset` after the cursor."""
        first = self.cursor + offset
        numbers = [number % len(self._texts) for number in range(first, first + count)]
        return [self._texts[number] for number in rank_share(numbers, ranks)]


def read_texts(config: PtxConfig, template: ChatTemplate) -> list[Group]:
    """Encode every line of the file, cut at max_tokens."""
    path = Path(config.data)
    if not path.is_file():
        raise UserError(f"train.ptx.data: got {config.data!r}, allowed: a JSONL file that exists")
    texts = []
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                ids, num_given = _encode(line, template, f"{config.data}:{number}")
                if min(len(ids), config.max_tokens) > num_given:
                    texts.append(text_group(ids[: config.max_tokens], num_given))
    if not texts:
        raise UserError(
            f"train.ptx.data: got {config.data!r}, allowed: a file with a text of two tokens or more"
        )
    return texts


def _encode(line: str, template: ChatTemplate, where: str) -> tuple[np.ndarray, int]:
    """(the tokens of a line, how many of them are given)."""
    record = _read_line(line, where)
    messages = record.get("messages")
    if isinstance(record.get("text"), str):
        start = template.begin
        learned = template.encode_text(record["text"])
        end = template.eos_ids[:1]
    elif isinstance(messages, list) and len(messages) > 1 and all(map(_is_message, messages)):
        start = template.encode(messages[:-1])
        learned, end = answer_ids(template, messages), ()
    else:
        raise UserError(
            f"train.ptx.data: {where} got fields {sorted(record)}, allowed: `text`, or `messages` "
            "with at least two entries, each with `role` and `content`"
        )
    token_ids = np.concatenate([start, learned, np.array(end, dtype=np.int32)])
    return token_ids, max(len(start), 1)


def _read_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.encode("utf-8", "surrogateescape"))  # bytes that are no text too
    except ValueError as error:
        raise UserError(f"train.ptx.data: {where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(
            f"train.ptx.data: {where} got {type(record).__name__}, allowed: a JSON object"
        )
    return record


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and "role" in entry and "content" in entry
