"""The command line as data: every command with its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from penstock import cli


def commands() -> dict[str, Any]:
    """Return every command by its words, such as `sandbox serve`; groups are left out."""
    return dict(_walk(typer.main.get_command(cli.app), ""))


def options(command: Any) -> set[str]:
    """Return the options of a command, such as `--out`."""
    return {option for parameter in command.params for option in parameter.opts}


def _walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield words, command
    for word, inner in below.items():
        yield from _walk(inner, f"{words} {word}".strip())
