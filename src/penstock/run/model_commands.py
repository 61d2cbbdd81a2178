"""The commands on a model: `penstock eval`, `generate` and `chat` of a run, a model or a config.

Imports nothing heavy before a command is called, so that a wrong argument costs no import of torch.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from penstock.config.source import split_words
from penstock.files import console, say

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Allow what a run of another user would execute or connect to."),
]
ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN|MODEL|CONFIG] [KEY=VALUE]...",
        help="A run, a model folder, a hub name or a config, and settings. Without: the demo.",
    ),
]


def evaluate(
    arguments: ModelArguments = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for one JSONL file of samples per task.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Evaluate a run's newest checkpoint, a model or a config's model on the evaluation tasks.

    A model needs its tasks as settings: eval.tasks.NAME.data=FILE.
    """
    from penstock.run.session import evaluate_once

    path, overrides = split_words(arguments or [])
    evaluate_once(path, overrides, out, trusted=trust)


def generate(
    prompt: Annotated[list[str], typer.Option(help="A prompt; may be given several times.")],
    arguments: ModelArguments = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 1,
    raw: Annotated[
        bool, typer.Option(help="Send the prompt as it is, without the chat template.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Sample from a run or a model and print every token with its log-probability."""
    from penstock.run.generate import describe, generate_samples
    from penstock.run.session import model_config

    path, overrides = split_words(arguments or [])
    settings = model_config(path, overrides, trusted=trust)
    for line in describe(generate_samples(settings, prompt, num_generations=samples, raw=raw)):
        say(line)


def chat(arguments: ModelArguments = None, trust: Trust = False) -> None:
    """Talk to a run or a model; /reset begins a new conversation. Shows the reward of a task's prompt."""
    from penstock.run.generate import HELP, talk
    from penstock.run.session import model_config

    path, overrides = split_words(arguments or [])
    settings = model_config(path, overrides, trusted=trust)
    terminal = console()
    if sys.stdin.isatty():
        say(HELP, error=True)

    def write(text: str) -> None:
        terminal.print(Text(text), end="", soft_wrap=True)

    scored = "tasks" in settings.model_fields_set
    asyncio.run(talk(settings, _questions(), write, scored=scored))


def _questions() -> Iterator[str]:
    """The lines that the user types, until `/exit` or the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, OSError):  # the end of the input, or a program without one
            return
        if line.strip() in ("/exit", "/quit"):
            return
        yield line.strip()
