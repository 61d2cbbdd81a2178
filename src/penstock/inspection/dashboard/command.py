"""The command `penstock dashboard`; what it serves is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    folder: Annotated[
        Path, typer.Argument(help="The folder that holds the runs, or one run folder.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8090,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name by which browsers call this machine, besides its own."),
    ] = None,
) -> None:
    """Serve a page of all runs in a folder: live curves, samples, comparison, findings. Only reads."""
    from penstock.inspection.dashboard.server import serve

    serve(folder, host=host, port=port, names=tuple(name or ()))
