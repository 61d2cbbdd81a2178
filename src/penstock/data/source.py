"""Where a task's records come from: files of several formats, folders, globs, hub datasets, generators.

`Records` yields plain records with a number that is unique in the source, names the place of a record
for messages, and takes the identity of all content while it is read; `write_rows` makes a file of what a
program gives. Judges no record (`dataset.py`).
pyarrow and datasets are imported when a source needs them.
"""

from __future__ import annotations

import bisect
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from penstock.data import builtin, reasoning_gym
from penstock.errors import UserError

HUB = "hub:"
ALLOWED = (
    "a file, folder or glob that exists, a hub name owner/name, "
    f"a built-in task ({', '.join(builtin.TASKS)}) or {reasoning_gym.PREFIX}NAME"
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_OPTIONS = ("config", "split", "revision")
_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval|heldout)(?![a-z])")
_ROWS_AT_ONCE = 256
_INSTALL = "install it with: pip install 'penstock[datasets]'"

Row = tuple[int, object]  # the number of a record in its file, and the record or a BadRecord


class BadRecord(ValueError):
    """One record is wrong; the caller adds its place."""


def chosen_fields(fields: Sequence[str], columns: Mapping[str, str]) -> Sequence[str]:
    """The field among these that `columns` names; all of them if it names none."""
    return [name for name in fields if name in columns] or fields


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

    def add(self, part: bytes | memoryview) -> None:
        self._hash.update(part)
        self._num_bytes += len(part)

    def add_file(self, path: Path) -> None:
        with path.open("rb") as file:
            self.add_rest(file)

    def add_rest(self, file: IO[bytes]) -> None:
        while part := file.read(2**20):
            self.add(part)

    def content(self) -> Content:
        return Content(self._hash.hexdigest(), self._num_bytes)


def file_content(*paths: Path) -> Content:
    """Read whole files and return the identity of their content, one after the other."""
    parts = ContentHash()
    for path in paths:
        parts.add_file(path)
    return parts.content()


# -- what `data` names -------------------------------------------------------------------------


def hub_name(data: str) -> str | None:
    """The hub name that `data` stands for: `hub:NAME`, or owner/name that is no path here."""
    if data.startswith(HUB):
        return data.removeprefix(HUB)
    path = Path(data)
    is_path = path.exists() or path.parent.exists() or _format_of(path) is not None
    return data if _HUB_NAME.fullmatch(data) and not is_path else None


def names_files(data: str) -> bool:
    """Whether `data` names files: no built-in task, no generator, no hub dataset."""
    generated = data.startswith(reasoning_gym.PREFIX) or builtin.is_builtin(data)
    return not generated and hub_name(data) is None


def find_files(data: str, options: Mapping[str, Any], default_split: str = "") -> list[Path]:
    """The files of a file, folder or glob, in order; raise a UserError if there are none."""
    path = Path(os.path.expanduser(data))  # which leaves a user that is not there
    is_folder = path.is_dir()
    allowed = ("split",) if is_folder else ()
    for name in options:
        if name not in allowed:
            raise UserError(
                f"data_options: got {', '.join(options)} with the {'folder' if is_folder else 'file'} "
                f"{data}, allowed: {', '.join(allowed) or 'none for a file'}"
            )
    if path.is_file():
        return [path]
    if is_folder:
        return _files_of_folder(path, str(options.get("split", "")), default_split)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if files := [match for match in matches if match.is_file()]:
        return files
    raise UserError(f"data: got {data!r}, allowed: {ALLOWED}")


def _files_of_folder(folder: Path, split: str, default_split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():  # several datasets, one for each split
        splits = _saved_list(folder / "dataset_dict.json", "splits")
        folder, split = folder / choose_split(str(folder), splits, split, default_split), ""
    if (folder / "state.json").is_file():  # as `Dataset.save_to_disk` writes it
        parts = _saved_list(folder / "state.json", "_data_files")
        names = [str(part.get("filename")) for part in parts if isinstance(part, dict)]
        return [folder / name for name in names]
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file() and _format_of(path)]
    files = [
        path
        for path in inside
        if not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    if not files:
        raise UserError(
            f"data: got the folder {folder} without data, allowed: files that end with "
            f"{', '.join(FORMATS)} (or these with .gz), or what save_to_disk wrote"
        )
    named = {path: _split_of(path.relative_to(folder)) for path in files}
    splits = sorted(set(named.values()) - {""})
    if len(splits) < 2 and not split:
        return files
    wanted = choose_split(str(folder), splits, split, default_split)
    return [path for path, name in named.items() if name == wanted]


def _saved_list(file: Path, key: str) -> list[Any]:
    """What a file that save_to_disk wrote lists under a key."""
    try:
        value = json.loads(file.read_text("utf-8"))[key]
    except (ValueError, TypeError, KeyError, RecursionError):
        value = None
    if isinstance(value, list):
        return value
    raise UserError(f"data {file}: got no list {key!r}, allowed: the file that save_to_disk wrote")


def _split_of(path: Path) -> str:
    """The split that a word of the file's name or its folder's names, such as train-00000."""
    matches = (_SPLIT.search(part) for part in reversed(path.parts))
    return next((match[1] for match in matches if match), "")


def choose_split(data: str, splits: Iterable[str], split: str, default: str) -> str:
    """The split to read; raise a UserError if it is not there, or if several are."""
    names = list(splits)
    if split in names:
        return split
    if not split and len(names) == 1:
        return names[0]
    if not split and default in names:
        return default
    got = f"split = {split!r}" if split else "no split"
    raise UserError(
        f"data_options of {data}: got {got}, allowed: split = one of {', '.join(names)}"
    )


# -- records -----------------------------------------------------------------------------------


class Records:
    """The records of one source, in order. Iterate once; then `content` is the identity of it all."""

    def __init__(
        self, data: str, options: Mapping[str, Any], seed: int = 0, default_split: str = ""
    ) -> None:
        """`seed` generates problems; `default_split` is read if the data has several."""
        self.data = data
        self._options, self._seed, self._default_split = dict(options), seed, default_split
        self._parts = ContentHash()
        # (numbers before it, name, word for a record)
        self._starts: list[tuple[int, str, str]] = []

    def content(self) -> Content:
        return self._parts.content()

    def place(self, number: int) -> str:
        """Where a record is, for messages: `data FILE line N`."""
        index = bisect.bisect_left(self._starts, number, key=lambda start: start[0]) - 1
        before, name, unit = self._starts[max(index, 0)]
        return f"data {name} {unit} {number - before}"

    def __iter__(self) -> Iterator[Row]:
        if name := hub_name(self.data):
            yield from self._numbered(self.data, "row", self._hub_rows(name))
        elif names_files(self.data):
            files = find_files(self.data, self._options, self._default_split)
            before = 0
            for path in files:
                shown = self.data if len(files) == 1 and Path(self.data).is_file() else str(path)
                read, unit = _format_of(path) or FORMATS[".jsonl"]
                self._starts.append((before, shown, unit))
                number = 0
                for number, record in _named_faults(path, read(path, self._parts)):
                    yield before + number, record
                before += number
        elif self.data.startswith(reasoning_gym.PREFIX):
            problems = reasoning_gym.load(self.data, self._options, self._seed)
            yield from self._numbered(self.data, "line", problems)
        else:
            problems = builtin.load(self.data, self._options)
            yield from self._numbered(self.data, "line", problems)

    def _numbered(self, name: str, unit: str, records: Iterable[object]) -> Iterator[Row]:
        self._starts.append((0, name, unit))
        for number, record in enumerate(records, start=1):
            self._parts.add(json.dumps(record, sort_keys=True).encode())
            yield number, record

    def _hub_rows(self, name: str) -> Iterator[object]:
        for option in self._options:
            if option not in _HUB_OPTIONS:
                raise UserError(
                    f"data_options of {name}: got {option!r}, allowed: {', '.join(_HUB_OPTIONS)}"
                )
        try:
            from datasets import load_dataset
        except ImportError:
            raise UserError(
                f"data: got the hub name {name!r}, but the package datasets is not installed; {_INSTALL}"
            ) from None
        chosen = self._options
        try:
            splits = load_dataset(name, chosen.get("config"), revision=chosen.get("revision"))
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"data: the hub dataset {name!r} cannot be loaded: {_first_line(error)}"
            ) from error
        split = choose_split(name, splits, str(chosen.get("split", "")), self._default_split)
        return (plain(row) for row in splits[split])


def plain(value: object) -> object:
    """A value as JSON holds it: NaN becomes null, a date its text, bytes their number."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if callable(to_list := getattr(value, "tolist", None)):  # numpy arrays and scalars
        return plain(to_list())
    return str(value)


def _named_faults(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """Turn a fault of the whole file into a UserError that names the file."""
    try:
        yield from rows
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"data {path}: not a whole gzip file ({error})") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"data {path}: not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except OSError as error:  # pyarrow's, too, of a page that is damaged
        reason = error.strerror or _first_line(error)
        raise UserError(f"data {path}: {reason}, allowed: a file that can be read") from None


def _open(path: Path, parts: ContentHash) -> IO[bytes]:
    """Open a file whose bytes were added first, through the same open file; one that ends with .gz is unpacked."""
    file = path.open("rb")
    parts.add_rest(file)
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[return-value]


def _read_jsonl(path: Path, parts: ContentHash) -> Iterator[Row]:
    with _open(path, parts) as file:
        yield from _json_lines(file)


def _parse_json(raw: bytes) -> Any:
    """The value of a JSON text; ValueError also for half a character, which no tokenizer reads."""
    text = raw.decode("utf-8-sig")
    value = json.loads(text, parse_constant=lambda _: None)  # NaN is no value, as in `plain`
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _fault(error: Exception) -> str:
    return (
        "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
    )


def _json_lines(lines: Iterable[bytes]) -> Iterator[Row]:
    """Yield (line number, parsed line or BadRecord) for each line that is not blank."""
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            yield number, _parse_json(raw)
        except UnicodeDecodeError as error:
            yield number, BadRecord(f"not UTF-8 text: {error.reason} at byte {error.start}")
        except json.JSONDecodeError as error:
            yield number, BadRecord(f"not valid JSON: {error.msg} at column {error.colno}")
        except (RecursionError, ValueError) as error:
            yield number, BadRecord(f"not valid JSON: {_fault(error)}")


def _read_json(path: Path, parts: ContentHash) -> Iterator[Row]:
    """Read a list of records, an object that holds one list of records, or JSON lines."""
    with _open(path, parts) as file:
        raw = file.read()
    try:
        document = _parse_json(raw)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":  # else a second document follows: JSON lines
            raise UserError(
                f"data {path} line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}"
            ) from None
        yield from _json_lines(raw.splitlines())
        return
    except (RecursionError, ValueError) as error:
        raise UserError(f"data {path}: not valid JSON: {_fault(error)}") from None
    del raw
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list) and value]
        tables = [rows for rows in lists if all(isinstance(row, dict) for row in rows)]
        has_prompt = any(name in document for name in ("messages", "prompt", "question"))
        document = tables[0] if len(tables) == 1 and not has_prompt else [document]
    yield from enumerate(document if isinstance(document, list) else [document], start=1)


def _read_csv(path: Path, parts: ContentHash) -> Iterator[Row]:
    """Read rows under a header; an empty cell counts as absent, as does a column without a name."""
    csv.field_size_limit(2**31 - 1)  # a cell may be longer than Python's default of 128 KiB
    with io.TextIOWrapper(_open(path, parts), "utf-8-sig", newline="") as text:
        first = text.readline()
        marks = "\t" if ".tsv" in path.suffixes else ",;\t"  # as spreadsheets write them
        delimiter = next((mark for mark in marks if mark in first), marks[0])
        rows = csv.reader(itertools.chain([first], text), delimiter=delimiter)
        header = next(rows, [])
        names = list(filter(None, header))
        if len(set(names)) != len(names):
            raise UserError(
                f"data {path} line 1: got the columns {', '.join(names)}, "
                "allowed: a header with a different name for each column"
            )
        line = rows.line_num + 1
        for cells in rows:
            if len(cells) == len(header):
                yield line, {k: cell or None for k, cell in zip(header, cells, strict=True) if k}
            elif cells:
                yield (
                    line,
                    BadRecord(f"got {len(cells)} cells, allowed: {len(header)}, as the header"),
                )
            line = rows.line_num + 1


def _read_arrow(path: Path, parts: ContentHash) -> Iterator[Row]:
    """Read a Parquet file, or the stream of record batches that `datasets` writes."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"data {path}: the package pyarrow is not installed; {_INSTALL}") from None
    is_parquet, number = ".parquet" in path.suffixes, 0
    try:
        with _open(path, parts) as file:
            batches: Iterable[Any]
            if is_parquet:
                batches = ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE)
            else:
                batches = pyarrow.ipc.open_stream(file)
            for batch in batches:
                for start in range(0, len(batch), _ROWS_AT_ONCE):
                    for row in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                        number += 1
                        yield number, plain(row)
    except (pyarrow.ArrowException, OverflowError) as error:  # a date beyond Python's
        what = "a Parquet file" if is_parquet else "an Arrow stream"
        raise UserError(f"data {path}: not {what}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


FORMATS: dict[str, tuple[Callable[[Path, ContentHash], Iterator[Row]], str]] = {
    ".jsonl": (_read_jsonl, "line"),
    ".ndjson": (_read_jsonl, "line"),
    ".json": (_read_json, "record"),
    ".csv": (_read_csv, "line"),
    ".tsv": (_read_csv, "line"),
    ".parquet": (_read_arrow, "row"),
    ".arrow": (_read_arrow, "row"),
}  # the end of a file's name -> its reader, and the word for one record


def _format_of(path: Path) -> tuple[Callable[[Path, ContentHash], Iterator[Row]], str] | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


# ---- rows that a Python program gives


def write_rows(path: Path, source: Any) -> None:
    """Write each row as a JSON line; a string is a prompt."""
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(source), start=1):
            record = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(record, Mapping):
                raise UserError(
                    f"data: row {number}: got {type(row).__name__}, allowed: a dict or a string"
                )
            file.write(f"{json.dumps(plain(record))}\n")


def _rows(source: Any) -> Iterable[Any]:
    if hasattr(source, "iloc"):  # a data frame
        return cast(Iterable[Any], source.to_dict("records"))
    if isinstance(source, Mapping):
        if any(hasattr(value, "column_names") for value in source.values()):
            raise UserError(
                f"data: got the splits {', '.join(source)}, allowed: one of them, as in "
                f"data=dataset[{next(iter(source))!r}]"
            )
        sizes = {len(value) for value in source.values() if isinstance(value, Sequence)}
        if len(sizes) != 1 or any(isinstance(v, str) for v in source.values()):
            raise UserError("data: got a dict, allowed: a list of dicts, or columns of one length")
        return (dict(zip(source, row, strict=True)) for row in zip(*source.values(), strict=True))
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise UserError(
            f"data: got {type(source).__name__}, allowed: a path or name, a list of dicts, a "
            "datasets.Dataset or a data frame"
        )
    return source
