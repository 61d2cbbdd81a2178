"""The command `penstock serve`; what it serves is imported when it is called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.config.source import split_words
from penstock.run.model_commands import Trust

KEYS_VARIABLE = "PENSTOCK_SERVICE_KEYS"


def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|MODEL|CONFIG] [KEY=VALUE]...",
            help="A run, a model folder, a hub name or a config, and settings. Without: the demo.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs keys.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8070,
    keys: Annotated[
        Path | None,
        typer.Option(
            help=f"A file with one API key a line; or {KEYS_VARIABLE}=KEY,KEY in the environment."
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Sample on a Ray cluster: short for launch.kind=ray.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Serve training and sampling to your own loop, by the protocol of the Tinker SDK; a kill loses nothing.

    OpenAI's and Anthropic's clients can chat with the model as it is. The log is in runs/service (run.dir,
    run.name); the same command goes on with it.
    """
    from penstock.data.chat import ask_hub
    from penstock.run.session import model_config
    from penstock.service.server import read_keys, serve_until_stopped

    path, overrides = split_words(arguments or [])
    overrides += ["launch.kind=ray"] if ray else []
    config = model_config(path, overrides, trusted=trust)
    ask_hub(config.model.path, "model.path")
    allowed = read_keys(os.environ.get(KEYS_VARIABLE, ""), keys)
    folder = Path(config.run.dir) / (config.run.name or "service")
    serve_until_stopped(config, folder, host=host, port=port, keys=allowed)
