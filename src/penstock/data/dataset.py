"""Datasets: turns a JSONL file, a built-in task or a reasoning-gym generator into Prompts.

Every line is checked before training starts, and an error names the file and line. Prompts over the
limit are skipped and counted, or refused; none is cut. A dataset keeps the order of its source; the
sampler draws and shuffles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import EvalTaskConfig, TaskDataConfig
from penstock.data import builtin, reasoning_gym
from penstock.data.chat import ChatTemplate
from penstock.errors import UserError
from penstock.types import Prompt

PROMPT_FIELDS = ("messages", "prompt", "question")
ANSWER_FIELDS = ("gt_answer", "answer", "solution")
GSM8K_MARK = "####"
TOKENIZE_BATCH = 1024
REWARDS_THAT_NEED_AN_ANSWER = frozenset({"think_answer_tags", "boxed", "code"})


@dataclass(slots=True, frozen=True)
class Example:
    """One checked record of a source, before tokenisation."""

    line: int  # line number in the file, or index of a generated problem; counts from 1
    messages: tuple[dict[str, Any], ...]
    gt_answer: str | None
    test_cases: dict[str, Any] | None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Content:
    """The identity of a source's content."""

    sha256: str
    num_bytes: int


class ContentHash:
    """Takes the identity of content while it is read."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        self._hash.update(part)
        self._num_bytes += len(part)

    def content(self) -> Content:
        return Content(self._hash.hexdigest(), self._num_bytes)


def file_content(path: Path) -> Content:
    """Read a whole file and return the identity of its content."""
    parts = ContentHash()
    with path.open("rb") as file:
        while part := file.read(2**20):
            parts.add(part)
    return parts.content()


class BadRecord(ValueError):
    """One record is wrong; the caller adds its file and line."""


class Dataset:
    """Prompts by index. Holds only ids and plain data, so it can be sent to another process."""

    def __init__(
        self,
        name: str,
        source: str,
        examples: Sequence[Example],
        token_ids: Sequence[np.ndarray],
        content: Content,
        num_skipped_long: int = 0,
    ) -> None:
        assert len(examples) == len(token_ids)
        self.name = name
        self.source = source  # the `data` of the task
        self.content = content  # all lines, also those that were skipped
        self.num_skipped_long = num_skipped_long  # prompts over max_prompt_tokens
        self._examples = list(examples)
        self._token_ids = list(token_ids)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Prompt:
        example = self._examples[index]
        return Prompt(
            prompt_id=f"{self.name}:{example.line}@{_content_key(example, self._token_ids[index])}",
            messages=example.messages,
            token_ids=self._token_ids[index],
            gt_answer=example.gt_answer,
            test_cases=example.test_cases,
            extra=example.extra,
        )

    def messages(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """Yield the messages of every prompt."""
        return (example.messages for example in self._examples)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


def _content_key(example: Example, token_ids: np.ndarray) -> str:
    """Return eight hex digits that depend on all of a prompt but its place in the file."""
    fields = (example.messages, example.gt_answer, example.test_cases, example.extra)
    digest = hashlib.blake2b(token_ids.astype("<i4").tobytes(), digest_size=4)
    digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()


def load_dataset(
    name: str,
    task: TaskDataConfig,
    chat: ChatTemplate,
    seed: int = 0,
    *,
    needs_answer: bool | None = None,
) -> Dataset:
    """Read, check and tokenise the data of task `name`.

    `seed` generates problems unless data_options has a seed. `needs_answer=False` allows records
    without gt_answer and test_cases; None asks the task's rewards.
    """
    if needs_answer is None:
        needs_answer = task_needs_answer(task)
    with _naming_key(name, task):
        parts = ContentHash()
        examples = read_examples(
            task.data, task.data_options, seed, needs_answer=needs_answer, parts=parts
        )
        token_ids = _tokenize(examples, chat, task)
        fits = _check_lengths(task, examples, token_ids)
    kept = [index for index, fit in enumerate(fits) if fit]
    return Dataset(
        name,
        task.data,
        [examples[index] for index in kept],
        [token_ids[index] for index in kept],
        parts.content(),
        num_skipped_long=len(fits) - len(kept),
    )


@contextmanager
def _naming_key(name: str, task: TaskDataConfig) -> Iterator[None]:
    """Put the task's config key in front of any UserError about its data."""
    table = "eval.tasks" if isinstance(task, EvalTaskConfig) else "tasks"
    try:
        yield
    except UserError as error:
        raise UserError(f"{table}.{name}: {error}") from error


def _tokenize(
    examples: Sequence[Example], chat: ChatTemplate, task: TaskDataConfig
) -> list[np.ndarray]:
    token_ids: list[np.ndarray] = []
    for start in range(0, len(examples), TOKENIZE_BATCH):
        conversations = [example.messages for example in examples[start : start + TOKENIZE_BATCH]]
        token_ids += chat.encode_many(conversations, task.system_prompt, task.chat_template_kwargs)
    return token_ids


def _check_lengths(
    task: TaskDataConfig, examples: Sequence[Example], token_ids: Sequence[np.ndarray]
) -> list[bool]:
    """Return which prompts fit; raise a UserError if none does or if long prompts are refused."""
    fits = [len(ids) <= task.max_prompt_tokens for ids in token_ids]
    num_long = fits.count(False)
    if num_long and (task.long_prompts == "refuse" or num_long == len(fits)):
        first = fits.index(False)
        raise UserError(
            f"{_where(task.data, examples[first].line)}: got a prompt of {len(token_ids[first])} "
            f"tokens, allowed: max_prompt_tokens = {task.max_prompt_tokens} "
            f"({num_long} of {len(fits)} prompts are longer)"
        )
    return fits


def task_needs_answer(task: TaskDataConfig) -> bool:
    """Return whether a built-in reward of the task needs a known answer or test cases."""
    return any(reward.type in REWARDS_THAT_NEED_AN_ANSWER for reward in task.rewards)


def validate_source(name: str, task: TaskDataConfig, *, needs_answer: bool | None = None) -> None:
    """Raise a UserError for mistakes found without a tokenizer: missing file, bad line, unknown name."""
    if needs_answer is None:
        needs_answer = task_needs_answer(task)
    with _naming_key(name, task):
        if task.data.startswith(reasoning_gym.PREFIX):
            reasoning_gym.validate(task.data, task.data_options)
        else:
            read_examples(task.data, task.data_options, seed=0, needs_answer=needs_answer)


def read_examples(
    data: str,
    options: dict[str, Any],
    seed: int,
    *,
    needs_answer: bool = True,
    parts: ContentHash | None = None,
) -> list[Example]:
    """Return the checked records of a source; a UserError names the first mistake and counts the rest.

    What is read is added to `parts`.
    """
    parts = parts or ContentHash()
    if names_a_file(data):
        records = _read_jsonl(data, options, parts)
    else:
        records = _generated(data, options, seed, parts)
    examples: list[Example] = []
    mistakes: list[tuple[int, str]] = []
    for line, record in records:
        try:
            examples.append(_parse_record(line, record, needs_answer))
        except BadRecord as error:
            mistakes.append((line, str(error)))
    if mistakes:
        line, reason = mistakes[0]
        more = f" ({len(mistakes) - 1} more lines are wrong)" if len(mistakes) > 1 else ""
        raise UserError(f"{_where(data, line)}: {reason}{more}")
    if not examples:
        raise UserError(f"data: got {data!r} with no problem in it, allowed: at least one")
    return examples


def names_a_file(data: str) -> bool:
    """Return whether the `data` of a task names a file: no built-in task and no generator."""
    return not data.startswith(reasoning_gym.PREFIX) and not builtin.is_builtin(data)


def _generated(
    data: str, options: dict[str, Any], seed: int, parts: ContentHash
) -> Iterator[tuple[int, object]]:
    if data.startswith(reasoning_gym.PREFIX):
        records = reasoning_gym.load(data, options, seed)
    else:
        records = builtin.load(data, options)
    for number, record in enumerate(records, start=1):
        parts.add(json.dumps(record, sort_keys=True).encode())
        yield number, record


def _where(data: str, line: int) -> str:
    return f"data {data} line {line}"


def _read_jsonl(
    data: str, options: dict[str, Any], parts: ContentHash
) -> Iterator[tuple[int, object]]:
    """Yield (line number, parsed line or BadRecord) for each line of a file that is not blank."""
    path = Path(data).expanduser()
    if not path.is_file():
        names = ", ".join(builtin.TASKS)
        raise UserError(
            f"data: got {data!r}, allowed: a JSONL file that exists, a built-in task ({names}) "
            f"or {reasoning_gym.PREFIX}NAME"
        )
    if options:
        raise UserError(
            f"data_options: got {', '.join(options)} with the file {data}, allowed: none for a file"
        )
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            parts.add(raw)
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                yield number, BadRecord(f"not UTF-8 text: {error.reason} at byte {error.start}")
            except json.JSONDecodeError as error:
                yield number, BadRecord(f"not valid JSON: {error.msg} at column {error.colno}")


def _parse_record(line: int, record: object, needs_answer: bool) -> Example:
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"got {_kind(record)}, allowed: a JSON object")
    prompt_field = _first_present(record, PROMPT_FIELDS)
    if prompt_field is None:
        raise BadRecord(f"got no prompt, allowed: one of the fields {', '.join(PROMPT_FIELDS)}")
    answer_field = _first_present(record, ANSWER_FIELDS)
    answer, is_extracted = _parse_answer(answer_field, record)
    test_cases = _parse_test_cases(record.get("test_cases"))
    if needs_answer and answer is None and test_cases is None:
        raise BadRecord(
            f"got neither an answer nor test_cases, allowed: one of {', '.join(ANSWER_FIELDS)}, "
            "or test_cases"
        )
    used = {prompt_field, "test_cases"} | (set() if is_extracted else {answer_field})
    return Example(
        line=line,
        messages=_parse_messages(prompt_field, record[prompt_field]),
        gt_answer=answer,
        test_cases=test_cases,
        extra={key: value for key, value in record.items() if key not in used},
    )


def _first_present(record: dict[str, Any], fields: Sequence[str]) -> str | None:
    return next((name for name in fields if record.get(name) is not None), None)


def _parse_messages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and name != "messages":
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"{name}: got {_kind(value)}, allowed: one message or a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecord(
                f"{name}: got {_kind(message)}, allowed: an object with role and content"
            )
        if not isinstance(message.get("content"), str):
            raise BadRecord(
                f"{name}: content got {_kind(message.get('content'))}, allowed: a string"
            )
    if messages[-1]["role"] == "assistant":
        raise BadRecord(
            f"{name}: got an assistant message last, allowed: a last message of another role"
        )
    if not any(message["content"].strip() for message in messages):
        raise BadRecord(f"{name}: got no text, allowed: at least one message with content")
    return tuple(messages)


def _parse_answer(name: str | None, record: dict[str, Any]) -> tuple[str | None, bool]:
    """Return the answer, and whether it is part of a longer field, which then stays in `extra`."""
    if name is None:
        return None, False
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRecord(f"{name}: got {_kind(value)}, allowed: a string or a number")
    text = str(value)
    is_extracted = name == "answer" and GSM8K_MARK in text
    if is_extracted:
        text = text.rpartition(GSM8K_MARK)[2].strip().replace(",", "")
    if not text.strip():
        raise BadRecord(f"{name}: got an empty answer, allowed: some text")
    return text, is_extracted


def _parse_test_cases(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRecord(f"test_cases: got {_kind(value)}, allowed: an object")
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRecord("test_cases: got no lists, allowed: the lists inputs and outputs")
    if not inputs or len(inputs) != len(outputs):
        raise BadRecord(
            f"test_cases: got {len(inputs)} inputs and {len(outputs)} outputs, "
            "allowed: the same number of each, at least one"
        )
    return value


def _kind(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
