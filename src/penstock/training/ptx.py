"""The texts of the auxiliary language-modelling loss (PTX): demonstrations, a part of the loss like any other.

They are read in order, and again from the first one; which texts an update learns follows from its number, so no place
in the file has to be kept. The loss covers all of a line with `text`, which begins with the tokenizer's
beginning-of-sequence token, if it adds one; and only the last message of a line with `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config, PtxConfig
from penstock.config.demo import context_length
from penstock.data.chat import ChatTemplate
from penstock.data.demonstration import answer_ids
from penstock.data.source import BadRecord, Records
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


def texts_of_update(texts: Sequence[Group], update: int, count: int, ranks: Ranks) -> list[Group]:
    """This rank's share of the `count` texts of an update; `update` counts those of the run from 0."""
    first = update * count
    return rank_share([texts[n % len(texts)] for n in range(first, first + count)], ranks)


def texts_of(config: Config) -> list[Group]:
    """The texts that a config asks for."""
    if not config.train.ptx.coefficient:
        return []
    template = ChatTemplate.from_config(config.model)
    return read_texts(config.train.ptx, template, context_length(config.model.path))


def read_texts(
    config: PtxConfig, template: ChatTemplate, context: int | None = None
) -> list[Group]:
    """Encode every record of the file, cut at max_tokens and at the model's context."""
    most = min(config.max_tokens, context or config.max_tokens)
    if not Path(config.data).is_file():
        raise UserError(f"train.ptx.data: got {config.data!r}, allowed: a JSONL file that exists")
    texts, records = [], Records(config.data, {})
    for number, record in records:
        try:
            ids, num_given = _encode(record, template)
        except BadRecord as error:
            raise UserError(f"train.ptx.data: {records.place(number)}: {error}") from None
        if min(len(ids), most) > num_given:
            texts.append(text_group(ids[:most], num_given))
    if not texts:
        raise UserError(
            f"train.ptx.data: got {config.data!r}, allowed: a file with a text of two tokens or more"
        )
    return texts


def _encode(record: object, template: ChatTemplate) -> tuple[np.ndarray, int]:
    """(the tokens of a record, how many of them are given)."""
    if isinstance(record, BadRecord):
        raise record
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    text, messages = fields.get("text"), fields.get("messages")
    if isinstance(text, str):
        start = template.begin
        learned = np.concatenate([template.encode_text(text), template.eos_ids[:1]])
    elif isinstance(messages, list) and _shows_answer(messages):
        start = template.encode(messages[:-1])
        learned = answer_ids(template, messages)
    else:
        raise BadRecord(
            f"got fields {sorted(fields)}, allowed: `text`, or `messages` with at least two entries, each with "
            "`role` and `content` as texts, the last of the assistant"
        )
    return np.concatenate([start, learned]), max(len(start), 1)


def _shows_answer(messages: list[Any]) -> bool:
    are_texts = all(
        isinstance(entry, dict) and all(isinstance(entry.get(n), str) for n in ("role", "content"))
        for entry in messages
    )
    return are_texts and len(messages) > 1 and messages[-1]["role"] == "assistant"
