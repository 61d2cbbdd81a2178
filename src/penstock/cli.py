"""The command line. Layer 8: parses arguments, prints results, turns errors into exit codes.

Exit codes: 0 fine; 1 the run or the check failed; 2 the input is wrong; 130 stopped by Ctrl-C.
Nothing heavy is imported before the input was checked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock import __version__
from penstock.errors import PenstockError, StopRequested, UserError

app = typer.Typer(
    name="penstock",
    help="""Post-train language models with reinforcement learning from verifiable rewards.

Producers sample and score answers, a journal keeps every one of them, consumers train. With no
config `penstock train` runs a demo on this machine's CPU in about two minutes.""",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A TOML file and overrides such as train.lr=1e-5; no file: the built-in demo.",
    ),
]
Run = Annotated[str, typer.Argument(help="A run folder, or its name below runs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
]


def _split(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    words = arguments or []
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UserError(f"arguments: got {len(files)} config files {files}, allowed: at most one")
    return (files[0] if files else None), [word for word in words if "=" in word]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show and leave."),
    ] = False,
) -> None:
    """The options that come before a command."""


@app.command(rich_help_panel="Run")
def train(arguments: Arguments = None) -> None:
    """Train a policy. With no config: the CPU demo."""
    from penstock.config_source import load_config

    path, overrides = _split(arguments)
    loaded = load_config(path, overrides)
    from penstock import preflight
    from penstock.session import train_new

    preflight.check(loaded.config)
    train_new(loaded.config)


@app.command(rich_help_panel="Run")
def resume(run: Run, overrides: Overrides = None) -> None:
    """Go on after a stop or a crash: newest checkpoint, then redo from the journal."""
    from penstock.run_folder import find
    from penstock.session import resume_run

    resume_run(find(run), overrides or [])


@app.command("eval", rich_help_panel="Run")
def evaluate(
    arguments: Arguments = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the per-sample JSONL files.")] = None,
) -> None:
    """One exact pass over the evaluation tasks of a CONFIG, or of a RUN's newest weights."""
    from penstock.session import evaluate_once

    path, overrides = _split(arguments)
    evaluate_once(path, overrides, out)


@app.command(rich_help_panel="Look")
def config(arguments: Arguments = None) -> None:
    """Print the resolved config: every key, its value, where it came from, and what it means."""
    from penstock.config_source import describe, load_config

    path, overrides = _split(arguments)
    loaded = load_config(path, overrides)
    console = Console()
    for key, value, origin, doc in describe(loaded.config, loaded.origins):
        console.print(f"[bold]{key}[/bold] = {value!r}", highlight=False, soft_wrap=True)
        console.print(f"    [dim]{doc} ({origin})[/dim]", highlight=False, soft_wrap=True)
    for warning in loaded.config.warnings():
        console.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def main() -> None:
    """The entry point: every error that is ours becomes one line and an exit code."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail(error, 2)
    except StopRequested as error:
        print(error, file=sys.stderr)
        raise SystemExit(130) from None
    except PenstockError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code) from None


if __name__ == "__main__":
    main()
