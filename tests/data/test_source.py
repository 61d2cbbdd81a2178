"""Every format of data gives the same records, a broken one names its place, splits are never mixed."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EvalTaskConfig, TaskConfig, TaskDataConfig
from penstock.data import validate_source
from penstock.data.dataset import read_examples
from penstock.data.source import Records, file_content, find_files, hub_name, plain
from penstock.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1", "answer": "2", "level": "easy"},
    {"prompt": "12+34\nplease", "answer": "46", "level": "hard"},
]


def as_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def as_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def as_gzip(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def packed(path: Path) -> None:
        write(path)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return packed


def as_parquet(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).to_parquet(path)


def as_saved(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path)


def as_saved_splits(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    datasets.DatasetDict(train=train, test=test).save_to_disk(path)


FORMS: dict[str, Callable[[Path], None]] = {
    "rows.jsonl": as_jsonl,
    "rows.any": as_jsonl,
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)) and None,
    "lines.json": as_jsonl,
    "table.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})) and None,
    "rows.csv": as_csv,
    "rows.tsv": as_csv,
    "rows.jsonl.gz": as_gzip(as_jsonl),
    "rows.csv.gz": as_gzip(as_csv),
    "rows.parquet": as_parquet,
    "saved": as_saved,
    "saved-splits": as_saved_splits,
}


def read(data: str, task: type[TaskDataConfig] = TaskConfig, **options: Any) -> list[Any]:
    split = "train" if task is TaskConfig else ""
    return list(read_examples(Records(data, options, default_split=split), task(data=data)))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_examples(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMS[name](path)
    examples = read(str(path))
    assert [example.messages[0]["content"] for example in examples] == ["1+1", "12+34\nplease"]
    assert [example.gt_answer for example in examples] == ["2", "46"]
    assert examples[1].extra == {"answer": "46", "level": "hard"}
    records = Records(str(path), {}, default_split="train")
    assert len(list(records)) == 2
    assert records.content() == file_content(*find_files(str(path), {}, "train"))


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_is_replaced_while_it_is_read_keeps_the_identity_of_what_was_read(
    tmp_path: Path, name: str
) -> None:
    FORMS[name](tmp_path / name)
    files = find_files(str(tmp_path / name), {}, "train")
    before = file_content(*files)
    records = Records(str(tmp_path / name), {}, default_split="train")
    for read, _ in enumerate(records):
        if read == 0:
            (tmp_path / "new").write_bytes(b"other content")
            (tmp_path / "new").replace(files[0])
    assert records.content() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a", "answer": "b"}\n{"prompt"\n', r"line 2: not valid JSON"),
        ("a.json", b'[{"prompt": "a"},\n {]', r"a.json line 2: not valid JSON: .* at column 3"),
        ("a.json", b'[{"prompt": "a", "answer": "b"}, 5]', r"record 2: got a number"),
        ("a.jsonl", b"[" * 100_000, r"line 1: not valid JSON: nested too deeply"),
        ("a.json", b"[" * 100_000, r"a.json: not valid JSON: nested too deeply"),
        (
            "a.jsonl",
            b'{"prompt": "\\ud800", "answer": "1"}',
            r"line 1: not valid JSON: .*surrogates",
        ),
        ("a.json", b'[{"prompt": "\\uDFFF", "answer": "1"}]', r"not valid JSON: .*surrogates"),
        (
            "a.jsonl",
            b'{"answer": ' + b"9" * 6000 + b"}",
            r"line 1: not valid JSON: Exceeds the limit",
        ),
        (
            "a.jsonl",
            b'{"prompt": "a", "test_cases": "' + b"[" * 100_000 + b'"}',
            r"line 1: test_cases: got a text that is not JSON",
        ),
        ("a.csv", b'prompt,answer\n"a\nb",c\nd\n', r"a.csv line 4: got 1 cells, allowed: 2"),
        ("a.csv", b"prompt,prompt\n", r"line 1: got the columns prompt, prompt"),
        ("a.csv", b"prompt,answer\na,\n", r"line 2: got neither an answer"),
        ("a.csv", b"prompt,answer\n\xff,b\n", r"a.csv: not UTF-8 text"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz: not a whole gzip file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}\n" * 999, mtime=0)[:-9],
            r"a.jsonl.gz: not a whole gzip file",
        ),
        ("a.parquet", b"no parquet", r"a.parquet: not a Parquet file"),
        ("a.arrow", b"no arrow stream", r"a.arrow: not an Arrow stream"),
    ],
)
def test_a_broken_file_is_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        validate_source("train", TaskConfig(data=str(path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dataset_dict.json", "{nope"),
        ("dataset_dict.json", "{}"),
        ("state.json", "[]"),
        ("state.json", '{"step": 3}'),
    ],
)
def test_a_folder_that_save_to_disk_did_not_write_whole_is_named(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: got no list"):
        find_files(str(tmp_path), {})


def test_a_missing_part_and_a_damaged_page_are_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(UserError, match=r"gone\.arrow: No such file or directory"):
        list(Records(str(tmp_path), {}))
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": [str(n) * 20 for n in range(3000)]}), file)
    content = bytearray(file.read_bytes())
    content[200:5000] = bytes(byte ^ 0x5A for byte in content[200:5000])
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.parquet: .*[Cc]orrupt"):
        list(Records(str(file), {}))


def test_the_home_of_a_user_who_is_not_there_is_no_file() -> None:
    with pytest.raises(UserError, match=r"data: got '~nobody-here/rows\.jsonl', allowed"):
        find_files("~nobody-here/rows.jsonl", {})


def test_a_number_that_is_none_is_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1", "answer": NaN}\n')
    with pytest.raises(UserError, match="line 1: got neither an answer nor test_cases"):
        validate_source("a", TaskConfig(data=str(file)))


def test_a_glob_and_a_folder_read_all_files_in_order(tmp_path: Path) -> None:
    as_jsonl(tmp_path / "b.jsonl", ROWS[1:])
    as_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "notes.txt").write_text("no data")
    for data in (str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "**" / "?.jsonl")):
        assert [example.gt_answer for example in read(data)] == ["2", "46"]
        assert [example.line for example in read(data)] == [1, 2]
    (tmp_path / "c.jsonl").write_text("\n{\n")
    with pytest.raises(UserError, match=r"c.jsonl line 2: not valid JSON"):
        read(str(tmp_path))


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    """The index of a data frame, and the empty columns of a spreadsheet."""
    path = tmp_path / "frame.csv"
    path.write_text(",prompt,answer,,\n0,1+1,2,,\n1,1+2,3,,\n")
    assert [(example.gt_answer, example.extra) for example in read(str(path))] == [
        ("2", {"answer": "2"}),
        ("3", {"answer": "3"}),
    ]


@pytest.mark.parametrize("names", [("math_train", "math_test"), ("my-train-set", "eval")])
def test_a_split_is_any_word_of_a_files_name(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, rows in zip(names, (ROWS, ROWS[:1]), strict=True):
        as_jsonl(tmp_path / f"{name}.jsonl", rows)
    assert len(read(str(tmp_path))) == len(ROWS)


def test_a_word_that_holds_the_name_of_a_split_is_none(tmp_path: Path) -> None:
    for name in ("contest", "latest", "trainer", "train"):
        as_jsonl(tmp_path / f"{name}.jsonl", ROWS[:1])
    assert len(read(str(tmp_path))) == 4


def test_a_folder_with_splits_is_never_mixed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    as_jsonl(tmp_path / "data" / "train-00000-of-00001.jsonl")
    as_jsonl(tmp_path / "data" / "test-00000-of-00001.jsonl", ROWS[:1])
    assert len(read(str(tmp_path))) == 2  # a training task takes the split train
    assert len(read(str(tmp_path), EvalTaskConfig, split="test")) == 1
    with pytest.raises(UserError, match=r"got no split, allowed: split = one of test, train"):
        read(str(tmp_path), EvalTaskConfig)
    with pytest.raises(UserError, match=r"got split = 'dev', allowed: split = one of test, train"):
        read(str(tmp_path), split="dev")


def test_a_hub_name_is_loaded_by_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = list[Any]()

    def load_dataset(name: str, config: str | None, revision: str | None) -> dict[str, Any]:
        asked.append((name, config, revision))
        if config is None:
            raise ValueError("Config name is missing.\nPick one of main, socratic")
        return {"train": ROWS, "test": ROWS[:1]}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.chdir(tmp_path)
    assert len(read("openai/gsm8k", config="main", revision="abc")) == 2
    assert len(read("hub:openai/gsm8k", EvalTaskConfig, config="main", split="test")) == 1
    assert asked == [("openai/gsm8k", "main", "abc"), ("openai/gsm8k", "main", None)]
    with pytest.raises(
        UserError, match=r"'openai/gsm8k' cannot be loaded: Config name is missing.$"
    ):
        read("openai/gsm8k")
    with pytest.raises(UserError, match=r"got 'size', allowed: config, split, revision"):
        read("openai/gsm8k", size=3)


def test_a_path_is_no_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert hub_name("openai/gsm8k") == hub_name("hub:openai/gsm8k") == "openai/gsm8k"
    for data in ("data/train", "gone/train.jsonl", "train.jsonl", "/a/b", "~/a", "./a/b"):
        assert hub_name(data) is None
        with pytest.raises(UserError, match="allowed: a file, folder or glob that exists"):
            read(data)


def test_values_that_json_lacks_become_plain() -> None:
    import datetime
    from decimal import Decimal

    import numpy as np

    row = {
        "day": datetime.date(2026, 1, 2),
        "image": {"bytes": b"abc"},
        "sum": Decimal("1.5"),
        "none": float("nan"),
        "array": np.arange(3),
    }
    expected = {"day": "2026-01-02", "image": {"bytes": "<3 bytes>"}, "sum": "1.5"}
    assert plain(row) == {**expected, "none": None, "array": [0, 1, 2]}
