"""Writes the settings of another system as our TOML, with a comment on every line that changed meaning."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from penstock.config.plugins import map_paths
from penstock.config.source import load_config, toml_key, toml_value
from penstock.convert.tables import (
    DEFAULTS,
    EVAL,
    SPELLINGS,
    TASK,
    WORDS,
    Conversion,
    Rule,
    read,
    rule_of,
    task_name,
)
from penstock.convert.together import TOGETHER
from penstock.convert.words import OF_EVALUATION, FromEnvironment, Unread, read_words
from penstock.errors import UserError
from penstock.files import pasted


def write_config(system: str, file: Path, out: Path | None = None) -> Path:
    """Write the TOML for a file of `system` to `out`, which must not exist; return its path."""
    if system not in WORDS:
        raise UserError(f"convert: got {system!r}, allowed: {', '.join(WORDS)}")
    path = out or Path(f"{file.stem}.toml")
    text = convert(system, file, path)
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(text)
    except OSError as error:
        raise UserError(f"convert: cannot write {path}: {error.strerror}; give --out") from None
    try:
        load_config(path)
    except UserError as error:  # a value that is not allowed here
        raise UserError(f"{error} (in {path}, which was written: correct it there)") from None
    return path


def convert(system: str, path: Path, out: Path | None = None) -> str:
    """The TOML for a command line or a config file of `system`; `out` is where it will be."""
    spellings, words = SPELLINGS[system], read_words(path, system)
    known = {name: sum(rule_of(name, word) is not None for word in words) for name in WORDS}
    likely = max(known, key=lambda name: known[name])
    if 2 * known[system] < known[likely]:
        raise UserError(
            f"convert: {system} knows {known[system]} of the {len(words)} settings of {path}, {likely} knows "
            f"{known[likely]}; did you mean: penstock convert {likely} {pasted(path)}?"
        )
    conversion = Conversion({spellings.get(word, word): value for word, value in words.items()})
    for key, value, note in DEFAULTS[system]:
        conversion.put(key, value, note)
    for word, value in conversion.words.items():
        _translate(conversion, word, value, rule_of(system, word))
    try:
        TOGETHER[system](conversion)
        _complete(conversion)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"convert: {path}: its numbers cannot be read: {error}") from None
    conversion.left += [
        f"{word} = {_shown(value)}: not known to this conversion"
        for word, value in conversion.words.items()
        if word not in conversion.used
    ]
    out = out or Path(f"{path.stem}.toml")
    _name_files_from(out.parent.resolve(), conversion)
    return _text(system, path, out, conversion)


def _name_files_from(folder: Path, conversion: Conversion) -> None:
    """Name the files of the shell's folder by their paths from the config's, as a config is read."""

    def place(key: str, name: str, is_code: bool) -> str:
        file = Path(name).absolute()
        is_own = file.exists() and not Path(name).is_absolute() and folder != Path.cwd()
        return os.path.relpath(file, folder) if is_own else name

    for key, (value, comment) in conversion.settings.items():
        conversion.settings[key] = (map_paths(value, place, key), comment)


def _translate(conversion: Conversion, word: str, value: Any, rule: Rule | None) -> None:
    if rule is None:
        if word.startswith(OF_EVALUATION) and rule_of("xtuner", word.removeprefix(OF_EVALUATION)):
            conversion.used.add(word)  # an evaluation differs only in what has a rule of its own
        elif match := _FURTHER.fullmatch(word):
            _translate_further(conversion, word, value, *match.groups())
        return
    conversion.used.add(word)
    if rule.is_joined:
        return
    if not rule.key:
        shown = "..." if rule.is_secret else _shown(value)
        conversion.left.append(f"{word} = {shown}: {rule.note}")
        return
    if isinstance(value, Unread):
        conversion.left.append(
            f"{word} = {value}: code, or a variable that is not set; set {rule.key}"
        )
        return
    try:
        translated = rule.value(value)
    except (TypeError, ValueError):
        why = f"; {rule.note}" if rule.note else ""
        conversion.left.append(f"{word} = {_shown(value)}: cannot be read as {rule.key}{why}")
        return
    if translated is None:
        return
    same_value = translated == read(value) or str(translated) == str(value) or value is True
    said = word if same_value or rule.is_secret else f"{word} = {value}"
    conversion.put(rule.key, translated, f"{said}; {rule.note}" if rule.note else said)


_FURTHER = re.compile(
    rf"((?:{OF_EVALUATION})?)(\d+):([^:]+)"
)  # a word of the second or a later task


def _translate_further(
    conversion: Conversion, word: str, value: Any, prefix: str, number: str, plain: str
) -> None:
    """Translate a word of a further task: into its own table, or its tables sampling and produce."""
    rule = rule_of("xtuner", prefix + plain) or rule_of("xtuner", plain)
    if rule is None:
        return
    conversion.used.add(word)
    named = conversion.words.get(f"{prefix}{number}:TaskSpecConfig.task_name")
    name = task_name(named) if isinstance(named, str) else f"task{number}"
    table = f"eval.tasks.{name}" if prefix else f"tasks.{name}"
    if rule.key.startswith((f"{TASK}.", f"{EVAL}.")):
        key = f"{table}.{rule.key.removeprefix(f'{EVAL}.').removeprefix(f'{TASK}.')}"
    elif rule.key.startswith(("sampling.", "produce.", "eval.sampling.")):
        key = f"{table}.{rule.key.removeprefix('eval.')}"
    else:
        key = ""
    if prefix and (".produce." in key or key.endswith((".weight", ".agent_actors"))):
        key = ""
    note = rule.note if key or not rule.key else f"the task that comes first sets {rule.key}"
    if not rule.is_joined and (key or plain != "TaskSpecConfig.task_name"):
        _translate(conversion, word, value, Rule(key, rule.translation, note))


def _shown(value: Any) -> Any:
    """A value for a comment; of an environment variable only the name."""
    return value.source if isinstance(value, FromEnvironment) else value


_SHARED = ("rewards", "system_prompt", "max_prompt_tokens", "columns.prompt", "columns.gt_answer")


def _complete(conversion: Conversion) -> None:
    """Add what a run needs and the words did not say."""
    if conversion.value("algorithm.kl_beta", None) == 0:
        conversion.settings.pop("algorithm.kl_in", None)
    cuts = conversion.value("sampling.top_k", 0) > 0 or conversion.value("sampling.top_p", 1) < 1
    if cuts and conversion.value("algorithm.correction.newest", "") == "trainer":
        said = "whose log-probs alone know which tokens top_k and top_p cut"
        conversion.put("algorithm.correction.newest", "engine", said)
        conversion.put("algorithm.correction.kind", "auto", "weighs the tokens that were cut")
    if "train.steps" in conversion.settings:
        steps = conversion.settings["train.steps"][0]
        conversion.settings.pop("train.steps" if int(steps) <= 0 else "train.episodes", None)
    conversion.settings.setdefault("model.path", ("demo", "SAY HERE which model"))
    conversion.settings.setdefault(f"{TASK}.data", ("train.jsonl", "SAY HERE where the data is"))
    for key in [key for key in conversion.settings if re.fullmatch(r"tasks\.[^.]+\.data", key)]:
        rewards = ([{"type": "boxed"}], "SAY HERE how responses are scored")
        conversion.settings.setdefault(key.removesuffix("data") + "rewards", rewards)
    for key in [key for key in conversion.settings if re.fullmatch(r"eval\.tasks\.\S+\.data", key)]:
        for name in _SHARED:
            if f"{TASK}.{name}" in conversion.settings:
                shared = conversion.settings[f"{TASK}.{name}"][0]
                conversion.settings.setdefault(key.removesuffix("data") + name, (shared, ""))
    axes = ("tensor", "pipeline", "context")
    ranks = math.prod(int(conversion.value(f"train.parallel.{axis}", 1)) for axis in axes)
    if int(conversion.value("launch.num_consumers", 1)) < ranks:
        conversion.put("launch.num_consumers", ranks, "SAY HERE how many GPUs train")
    if any(key.startswith("engine.options.") for key in conversion.settings):
        conversion.settings.setdefault("engine.name", ("vllm", "its settings are given"))


# ---- the text

_ORDER = ("", "run", "model", "tasks", "sampling", "algorithm", "train", "produce", "engine")


def _text(system: str, path: Path, out: Path, conversion: Conversion) -> str:
    sections: dict[str, list[str]] = {}
    for key, (value, comment) in conversion.settings.items():
        section, _, name = key.rpartition(".")
        said = f"  # {_one_line(comment)}" if comment else ""
        line = f"{toml_key(name)} = {toml_value(value)}{said}"
        sections.setdefault(section, []).append(line)
    lines = [
        f"# Made from {path.name} by `penstock convert {system}`. A comment names the word, or says what differs.",
        f"#   penstock check {pasted(out)}",
    ]

    def place(section: str) -> tuple[int, str]:
        first = section.split(".")[0]
        return (_ORDER.index(first) if first in _ORDER else len(_ORDER), section)

    for section in sorted(sections, key=place):
        lines += ["", *([f"[{section}]"] if section else []), *sections[section]]
    if conversion.left:
        lines += ["", "# Without a counterpart:"]
    lines += [f"#   {_one_line(line)}" for line in conversion.left]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
