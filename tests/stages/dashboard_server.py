"""A dashboard that serves in a thread, and a client of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.inspection.dashboard.server import Dashboard, serve_on


class Client:
    """Asks the dashboard as its page does."""

    def __init__(self, port: int, dashboard: Dashboard) -> None:
        self.port, self.dashboard = port, dashboard
        self.address = f"http://127.0.0.1:{port}/"

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=sent)
            reply = connection.getresponse()
            headers = {name.title(): value for name, value in reply.getheaders()}
            return reply.status, reply.read(), headers

    def read(self, path: str) -> Any:
        status, body, _ = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def lines(self) -> dict[str, dict[str, Any]]:
        """Every run's line by its name, once all are read."""
        while not (found := self.read("/api/runs"))["complete"]:
            continue
        return {line["name"]: line for line in found["runs"]}


@contextmanager
def serving(folder: Path, token: str = "") -> Iterator[Client]:
    """Serve a folder while the block runs."""
    listening = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    shared: dict[str, Any] = {}

    async def main() -> None:
        shared["loop"], shared["stopped"] = asyncio.get_running_loop(), asyncio.Event()
        shared["dashboard"] = Dashboard(folder, token)
        started.set()
        await serve_on(listening, shared["dashboard"], shared["stopped"])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield Client(listening.getsockname()[1], shared["dashboard"])
    finally:
        shared["loop"].call_soon_threadsafe(shared["stopped"].set)
        thread.join()
        listening.close()
