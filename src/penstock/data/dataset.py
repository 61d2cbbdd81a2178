"""Datasets: turns the records of a source into Prompts.

Every record is checked before training starts, and an error names its file and line. Prompts over the
limit are skipped and counted, or refused; none is cut. A dataset keeps the order of its source; the
sampler draws and shuffles. `source.py` reads the records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any

import numpy as np

from penstock.config import Config, EvalTaskConfig, RewardConfig, TaskConfig, TaskDataConfig
from penstock.config.demo import context_length
from penstock.data import demonstration, reasoning_gym
from penstock.data.chat import ChatTemplate
from penstock.data.source import BadRecord, Content, Records, chosen_fields
from penstock.errors import UserError
from penstock.types import Prompt

PROMPT_FIELDS = ("messages", "prompt", "question", "problem", "instruction", "conversations")
ANSWER_FIELDS = ("gt_answer", "answer", "solution", "ground_truth")
VERL_ANSWER = ("reward_model", "ground_truth")  # where verl's layout has the answer
GSM8K_MARK = "####"
TOKENIZE_BATCH = 1024  # most prompts of one call of the tokenizer
TOKENIZE_CHARACTERS = 2**22  # most text of one call
CHARACTERS_PER_TOKEN = 64  # a text with more than this for each allowed token is measured first
REWARDS_THAT_NEED_AN_ANSWER = frozenset({"think_answer_tags", "boxed", "code"})


@dataclass(slots=True, frozen=True)
class Example:
    """One checked record of a source, before tokenisation."""

    line: int  # number of the record in its source; counts from 1
    messages: tuple[dict[str, Any], ...]
    gt_answer: str | None
    test_cases: dict[str, Any] | None
    extra: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False  # the data has messages, not a text

    @property
    def num_characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)

    def prompt(self, prompt_id: str, token_ids: np.ndarray) -> Prompt:
        return Prompt(
            prompt_id=prompt_id,
            messages=self.messages,
            token_ids=token_ids,
            gt_answer=self.gt_answer,
            test_cases=self.test_cases,
            extra=self.extra,
        )


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
        longest: int = 0,
        longest_kept: int = 0,
    ) -> None:
        self.name = name
        self.source = source  # the `data` of the task
        self.content = content  # all lines, also those that were skipped
        self.num_skipped_long = num_skipped_long  # prompts over max_prompt_tokens
        self.is_chat = bool(examples) and examples[0].is_chat  # its prompts are lists of messages
        self.longest = longest  # tokens of the longest prompt, also of those that were skipped
        self.longest_kept = longest_kept  # tokens of the longest prompt that is drawn
        self._examples = list(examples)
        self._token_ids = list(token_ids)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Prompt:
        example, ids = self._examples[index], self._token_ids[index]
        return example.prompt(f"{self.name}:{example.line}@{_content_key(example, ids)}", ids)

    def messages(self) -> Iterator[tuple[dict[str, Any], ...]]:
        """Yield the messages of every prompt."""
        return (example.messages for example in self._examples)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


def _content_key(example: Example, token_ids: np.ndarray) -> str:
    """Eight hex digits that depend on all of a prompt but its place in the file."""
    others = {
        k: v
        for k, v in example.extra.items()
        if k not in ANSWER_FIELDS or str(v) != example.gt_answer
    }
    fields = (example.messages, example.gt_answer, example.test_cases, others)
    digest = hashlib.blake2b(token_ids.astype("<i4").tobytes(), digest_size=4)
    digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()


def load_dataset(
    name: str,
    task: TaskDataConfig,
    chat: ChatTemplate,
    seed: int = 0,
    *,
    readers: Mapping[str, str] | None = None,
) -> Dataset:
    """Read, check and tokenise the data of task `name`.

    `seed` generates problems unless data_options has a seed. `readers`: see `read_examples`.
    """
    with _naming_key(name, task):
        records = _records(task, seed)
        examples = list(read_examples(records, task, readers=readers))
        token_ids = _tokenize(examples, chat, task)
        measured = token_ids
        if template := teacher_template(task):  # with its hint no prompt is shorter
            hinted = [replace(e, messages=with_hint(e, template)) for e in examples]
            measured = _tokenize(hinted, chat, task)
        fits = [ids is not None and len(ids) <= task.max_prompt_tokens for ids in measured]
        num_long = fits.count(False)
        if num_long and num_long == len(fits):
            ids = measured[0]
            size = (
                f"{examples[0].num_characters} characters" if ids is None else f"{len(ids)} tokens"
            )
            raise UserError(
                f"{records.place(examples[0].line)}: got a prompt of {size}, "
                f"allowed: max_prompt_tokens = {task.max_prompt_tokens} "
                f"({num_long} of {len(fits)} prompts are longer)"
            )
    kept = [index for index, fit in enumerate(fits) if fit]
    return Dataset(
        name,
        task.data,
        [examples[index] for index in kept],
        [ids for index in kept if (ids := token_ids[index]) is not None],
        records.content(),
        num_skipped_long=len(fits) - len(kept),
        longest=max(len(ids) for ids in measured if ids is not None),
        longest_kept=max(len(ids) for index in kept if (ids := measured[index]) is not None),
    )


def teacher_template(task: TaskDataConfig) -> str:
    """What the policy reads when it is its own teacher; empty: it is not."""
    return task.teacher_template if isinstance(task, TaskConfig) else ""


# in a teacher_template: the prompt, the answer, the reward's note on the response, or a field of the data
HINT, FEEDBACK = re.compile(r"\{(\w+)\}"), "feedback"


def with_hint(
    asked: Example | Prompt, template: str, feedback: str = ""
) -> tuple[dict[str, Any], ...]:
    """The messages, with the template's text in the place of the last user message."""
    messages = list(asked.messages)
    place = max(n for n, message in enumerate(messages) if message["role"] == "user")
    values = {"prompt": messages[place]["content"], "answer": asked.gt_answer or ""}
    values = {**asked.extra, **values, FEEDBACK: feedback}
    text = HINT.sub(lambda name: str(values.get(name[1], name[0])), template)
    messages[place] = {**messages[place], "content": text}
    return tuple(messages)


def _records(task: TaskDataConfig, seed: int = 0) -> Records:
    split = "" if isinstance(task, EvalTaskConfig) else "train"
    return Records(task.data, task.data_options, seed, default_split=split)


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
) -> list[np.ndarray | None]:
    """The ids of every prompt; None for a text that is too long whatever its tokens are.

    The tokenizer needs some hundred bytes for each character, so such a text is not given to it.
    """
    token_ids: list[np.ndarray | None] = [None] * len(examples)
    limit = task.max_prompt_tokens * CHARACTERS_PER_TOKEN
    if any(example.num_characters > limit for example in examples):
        limit = task.max_prompt_tokens * max(chat.longest_token, CHARACTERS_PER_TOKEN)

    turns = (turn for example in examples for turn in example.extra.get(demonstration.TURNS, ()))
    if task.demonstrates and any(turn.get("tool_calls") for turn in turns):
        chat.check_variables(["tool_calls"])

    def arguments_of(index: int) -> Mapping[str, Any]:
        return demonstration.template_arguments(examples[index].extra, task.chat_template_kwargs)

    for batch in _batches(examples, limit):
        for arguments, indices in groupby(batch, arguments_of):
            alike = list(indices)
            conversations = [examples[index].messages for index in alike]
            encoded = chat.encode_many(conversations, task.system_prompt, arguments)
            for index, ids in zip(alike, encoded, strict=True):
                token_ids[index] = ids
    return token_ids


def _batches(examples: Sequence[Example], limit: int) -> Iterator[list[int]]:
    """Yield the indices of prompts that are tokenised together, without texts over the limit."""
    batch, characters = list[int](), 0
    for index, example in enumerate(examples):
        if example.num_characters > limit:
            continue
        full = (
            len(batch) == TOKENIZE_BATCH
            or characters + example.num_characters > TOKENIZE_CHARACTERS
        )
        if batch and full:
            yield batch
            batch, characters = [], 0
        batch.append(index)
        characters += example.num_characters
    yield batch


def check_context(config: Config, datasets: Mapping[str, Dataset], section: str = "") -> None:
    """Refuse a task whose longest prompt and longest response do not fit into the model together.

    section: `eval.` for the datasets of the evaluation tasks.
    """
    context = context_length(config.model.path)
    if context is None:
        return
    tasks = config.eval.tasks if section else config.tasks
    for name, dataset in datasets.items():
        prompt = dataset.longest_kept
        if tasks[name].demonstrates and prompt >= context:  # a longer demonstration is cut
            raise UserError(
                f"tasks.{name}: a prompt of {prompt} tokens, allowed: less than the model's context of {context}; "
                f"lower tasks.{name}.max_prompt_tokens"
            )
        if tasks[name].agent != "single_turn":
            continue  # an agent is held to the context at each call
        limit = (config.eval_sampling if section else config.task_sampling)(name).max_tokens
        if prompt + limit > context:
            raise UserError(
                f"{section}tasks.{name}: a prompt of {prompt} tokens and {section}sampling.max_tokens = {limit} are "
                f"{prompt + limit} tokens, allowed: the model's context of {context}; lower "
                f"{section}sampling.max_tokens or {section}tasks.{name}.max_prompt_tokens"
            )


def task_needs_answer(task: TaskDataConfig) -> bool:
    """Whether a built-in reward of the task needs a known answer or test cases.

    An agent gives its own reward, unless the task names rewards.
    """
    if gives_own_reward(task):
        return False
    return any(reward.type in REWARDS_THAT_NEED_AN_ANSWER for reward in task.rewards)


def gives_own_reward(task: TaskDataConfig) -> bool:
    """Whether the agent gives the reward: the task names none, or shows its answers."""
    return task.demonstrates or (task.agent != "single_turn" and task.rewards == [RewardConfig()])


def validate_source(
    name: str, task: TaskDataConfig, *, readers: Mapping[str, str] | None = None
) -> None:
    """Raise a UserError for mistakes found without a tokenizer: missing file, bad line, unknown name."""
    with _naming_key(name, task):
        if task.data.startswith(reasoning_gym.PREFIX):
            reasoning_gym.validate(task.data, task.data_options)
            return
        for _ in read_examples(_records(task), task, readers=readers):
            pass


def first_prompts(task: TaskDataConfig, count: int, seed: int = 0) -> tuple[list[Prompt], bool]:
    """The first prompts of a task, without tokens, and whether they are lists of messages."""
    examples = list(islice(read_examples(_records(task, seed), task), count))
    no_tokens = np.zeros(1, np.int32)
    prompts = [example.prompt(f"line {example.line}", no_tokens) for example in examples]
    return prompts, bool(examples) and examples[0].is_chat


def read_examples(
    records: Records, task: TaskDataConfig, *, readers: Mapping[str, str] | None = None
) -> Iterator[Example]:
    """Yield the checked records; at the end raise a UserError for the first mistake, counting the rest.

    `readers`: field -> the reward that reads it; a record without such a field is a mistake.
    """
    needs_answer, demonstrates = task_needs_answer(task), task.demonstrates
    template = teacher_template(task)
    mistakes: list[tuple[int, str]] = []
    count = 0
    for line, record in records:
        try:
            fields = _with_columns(record, task.columns)
            if demonstrates and isinstance(fields, dict):
                fields = demonstration.as_prompt(fields, task.columns)
            example = _parse_record(line, fields, task.columns, needs_answer)
            _check_readers(example, {} if demonstrates else readers or {})
            if template and not any(message["role"] == "user" for message in example.messages):
                raise BadRecord(
                    "got no user message, allowed: one, which teacher_template rewrites"
                )
        except BadRecord as error:
            mistakes.append((line, str(error)))
            continue
        count += 1
        yield example
    if mistakes:
        line, reason = mistakes[0]
        more = len(mistakes) - 1
        rest = f" ({more} more {'line is' if more == 1 else 'lines are'} wrong)" if more else ""
        raise UserError(f"{records.place(line)}: {reason}{rest}")
    if not count:
        raise UserError(f"data: got {records.data!r} with no problem in it, allowed: at least one")


def _with_columns(record: object, columns: Mapping[str, str]) -> object:
    """The record with the fields that `columns` names; a field that is renamed leaves its old name."""
    if not columns or not isinstance(record, dict):
        return record
    moved = {path for path in columns.values() if path in record}
    chosen = {name: _value_at(record, name, path) for name, path in columns.items()}
    return {key: value for key, value in record.items() if key not in moved} | chosen


def _value_at(record: dict[str, Any], name: str, path: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            raise BadRecord(
                f"columns.{name}: got {path!r}, allowed: a field of the record ({_names(record)}), "
                "or a path such as a.b"
            )
    return value


def _names(fields: Iterable[str]) -> str:
    return ", ".join(fields) or "nothing else"


def ground_truth(gt_answer: str | None, extra: Mapping[str, Any]) -> Any:
    """What verl's layout has as the answer, of any type; else the answer."""
    holder = extra.get(VERL_ANSWER[0])
    answer = holder.get(VERL_ANSWER[1]) if isinstance(holder, dict) else None
    return gt_answer if answer is None else answer


def _check_readers(example: Example, readers: Mapping[str, str]) -> None:
    answer = ground_truth(example.gt_answer, example.extra)
    known = {"gt_answer": answer, "test_cases": example.test_cases, **example.extra}
    for name, reader in readers.items():
        if known.get(name) is None:
            there = _names(key for key, value in known.items() if value is not None)
            raise BadRecord(
                f"got no {name!r}, which reward {reader} reads; the record has: {there}; "
                f"allowed: a record with it, or columns = {{ {name} = FIELD }}"
            )


def _parse_record(
    line: int, record: object, columns: Mapping[str, str], needs_answer: bool
) -> Example:
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"got {_kind(record)}, allowed: a JSON object")
    prompt_field = _first_present(record, chosen_fields(PROMPT_FIELDS, columns))
    if prompt_field is None:
        raise BadRecord(
            f"got no prompt; the record has: {_names(record)}; allowed: one of the fields "
            f"{', '.join(PROMPT_FIELDS)}, or columns = {{ prompt = FIELD }}"
        )
    record = _as_messages(record, prompt_field)
    answer = _parse_answer(record, columns)
    test_cases = _parse_test_cases(record.get("test_cases"))
    if needs_answer and answer is None and test_cases is None:
        raise BadRecord(
            f"got neither an answer nor test_cases; the record has: {_names(record)}; allowed: one of "
            f"{', '.join(ANSWER_FIELDS)}, test_cases, or columns = {{ gt_answer = FIELD }}"
        )
    used = (prompt_field, "gt_answer", "test_cases")
    return Example(
        line=line,
        messages=_parse_messages(prompt_field, record[prompt_field]),
        gt_answer=answer,
        test_cases=test_cases,
        extra={key: value for key, value in record.items() if key not in used},
        is_chat=not isinstance(record[prompt_field], str),
    )


def _as_messages(record: dict[str, Any], prompt_field: str) -> dict[str, Any]:
    """The record with an Alpaca instruction or a ShareGPT conversation as its prompt.

    An instruction continues with `input`. Its `output`, and the last answer of a conversation, is the right
    answer of a record without one.
    """
    value = record[prompt_field]
    known = _first_present(record, ANSWER_FIELDS) is not None
    if prompt_field == "instruction" and isinstance(value, str):
        text = f"{value}\n\n{record['input']}" if record.get("input") else value
        answer = {} if known else {"gt_answer": record.get("output")}
        return {**record, "instruction": text, **answer}
    if prompt_field != "conversations" or not isinstance(value, list):
        return record
    turns = demonstration.as_messages(value)
    if turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
        last = turns.pop().get("content")
        return {**record, "conversations": turns, **({} if known else {"gt_answer": last})}
    return {**record, "conversations": turns}


def _first_present(record: dict[str, Any], fields: Sequence[str]) -> str | None:
    return next((name for name in fields if record.get(name) is not None), None)


def _parse_messages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    if isinstance(value, str) and name != "messages":
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        text = "" if name == "messages" else "a string, "
        raise BadRecord(
            f"{name}: got {_kind(value)}, allowed: {text}one message or a list of messages"
        )
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


def _parse_answer(record: dict[str, Any], columns: Mapping[str, str]) -> str | None:
    """The answer of the first answer field, or of verl's layout; None if there is none."""
    name = _first_present(record, chosen_fields(ANSWER_FIELDS, columns))
    if name is None:
        value = ground_truth(None, record)
        return str(value) if isinstance(value, str | int | float) and str(value).strip() else None
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRecord(f"{name}: got {_kind(value)}, allowed: a string or a number")
    text = str(value)
    if GSM8K_MARK in text and (name == "answer" or columns.get(name) == "answer"):
        text = text.rpartition(GSM8K_MARK)[2].strip().replace(",", "")
    if not text.strip():
        raise BadRecord(f"{name}: got an empty answer, allowed: some text")
    return text


def _parse_test_cases(value: object) -> dict[str, Any] | None:
    if isinstance(value, str):  # some datasets keep them as JSON in a text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRecord("test_cases: got a text that is not JSON, allowed: an object") from None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRecord(f"test_cases: got {_kind(value)}, allowed: an object")
    if "asserts" in value or "check" in value:  # Python source, which the judge reads
        return value
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRecord(
            "test_cases: got no tests, allowed: the lists inputs and outputs, asserts, or check"
        )
    if not inputs or len(inputs) != len(outputs):
        raise BadRecord(
            f"test_cases: got {len(inputs)} inputs and {len(outputs)} outputs, "
            "allowed: the same number of each, at least one"
        )
    return value


def _kind(value: object) -> str:
    """The JSON type of a value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")


def count_overlap(
    training: Iterable[Sequence[Mapping[str, Any]]], problems: Iterable[Sequence[Mapping[str, Any]]]
) -> int:
    """How many evaluation problems are training prompts, too: equal texts, whatever their case and spaces.

    System messages are not compared, as every task may add its own. Problems that are worded in another
    way are not counted.
    """
    wanted = [_text_digest(messages) for messages in problems]
    known = set(wanted)
    trained = {mark for messages in training if (mark := _text_digest(messages)) in known}
    return sum(mark in trained for mark in wanted)


def count_duplicates(prompts: Iterable[Sequence[Mapping[str, Any]]]) -> int:
    """How many prompts have the text of an earlier one."""
    marks = [_text_digest(messages) for messages in prompts]
    return len(marks) - len(set(marks))


def _text_digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    parts = [
        f"{message.get('role')}\x1f{' '.join(str(message.get('content', '')).lower().split())}"
        for message in messages
        if message.get("role") != "system"
    ]
    return hashlib.blake2b("\x1e".join(parts).encode("utf-8", "replace"), digest_size=16).digest()
