"""Reads the settings of a command line (a shell script) or of a YAML, JSON or Python file as words and values.

Words lose their leading dashes, and dashes inside them become underscores: `--top-p 0.9`, `top_p: 0.9`
and `top_p=0.9` are one word. Nothing is executed: a shell variable is replaced if the script assigns it
plainly.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from penstock.convert.python_config import read_python
from penstock.errors import UserError

_ASSIGNED = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(\S*)$")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


def read_words(path: Path) -> dict[str, Any]:
    """Return the words of a file and their values, in the file's order; a flag without a value is True."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"convert: got {str(path)!r}, allowed: a text file that can be read ({reason})"
        ) from None
    if path.suffix == ".py":
        words = read_python(text, path)
    elif path.suffix in (".yaml", ".yml", ".json"):
        words = _of_tree(text, path)
    else:
        words = _of_command(text)
    if not words:
        raise UserError(
            f"convert: got {path} without a setting, allowed: a command with `--word value` or "
            "`word=value`, or a .yaml or .json file"
        )
    return words


def _of_tree(text: str, path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"convert: {path} is no {path.suffix[1:]} file: {line}") from None
    if not isinstance(tree, dict):
        raise UserError(f"convert: got {path} without names, allowed: a table of settings")
    return dict(_leaves(tree, ""))


def _leaves(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        word = f"{prefix}{name}"
        found += _leaves(value, f"{word}.") if isinstance(value, dict) else [(_plain(word), value)]
    return found


def _of_command(text: str) -> dict[str, Any]:
    lines = re.sub(r"\\\s*\n", " ", text).splitlines()
    variables: dict[str, str] = {}
    words: dict[str, Any] = {}
    for line in lines:
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(
                f"convert: cannot read the line {line.strip()[:80]!r}: {error}"
            ) from None
        if tokens and all(_ASSIGNED.match(token) for token in tokens if token != "export"):
            for token in tokens:
                if match := _ASSIGNED.match(token):
                    variables[match[1]] = _filled(match[2], variables)
            continue
        words |= _of_tokens([_filled(token, variables) for token in tokens])
    return words


def _filled(token: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), token)


def _of_tokens(tokens: list[str]) -> dict[str, Any]:
    """Return the words behind the program; of those of its launcher only the number of processes."""
    begin = _program(tokens)
    launcher = _settings(tokens[:begin])
    count = launcher.get("num_processes", launcher.get("nproc_per_node"))
    words = _settings(tokens[begin:])
    return (
        words if count is None or not words else {"num_processes": str(count).split()[0], **words}
    )


def _program(tokens: list[str]) -> int:
    """Return the index behind the program's name; the end of the tokens if they run none of ours."""
    for index, token in enumerate(tokens):
        before = tokens[index - 1] if index else ""
        if token.endswith(".py") or before == "-m" or (token == "grpo" and before.endswith("trl")):
            return index + 1
    is_setting = bool(tokens) and ("=" in tokens[0] or tokens[0].startswith("-"))
    return 0 if is_setting else len(tokens)


def _settings(tokens: list[str]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    flag = ""
    for token in tokens:
        name, equals, value = token.partition("=")
        is_flag = re.match(r"--?[A-Za-z]", token) is not None
        is_dotted = equals and re.match(r"^[+~]{0,2}[A-Za-z_]\w*(\.\w+)+$", name) is not None
        if token.startswith("$"):
            continue
        if (is_flag and equals) or is_dotted or (equals and not flag):
            words[_plain(name)], flag = value, ""
        elif is_flag:
            flag = _plain(token)
            words[flag] = True
        elif flag:
            earlier = words[flag]
            words[flag] = token if earlier is True else f"{earlier} {token}"  # several values
    return words


def _plain(word: str) -> str:
    return word.lstrip("-+~").replace("-", "_")
