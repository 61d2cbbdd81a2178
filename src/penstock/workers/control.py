"""The control channel of a run that is under way: one line per command, one line per answer.

The driver listens on a Unix socket that only its user can reach. RUN/control holds the socket's path,
because the path of a run folder may be too long for a socket. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from penstock.errors import PenstockError, RunError, UserError
from penstock.files import ScratchFolder
from penstock.workers.rpc import one_line

_ANSWER_TIMEOUT_S = 900.0  # an engine may take long to load its model


class Control:
    """Consumes commands of one name and one number, produces the line that the handler returns."""

    def __init__(self, pointer: Path, handlers: Mapping[str, Callable[[int], Awaitable[str]]]):
        self._pointer, self._handlers = pointer, handlers
        self._folder = ScratchFolder.new("control")  # only this user can reach it
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = self._folder.path / "control"
        self._server = await asyncio.start_unix_server(self._answer, path)
        self._pointer.write_text(str(path))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._pointer.unlink(missing_ok=True)
        self._folder.remove()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            command, number = json.loads(await reader.readline())
            answer = {"done": await self._handlers[command](number)}
        except Exception as error:  # whatever it is, the user who waits must get it
            words = f"{error}" if isinstance(error, PenstockError) else one_line(error)
            answer = {"error": words}
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


def scale_run(folder: Path, setting: str) -> str:
    """Ask the driver of a run to change the number of engines: `producers=N`."""
    name, _, value = setting.partition("=")
    if name != "producers" or not value.isdigit() or int(value) < 1:
        raise UserError(f"scale: got {setting!r}, allowed: producers=N with N of 1 or more")
    return ask(folder / "control", "scale", int(value))


def ask(pointer: Path, command: str, number: int) -> str:
    """Send one command to a driver; return its answer when the command is done."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            path = Path(pointer.read_text())
            owner = path.parent.stat(follow_symlinks=False)
            # a run folder may be a stranger's
            if owner.st_uid != os.getuid() or not path.parent.name.startswith("penstock-control-"):
                raise ValueError
            connection.connect(str(path))
            connection.sendall(json.dumps([command, number]).encode() + b"\n")
            line = connection.makefile().readline()
        except (OSError, ValueError):
            raise UserError(
                f"run {pointer.parent}: got no driver that answers, allowed: a run that is under way "
                "with launch.kind local or ray"
            ) from None
    answer = json.loads(line or '{"error": "the driver ended"}')
    if "error" in answer:
        raise RunError(answer["error"])
    return str(answer["done"])
