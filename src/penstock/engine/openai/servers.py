"""Several servers with one model: which of them takes a request, which are lost, and how they return.

A server that did not answer, or gave faults in a row, is lost: what it holds is unknown from then on, and it
takes no request until `come_back` (the engine's) has seen to its weights. That is tried when a request
needs a server, with a back-off while others serve. A connection that carries nothing tells of a process
that ends while nothing runs there (`hold_on`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.engine.openai.http_client import HttpError, JsonClient
from penstock.errors import EngineError, UserError

log = logging.getLogger(__name__)

_REMEMBERED = 65536  # rollouts whose server is remembered
_NO_ANSWER = (0, 502, 503, 504)  # nobody is there, or a proxy says so
_FAULTS_IN_A_ROW = 3
_LONGEST_BACKOFF_S = 30.0


class Server:
    """One URL and what is under way there. A new `epoch` begins whenever it is lost."""

    def __init__(self, client: JsonClient) -> None:
        self.client = client
        self.outstanding = 0
        self.ready = True  # it answers, and holds what the engine says
        self.epoch = 0
        self.given_up = False  # it is back, and can never serve again in this run
        self.reason = ""  # why it does not serve
        self.faults = 0  # in a row
        self.tries = 0  # to take it back, since it was lost
        self.try_at = 0.0  # not before, while others serve
        self.returning: asyncio.Task[None] | None = None
        self.held_on: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.client.base_url

    async def ask_health(self) -> None:
        """Raises where nobody answers; a server without this page is alive all the same."""
        try:
            await self.client.get("/health")
        except HttpError as error:
            if error.again:
                raise

    async def is_paused(self) -> bool:
        """By its own pause, as vLLM has one in its development mode; HttpError: it has none."""
        answer = await self.client.get("/is_paused")
        if not isinstance(answer, dict) or "is_paused" not in answer:
            raise HttpError(f"{self.url}/is_paused: got {answer!r}, allowed: is_paused", 404)
        return bool(answer["is_paused"])

    async def has_own_pause(self) -> bool:
        """One that somebody left behind, who died in it, is ended: nothing would ever be answered."""
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
    """The least loaded takes a request; a rollout that goes on returns to its own.

    `come_back` returns when a server may serve again, and raises HttpError if it is to be tried later.
    `when_lost` ends what is under way there.
    """

    def __init__(
        self,
        clients: Sequence[JsonClient],
        come_back: Callable[[Server], Awaitable[None]],
        when_lost: Callable[[Server], None],
        backoff_s: float,
    ) -> None:
        self.all = [Server(client) for client in clients]
        self.owner: OrderedDict[str, Server] = OrderedDict()
        self._come_back, self._when_lost, self._backoff_s = come_back, when_lost, backoff_s

    @property
    def ready(self) -> list[Server]:
        return [server for server in self.all if server.ready]

    async def choose(self, request_id: str) -> Server:
        """The rollout's own server if it serves, else the least loaded; HttpError: there is none."""
        owner = self.owner.get(request_id)
        if owner is None or not owner.ready:
            owner = min(await self.some_ready(), key=lambda server: server.outstanding)
        self.owner[request_id] = owner
        self.owner.move_to_end(request_id)
        while len(self.owner) > _REMEMBERED:
            self.owner.popitem(last=False)
        return owner

    async def some_ready(self) -> list[Server]:
        """Those that serve. Lost ones are tried beside them; where none serves they are waited for."""
        now, others = asyncio.get_running_loop().time(), bool(self.ready)
        for server in self.all:
            due = not others or now >= server.try_at
            if due and not (server.ready or server.given_up or server.returning):
                server.returning = asyncio.create_task(self._return(server))
        if not others:
            waited = [server.returning for server in self.all if server.returning]
            if waited:
                await asyncio.wait(waited)
        if not self.ready:
            raise self._nobody()
        return self.ready

    def _nobody(self) -> HttpError:
        final = all(server.given_up for server in self.all)
        reasons = "; ".join(server.reason for server in self.all)
        return HttpError(f"no server answers: {reasons}", 410 if final else 0)

    async def _return(self, server: Server) -> None:
        epoch = server.epoch
        try:
            await self._come_back(server)
            if server.epoch != epoch:
                raise HttpError(f"{server.url}: it was lost again: {server.reason}")
            server.ready, server.tries, server.reason = True, 0, ""
            log.warning("engine openai: %s serves again", server.url)
        except HttpError as error:
            if error.again:
                self._later(server, error)
            else:
                self._give_up(server, error)
        except (EngineError, UserError) as error:
            self._give_up(server, error)
        finally:
            server.returning = None

    def _later(self, server: Server, error: HttpError) -> None:
        server.reason = str(error)
        wait = min(self._backoff_s * 2**server.tries, _LONGEST_BACKOFF_S)
        server.tries = min(server.tries + 1, 16)
        server.try_at = asyncio.get_running_loop().time() + wait

    def _give_up(self, server: Server, error: Exception) -> None:
        self._let_go(server)
        server.given_up = True
        server.reason = f"{server.url} was lost and is not used again: {error}"
        log.warning("engine openai: %s", server.reason)

    # ---- losing one

    def failed(self, request_id: str, server: Server, epoch: int, error: Exception) -> None:
        """The request goes elsewhere; a server that is not there, or only fails, is lost."""
        self.owner.pop(request_id, None)
        if not isinstance(error, HttpError) or server.epoch != epoch:
            return
        server.faults = server.faults + 1 if error.status >= 500 else 0
        if error.status in _NO_ANSWER or server.faults >= _FAULTS_IN_A_ROW:
            self.lose(server, str(error))

    def lose(self, server: Server, reason: str) -> None:
        """From now on nobody knows what it holds; what runs there ends."""
        if server.ready:
            log.warning("engine openai: %s is lost: %s", server.url, reason)
        server.ready, server.reason = False, reason
        server.epoch, server.faults = server.epoch + 1, 0
        self._let_go(server)
        self._when_lost(server)

    async def hold_on(self, server: Server) -> None:
        """Watch its process from now on: the system ends an idle connection with it."""
        if server.held_on is None:
            reader, writer = await server.client.connect()
            server.held_on = asyncio.create_task(self._watch(server, reader, writer))

    async def _watch(
        self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Consumes nothing; woken when the connection ends."""
        try:
            await reader.read(1)
            reason = "its connection ended"
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            writer.close()
        server.held_on = None
        self.lose(server, f"{server.url}: {reason}")

    def _let_go(self, server: Server) -> None:
        if server.held_on is not None:
            server.held_on.cancel()
            server.held_on = None

    # ---- all of them

    async def on_all(self, act: Callable[[Server], Awaitable[Any]]) -> None:
        """By every server that serves. One that does not answer is lost; any other fault rises, and
        so does the loss of the last one."""
        asked = self.ready
        epochs = [server.epoch for server in asked]
        outcomes = await asyncio.gather(*map(act, asked), return_exceptions=True)
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for server, epoch, outcome in zip(asked, epochs, outcomes, strict=True):
            if isinstance(outcome, HttpError) and outcome.status in _NO_ANSWER:
                faults.remove(outcome)
                if server.epoch == epoch:
                    self.lose(server, str(outcome))
        if faults:
            raise faults[0]
        if not self.ready:
            raise self._nobody()

    def begin(self) -> None:
        """All of them are there and serve, as at the start."""
        for server in self.all:
            self._let_go(server)
            if server.returning is not None:
                server.returning.cancel()
            server.ready, server.given_up, server.reason = True, False, ""
            server.epoch, server.faults, server.tries = server.epoch + 1, 0, 0

    async def close(self) -> None:
        tasks = [t for s in self.all for t in (s.held_on, s.returning) if t is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
