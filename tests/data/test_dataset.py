"""Datasets: every accepted line, every refused one with its number, and no prompt ever cut."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import EvalTaskConfig, RewardConfig, TaskConfig
from penstock.config.source import validate
from penstock.data import Dataset, load_dataset, validate_source
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.dataset import (
    Example,
    check_context,
    count_duplicates,
    count_overlap,
    read_examples,
)
from penstock.data.source import Records
from penstock.errors import UserError
from penstock.run import preflight

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
USER = {"role": "user", "content": "1+1"}


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(load_tokenizer("demo"))


def write(folder: Path, *lines: object) -> str:
    """A file of JSON lines; a string is written as it is."""
    path = folder / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def read_one(folder: Path, line: object, **options: Any) -> Any:
    return read(write(folder, line), **options)[0]


def read(data: str, **options: Any) -> list[Example]:
    task = TaskConfig(data=data, columns=options.pop("columns", {}))
    return list(read_examples(Records(data, {}), task, **options))


@pytest.mark.parametrize(
    ("line", "answer", "extra"),
    [
        ({"messages": USER, "gt_answer": "2"}, "2", {}),
        ({"messages": [USER], "gt_answer": 2}, "2", {}),
        ({"messages": [USER], "gt_answer": "2", "level": 5}, "2", {"level": 5}),
        ({"prompt": "1+1", "answer": "2"}, "2", {"answer": "2"}),
        ({"prompt": [USER], "solution": "2"}, "2", {"solution": "2"}),
        ({"problem": "1+1", "ground_truth": "2"}, "2", {"ground_truth": "2"}),
        (
            {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": 2}},
            "2",
            {"reward_model": {"style": "rule", "ground_truth": 2}},
        ),
        ({"prompt": "1+1", "gt_answer": "2", "answer": "two"}, "2", {"answer": "two"}),
        ({"prompt": "1+1", "gt_answer": None, "solution": "2"}, "2", {"solution": "2"}),
        (
            {"question": "1+1", "answer": "It is\n#### 1,002"},
            "1002",
            {"answer": "It is\n#### 1,002"},
        ),
        ({"question": "1+1", "answer": 2.5}, "2.5", {"answer": 2.5}),
    ],
)
def test_accepted_lines(
    tmp_path: Path, line: dict[str, Any], answer: str, extra: dict[str, Any]
) -> None:
    example = read_one(tmp_path, line)
    assert example.messages == (USER,)
    assert example.gt_answer == answer
    assert example.test_cases is None
    assert example.extra == extra


def test_test_cases_stand_in_for_an_answer(tmp_path: Path) -> None:
    cases = {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": "f"}
    example = read_one(tmp_path, {"messages": USER, "test_cases": cases})
    assert example.gt_answer is None
    assert example.test_cases == cases


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON: .* at column 2"),
        ("[1, 2]", "got a list, allowed: a JSON object"),
        (
            {"text": "hi", "gt_answer": "2"},
            "got no prompt; the record has: text, gt_answer; allowed: .*messages, prompt, question.* columns = { prompt = FIELD }",
        ),
        ({"messages": "hi", "gt_answer": "2"}, "messages: got a string"),
        ({"messages": [], "gt_answer": "2"}, "messages: got a list"),
        ({"messages": [5], "gt_answer": "2"}, "got a number, allowed: an object with role"),
        ({"messages": {"content": "hi"}, "gt_answer": "2"}, "allowed: an object with role"),
        ({"messages": {"role": "user"}, "gt_answer": "2"}, "content got null, allowed: a string"),
        ({"prompt": "  ", "gt_answer": "2"}, "prompt: got no text"),
        (
            {"messages": [USER, {"role": "assistant", "content": "2"}], "gt_answer": "2"},
            "got an assistant message last",
        ),
        (
            {"messages": USER, "completion": "2"},
            "got neither an answer nor test_cases; the record has: messages, completion; allowed: one of "
            "gt_answer, answer, solution, ground_truth, test_cases, or columns = { gt_answer = FIELD }",
        ),
        ({"question": 5, "answer": "2"}, "question: got a number, allowed: a string, one message"),
        ({"messages": USER, "gt_answer": ["2"]}, "gt_answer: got a list, allowed: a string or"),
        ({"messages": USER, "gt_answer": True}, "gt_answer: got a boolean"),
        ({"messages": USER, "gt_answer": " "}, "gt_answer: got an empty answer"),
        ({"question": "1+1", "answer": "thinking ####"}, "answer: got an empty answer"),
        ({"messages": USER, "test_cases": [1]}, "test_cases: got a list, allowed: an object"),
        ({"messages": USER, "test_cases": {"inputs": []}}, "allowed: the lists inputs and outputs"),
        (
            {"messages": USER, "test_cases": {"inputs": [1, 2], "outputs": [1]}},
            "got 2 inputs and 1 outputs",
        ),
    ],
)
def test_refused_lines_name_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    data = write(tmp_path, {"messages": USER, "gt_answer": "2"}, "", line)
    with pytest.raises(UserError, match=f"data.jsonl line 3: .*{message}") as caught:
        validate_source("train", TaskConfig(data=data))
    assert str(caught.value).startswith("tasks.train: ")
    assert "\n" not in str(caught.value)


def test_the_first_mistake_is_told_and_the_others_counted(tmp_path: Path) -> None:
    data = write(tmp_path, {"messages": USER, "gt_answer": "2"}, "{", "[]", '{"a": 1}')
    with pytest.raises(UserError, match=r"line 2: not valid JSON.*\(2 more lines are wrong\)"):
        validate_source("train", TaskConfig(data=data))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "1+1", "answer": "2"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"line 2: not UTF-8 text"):
        validate_source("train", TaskConfig(data=str(path)))


def test_a_byte_order_mark_and_unicode_line_breaks_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "a\u2028b", "answer": "ü"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n{line}\n".encode())
    examples = read(str(path))
    assert [example.line for example in examples] == [1, 2]
    assert examples[0].messages[0]["content"] == "a\u2028b"


@pytest.mark.parametrize(
    ("lines", "message"), [([], "with no problem in it"), (["", "  "], "with no problem in it")]
)
def test_an_empty_dataset_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate_source("train", TaskConfig(data=write(tmp_path, *lines)))


def test_a_missing_file_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"eval.tasks.math: data: got 'nope.jsonl', allowed: .*addition"
    ):
        validate_source("math", EvalTaskConfig(data="nope.jsonl"))
    with pytest.raises(UserError, match=r"got the folder .* without data"):
        validate_source("train", TaskConfig(data=str(tmp_path)))


def test_options_have_no_meaning_for_a_file(tmp_path: Path) -> None:
    data = write(tmp_path, {"prompt": "1+1", "answer": "2"})
    with pytest.raises(UserError, match="got size with the file"):
        validate_source("train", TaskConfig(data=data, data_options={"size": 3}))


def test_an_answer_is_needed_only_where_a_reward_compares(
    tmp_path: Path, chat: ChatTemplate
) -> None:
    data = write(tmp_path, {"prompt": "1+1"})
    own_reward = TaskConfig(data=data, rewards=[RewardConfig(type="mine:brevity")])
    validate_source("train", own_reward)
    assert load_dataset("train", own_reward, chat)[0].gt_answer is None
    compared = TaskConfig(data=data)
    with pytest.raises(UserError, match="neither an answer nor test_cases"):
        load_dataset("train", compared, chat)


def test_long_prompts_are_skipped_and_counted_never_cut(tmp_path: Path, chat: ChatTemplate) -> None:
    lines = [{"prompt": "1" * length, "answer": "2"} for length in (3, 30, 4, 31)]
    task = TaskConfig(data=write(tmp_path, *lines), max_prompt_tokens=10)
    dataset = load_dataset("train", task, chat)
    assert dataset.num_skipped_long == 2
    assert [prompt.prompt_id.partition("@")[0] for prompt in dataset] == ["train:1", "train:3"]
    assert [len(prompt.token_ids) for prompt in dataset] == [5, 6]
    assert chat.decode(dataset[1].token_ids) == "<user>1111<assistant>"


def test_nothing_left_after_skipping_is_refused(tmp_path: Path, chat: ChatTemplate) -> None:
    task = TaskConfig(data=write(tmp_path, {"prompt": "1+1", "answer": "2"}), max_prompt_tokens=2)
    with pytest.raises(UserError, match=r"\(1 of 1 prompts are longer\)"):
        load_dataset("train", task, chat)


def test_system_prompt_is_part_of_the_ids(tmp_path: Path, chat: ChatTemplate) -> None:
    task = TaskConfig(data=write(tmp_path, {"prompt": "1+1", "answer": "2"}), system_prompt="Add.")
    prompt = load_dataset("train", task, chat)[0]
    assert chat.decode(prompt.token_ids) == "<system>Add.<user>1+1<assistant>"
    assert prompt.messages == (USER,)


def test_the_built_in_task_and_its_heldout_part(chat: ChatTemplate) -> None:
    train = load_dataset("train", TaskConfig(), chat)
    heldout = load_dataset("heldout", EvalTaskConfig(), chat)
    assert train.source == "addition"
    assert len({len(prompt.token_ids) for prompt in train}) == 1
    seen = {prompt.token_ids.tobytes() for prompt in train}
    assert len(seen) == len(train)
    assert not any(prompt.token_ids.tobytes() in seen for prompt in heldout)


def test_a_dataset_can_be_sent_to_another_process(chat: ChatTemplate) -> None:
    dataset = load_dataset("train", TaskConfig(data_options={"size": 3}), chat)
    copy: Dataset = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 3
    assert copy[2].gt_answer == dataset[2].gt_answer
    assert copy[-1].token_ids.tolist() == dataset[2].token_ids.tolist()
    with pytest.raises(IndexError):
        copy[3]


def test_columns_name_the_prompt_the_answer_and_any_other_field(tmp_path: Path) -> None:
    line = {
        "messages": [USER, {"role": "assistant", "content": "2"}],
        "problem": "1+1",
        "meta": {"level": ["easy", 5], "answer": 2},
    }
    columns = {"prompt": "problem", "gt_answer": "meta.answer", "level": "meta.level.1"}
    example = read_one(tmp_path, line, columns=columns)
    assert (example.messages, example.gt_answer) == ((USER,), "2")
    assert example.extra == {"messages": line["messages"], "meta": line["meta"], "level": 5}
    with pytest.raises(
        UserError, match=r"line 1: columns.prompt: got 'task.text', allowed: .*\(mess"
    ):
        read_one(tmp_path, line, columns={"prompt": "task.text"})


def test_a_prompt_that_is_left_out_needs_no_room_in_the_context(
    tmp_path: Path, chat: ChatTemplate
) -> None:
    lines = [{"prompt": "1" * length, "answer": "2"} for length in (3, 3000)]
    config = validate(
        {
            "tasks": {"train": {"data": write(tmp_path, *lines)}},
            "sampling": {"max_tokens": 250},  # the demo policy has a context of 256
            "train": {"steps": 1},
        }
    )
    dataset = load_dataset("train", config.tasks["train"], chat)
    assert (dataset.longest, dataset.longest_kept) == (3002, 5)
    check_context(config, {"train": dataset})
    narrow = validate({**config.model_dump(), "sampling": {"max_tokens": 252}})
    with pytest.raises(
        UserError, match=r"a prompt of 5 tokens and sampling.max_tokens = 252 are 257"
    ):
        check_context(narrow, {"train": dataset})
    judged = {**config.model_dump(), "eval": {"tasks": {"heldout": {"data": "none"}}}}
    check_context(validate(judged), {"heldout": dataset}, "eval.")
    judged["eval"]["sampling"] = {"max_tokens": 252}
    with pytest.raises(
        UserError, match=r"eval.tasks.heldout: .* eval.sampling.max_tokens = 252 are 257"
    ):
        check_context(validate(judged), {"heldout": dataset}, "eval.")


def test_a_text_of_20_mb_is_left_out_without_being_tokenised(
    tmp_path: Path, chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "1" * 20_000_000, "answer": "2"}, {"prompt": "1+1", "answer": "2"}]
    data, longest = write(tmp_path, *lines), list[int]()
    encode = chat.encode_many

    def watched(conversations: list[Any], *more: Any) -> list[Any]:
        longest.extend(len(message["content"]) for one in conversations for message in one)
        return encode(conversations, *more)

    monkeypatch.setattr(chat, "encode_many", watched)
    assert load_dataset("train", TaskConfig(data=data), chat).num_skipped_long == 1
    assert longest == [3]
    alone = write(tmp_path, lines[0])
    with pytest.raises(UserError, match=r"line 1: got a prompt of 20000000 characters, allowed"):
        load_dataset("train", TaskConfig(data=alone), chat)


def test_the_check_before_a_run_looks_at_training_and_evaluation(tmp_path: Path) -> None:
    train = {"steps": 1}
    preflight.check(validate({"train": train}))
    gone = {"math": {"data": str(tmp_path / "gone.jsonl")}}
    config = validate({"train": train, "eval": {"tasks": gone}})
    with pytest.raises(UserError, match=r"eval.tasks.math: .*gone.jsonl"):
        preflight.check(config)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "prompt", "question", "role", "content", "answer"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(record=json_values)
def test_any_json_line_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, record: object
) -> None:
    data = write(tmp_path_factory.mktemp("any"), json.dumps(record))
    taken, refusal = _read_or_refusal(data)
    assert refusal.startswith(f"data {data} line 1: ") != bool(taken)
    assert "\n" not in refusal
    for example in taken:
        assert example.gt_answer
        assert all(isinstance(message["content"], str) for message in example.messages)


def _read_or_refusal(data: str) -> tuple[list[Example], str]:
    try:
        return read(data), ""
    except UserError as error:
        return [], str(error)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the data beside the repository is not there")
def test_gsm8k_loads_whole(chat: ChatTemplate) -> None:
    dataset = load_dataset("train", TaskConfig(data=str(GSM8K / "train.jsonl")), chat)
    assert len(dataset) == 7473
    assert dataset[0].gt_answer == "72"
    assert dataset.num_skipped_long == 0


def test_a_prompt_id_changes_with_its_content_and_not_with_its_place(
    tmp_path: Path, chat: ChatTemplate
) -> None:
    def ids(*lines: dict, system_prompt: str = "") -> list[tuple[str, str]]:
        task = TaskConfig(data=write(tmp_path, *lines), system_prompt=system_prompt)
        pairs = [p.prompt_id.split("@") for p in load_dataset("train", task, chat)]
        return [(place, key) for place, key in pairs]

    one, two = {"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}
    (first, second), (moved, inserted) = ids(one, two), ids(two, one)
    assert [first[0], second[0]] == ["train:1", "train:2"] == [moved[0], inserted[0]]
    assert (first[1], second[1]) == (inserted[1], moved[1])
    others = [ids({**one, "answer": "3"}), ids({**one, "level": 1}), ids(one, system_prompt="Add.")]
    assert len({first[1], *(key for ((_, key),) in others)}) == 4


def asked(text: str, system: str = "") -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def test_problems_that_are_training_prompts_are_counted_whatever_their_case_spaces_and_system_prompt() -> (
    None
):
    training = [asked("What is 6 times 7?"), asked("Name a prime.", "Be brief."), asked("a b")]
    problems = [asked("what  is 6 times 7? ", "Think."), asked("Name a prime."), asked("ab")]
    assert count_overlap(training, problems) == 2
    assert (
        count_overlap(training, [*problems, problems[0]]) == 3
    )  # a problem asked twice counts twice
    assert count_overlap([], problems) == count_overlap(training, []) == 0


def test_overlap_depends_on_who_says_it() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    swapped = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert count_overlap([turns], [swapped]) == 0


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"instruction": "Add", "input": "1+1", "output": "2"}, "Add\n\n1+1", "2"),
        ({"instruction": "Add 1+1", "input": "", "output": "2"}, "Add 1+1", "2"),
        (
            {"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]},
            "1+1",
            "2",
        ),
    ],
)
def test_records_of_alpaca_and_sharegpt_are_read(
    tmp_path: Path, record: dict, prompt: str, answer: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    (example,) = read_examples(Records(str(tmp_path / "a.jsonl"), {}, 0), TaskConfig())
    assert [m["content"] for m in example.messages if m["role"] == "user"] == [prompt]
    assert example.gt_answer == answer


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_of_a_spreadsheet_is_read(tmp_path: Path, mark: str) -> None:
    (tmp_path / "a.csv").write_text(f'prompt{mark}gt_answer\n"1{mark}1"{mark}2\n')
    (example,) = read_examples(Records(str(tmp_path / "a.csv"), {}, 0), TaskConfig())
    assert (example.messages[0]["content"], example.gt_answer) == (f"1{mark}1", "2")


def test_repeated_prompts_are_counted() -> None:
    prompts = [({"role": "user", "content": text},) for text in ("a", "b", "A ", "a")]
    assert count_duplicates(prompts) == 2
