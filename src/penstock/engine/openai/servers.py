"""Which server takes a request, which servers are lost, and how a lost one returns.

A server that does not answer, or fails several times in a row, is lost: its weights are unknown from then
on, and it takes no request until `restore` (the engine's) has checked or loaded them. A restore is tried
when a request needs a server, with a back-off while other servers are ready. An idle connection to each
server shows that its process has ended even if no request runs there (`watch`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.engine.openai.http_client import HttpError, JsonClient

log = logging.getLogger(__name__)

_REMEMBERED = 65536  # rollouts whose server is remembered
_NO_ANSWER = (0, 502, 503, 504)  # HTTP states of a server whose process does not answer
_FAULTS_IN_A_ROW = 3
_LONGEST_BACKOFF_S = 30.0


class Server:
    """One URL and its state. Each loss starts a new `epoch`."""

    def __init__(self, client: JsonClient) -> None:
        self.client = client
        self.outstanding = 0  # tokens of the requests that run there
        self.ready = True  # the server answers and holds the engine's current weights
        self.epoch = 0
        self.given_up = False  # the server answers, but can never serve again in this run
        self.reason = ""  # why the server is not ready
        self.faults = 0  # failed requests in a row
        self.tries = 0  # restores tried since it was lost
        self.try_at = 0.0  # time of the next restore, while other servers are ready
        self.restoring: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.client.base_url

    async def check_health(self) -> None:
        """Raise HttpError if the server does not answer; one without /health counts as alive."""
        try:
            await self.client.get("/health")
        except HttpError as error:
            if error.retryable:
                raise

    async def is_paused(self) -> bool:
        """Return whether vLLM's own pause is on; raise HttpError if the server has no such call."""
        answer = await self.client.get("/is_paused")
        if not isinstance(answer, dict) or "is_paused" not in answer:
            raise HttpError(f"{self.url}/is_paused: got {answer!r}, allowed: is_paused", 404)
        return bool(answer["is_paused"])

    async def has_own_pause(self) -> bool:
        """Return whether the server can pause; end a pause that a dead client left behind."""
        try:
            paused = await self.is_paused()
        except HttpError:
            return False
        if paused:
            await self.set_paused(False)
        return True

    async def set_paused(self, paused: bool) -> None:
        await self.client.post("/pause?mode=keep&clear_cache=false" if paused else "/resume", {})


class Servers:
    """The servers of one engine.

    `restore` returns when a lost server may serve again, and raises a retryable HttpError to be tried later.
    `when_lost` ends the requests that run on a server.
    """

    def __init__(
        self,
        clients: Sequence[JsonClient],
        restore: Callable[[Server], Awaitable[None]],
        when_lost: Callable[[Server], None],
        backoff_s: float,
    ) -> None:
        self.all = [Server(client) for client in clients]
        self.owner: OrderedDict[str, Server] = OrderedDict()
        self._restore, self._when_lost, self._backoff_s = restore, when_lost, backoff_s

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.ready]

    async def choose(self, request_id: str) -> Server:
        """Return the rollout's last server if it is ready, else the least loaded one.

        Raise HttpError if no server is ready.
        """
        owner = self.owner.get(request_id)
        if owner is None or not owner.ready:
            owner = min(await self.wait_ready(), key=lambda server: server.outstanding)
        self.owner[request_id] = owner
        self.owner.move_to_end(request_id)
        while len(self.owner) > _REMEMBERED:
            self.owner.popitem(last=False)
        return owner

    async def wait_ready(self) -> list[Server]:
        """Return the ready servers, and start restores that are due; wait for them if none is ready."""
        now, others = asyncio.get_running_loop().time(), bool(self.ready)
        for server in self.all:
            due = not others or now >= server.try_at
            if due and not (server.ready or server.given_up or server.restoring):
                server.restoring = asyncio.create_task(self._try_restore(server))
        if not others:
            restoring = [server.restoring for server in self.all if server.restoring]
            if restoring:
                await asyncio.wait(restoring)
        if not self.ready:
            raise self._none_ready()
        return self.ready

    def _none_ready(self) -> HttpError:
        final = all(server.given_up for server in self.all)
        reasons = "; ".join(server.reason for server in self.all)
        return HttpError(f"no server answers: {reasons}", 410 if final else 0)

    async def _try_restore(self, server: Server) -> None:
        epoch = server.epoch
        try:
            await self._restore(server)
            if server.epoch != epoch:
                raise HttpError(f"{server.url}: it was lost again: {server.reason}")
            server.ready, server.tries, server.reason = True, 0, ""
            log.warning("engine openai: %s is ready again", server.url)
        except HttpError as error:
            if error.retryable:
                self._try_later(server, error)
            else:
                self._give_up(server, error)
        except Exception as error:  # nobody awaits this task: the server's reason tells of it
            self._give_up(server, error)
        finally:
            server.restoring = None

    def _try_later(self, server: Server, error: HttpError) -> None:
        server.reason = str(error)
        wait = min(self._backoff_s * 2**server.tries, _LONGEST_BACKOFF_S)
        server.tries = min(server.tries + 1, 16)
        server.try_at = asyncio.get_running_loop().time() + wait

    def _give_up(self, server: Server, error: Exception) -> None:
        self._stop_watching(server)
        server.given_up = True
        server.reason = f"{server.url} was lost and is not used again: {error}"
        log.warning("engine openai: %s", server.reason)

    # ---- losing a server

    def failed(self, request_id: str, server: Server, epoch: int, error: Exception) -> None:
        """Note a failed request: it may go elsewhere, and a server that only fails is lost."""
        self.owner.pop(request_id, None)
        if not isinstance(error, HttpError) or server.epoch != epoch:
            return
        server.faults = server.faults + 1 if error.status >= 500 else 0
        if error.status in _NO_ANSWER or server.faults >= _FAULTS_IN_A_ROW:
            self.lose(server, str(error))

    def lose(self, server: Server, reason: str) -> None:
        """Mark the server lost: its weights are unknown from now on, and its requests end."""
        if server.ready:
            log.warning("engine openai: %s is lost: %s", server.url, reason)
        server.ready, server.reason = False, reason
        server.epoch, server.faults = server.epoch + 1, 0
        self._stop_watching(server)
        self._when_lost(server)

    async def watch(self, server: Server) -> None:
        """Keep an idle connection to the server: the system closes it when the process ends."""
        if server.watching is None:
            reader, writer = await server.client.connect()
            server.watching = asyncio.create_task(self._wait_closed(server, reader, writer))

    async def _wait_closed(
        self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Consumes nothing, produces a loss; waits for the connection, woken when it closes."""
        try:
            await reader.read(1)
            reason = "its connection ended"
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            writer.close()
        server.watching = None
        self.lose(server, f"{server.url}: {reason}")

    def _stop_watching(self, server: Server) -> None:
        if server.watching is not None:
            server.watching.cancel()
            server.watching = None

    # ---- all servers

    async def call_all(self, call: Callable[[Server], Awaitable[Any]]) -> None:
        """Run `call` on every ready server.

        Lose a server that does not answer; raise any other fault, or HttpError if no server is left.
        """
        called = self.ready
        epochs = [server.epoch for server in called]
        outcomes = await asyncio.gather(*map(call, called), return_exceptions=True)
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for server, epoch, outcome in zip(called, epochs, outcomes, strict=True):
            if isinstance(outcome, HttpError) and outcome.status in _NO_ANSWER:
                faults.remove(outcome)
                if server.epoch == epoch:
                    self.lose(server, str(outcome))
        if faults:
            raise faults[0]
        if not self.ready:
            raise self._none_ready()

    def reset(self) -> None:
        """Mark every server ready, for a start of the engine."""
        for server in self.all:
            self._stop_watching(server)
            if server.restoring is not None:
                server.restoring.cancel()
            server.ready, server.given_up, server.reason = True, False, ""
            server.epoch, server.faults, server.tries = server.epoch + 1, 0, 0

    async def close(self) -> None:
        tasks = [t for s in self.all for t in (s.watching, s.restoring) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
