"""Several servers with one model: which of them takes a request, and which are well. Layer 1."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from penstock.engine.http_client import HttpError, JsonClient

_REMEMBERED = 65536  # rollouts whose server is remembered


class Server:
    """One URL and what is under way there."""

    def __init__(self, client: JsonClient) -> None:
        self.client, self.outstanding, self.healthy = client, 0, True

    async def ask_health(self) -> None:
        try:
            await self.client.get("/health")
            self.healthy = True
        except HttpError as error:
            self.healthy = error.status != 0  # a server without this page is alive all the same


class Servers:
    """The least loaded takes a request; a rollout that goes on returns to its own."""

    def __init__(self, clients: Sequence[JsonClient]) -> None:
        self.all = [Server(client) for client in clients]
        self.owner: OrderedDict[str, Server] = OrderedDict()

    @property
    def any_healthy(self) -> bool:
        return any(server.healthy for server in self.all)

    async def choose(self, request_id: str) -> Server:
        """The rollout's own server if it is well, else the least loaded one that answers."""
        owner = self.owner.get(request_id)
        if owner is None or not owner.healthy:
            if not self.any_healthy:
                await asyncio.gather(*(server.ask_health() for server in self.all))
            well = [server for server in self.all if server.healthy] or self.all
            owner = min(well, key=lambda server: server.outstanding)
        self.owner[request_id] = owner
        self.owner.move_to_end(request_id)
        while len(self.owner) > _REMEMBERED:
            self.owner.popitem(last=False)
        return owner

    def failed(self, request_id: str, error: Exception) -> None:
        """The request goes elsewhere; a server that did not answer at all is left until it does."""
        owner = self.owner.pop(request_id, None)
        if owner is not None:
            owner.healthy = not (isinstance(error, HttpError) and error.status == 0)

    async def post_all(self, path: str, body: dict[str, Any]) -> None:
        """The same call to every server; one that fails fails it."""
        await asyncio.gather(*(server.client.post(path, body) for server in self.all))
