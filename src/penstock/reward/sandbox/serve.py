"""The verification server: runs solutions against tests for clients over HTTP.

    POST /check_correctness        {in_outs, generation, timeout} -> {result, metadata}
    POST /check_correctness_batch  {items: [...]}                 -> {items: [...]}
    GET  /healthz

At most `workers` submissions of a client run (of all clients, up to three times as many) and `queue_size` wait;
more get a 429. Clients take turns, fair by the processor time that their submissions have used; what a
connection may hold is bounded by `serving.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.config import Section
from penstock.config.secrets import from_environment
from penstock.errors import RewardError, SandboxError, UserError
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import (
    BATCH_ROUTE,
    ROUTE,
    TOKEN_VARIABLE,
    SandboxSettings,
)
from penstock.reward.sandbox.verify import verify
from penstock.serving import (
    AppServer,
    NoForeignPages,
    Shares,
    client_of,
    is_loopback,
    json_response,
    listen,
    make_app,
    read_body,
    stop_signal,
)

M = TypeVar("M", bound=BaseModel)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_SWITCH_INTERVAL_S = 0.0001  # a thread that copies an answer keeps the event loop waiting so long


class ServerSettings(Section):
    """Limits that the server sets for its clients."""

    sandbox: SandboxSettings = SandboxSettings()
    """Limits of the code that is run."""
    queue_size: int = Field(256, ge=0)
    """Submissions that may wait; more are answered with 429."""
    max_timeout_s: float = Field(60.0, gt=0)
    """Longest time per test that a client may ask for."""
    max_tests: int = Field(1000, ge=1)
    """Most tests of one submission."""
    max_generation_kb: int = Field(512, ge=1)
    """Longest solution."""
    max_body_mb: int = Field(8, ge=1)
    """Largest request."""
    max_bodies_mb: int = Field(64, ge=1)
    """Memory for the bodies of all requests together; more are answered with 503."""
    max_connections: int = Field(512, ge=1)
    """Most open connections; one client address gets at most half of them."""
    header_timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a request on an open connection."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Longest time for the body of a request."""
    hosts: tuple[str, ...] = ()
    """Names by which clients call this server, besides localhost, this machine's name and IP addresses."""
    max_batch: int = Field(256, ge=1)
    """Most submissions in one batch request."""


class CheckRequest(BaseModel):
    """One submission."""

    model_config = ConfigDict(extra="forbid")

    in_outs: dict[str, Any]
    generation: str
    timeout: float = Field(6.0, gt=0)
    stop_at_failure: bool = False
    eval_mode: bool = False
    """Run every test, also after a failure."""
    debug: bool = False
    """Accepted from clients of other servers; changes nothing."""


class BatchRequest(BaseModel):
    """Several submissions; each is answered on its own."""

    model_config = ConfigDict(extra="forbid")

    items: list[CheckRequest] = Field(min_length=1)


class VerificationService:
    """Consumes submissions, produces verdicts, within its bounds. `app` is its HTTP side."""

    def __init__(self, settings: ServerSettings, token: str = "") -> None:
        """Raises SandboxError if code may not run under these settings."""
        self.settings, self._token = settings, token
        self.pool = SandboxPool(settings.sandbox)
        self.level = self.pool.isolation.level
        workers = settings.sandbox.workers
        self._turns = Turns(workers, workers + settings.queue_size)
        self._threads = ThreadPoolExecutor(SHARES * workers, thread_name_prefix="verify")
        bodies_bytes = max(settings.max_bodies_mb, settings.max_body_mb) << 20
        self._bodies = Shares(bodies_bytes, bodies_bytes)
        self.served = 0
        self.app = make_app(
            [Route("/{path:path}", self._answer, methods=_METHODS)],
            middleware=[Middleware(NoForeignPages, hosts=settings.hosts)],
        )

    async def _answer(self, request: Request) -> Response:
        """Answer one request; refuse it before its body is read where that can be known."""
        path, client = request.scope["path"], client_of(request)
        if (request.method, path) == ("GET", "/healthz"):
            return json_response(self.health())
        if path not in (ROUTE, BATCH_ROUTE):
            raise HTTPException(404, f"path: allowed: {ROUTE}, {BATCH_ROUTE}, /healthz")
        if request.method != "POST":
            raise HTTPException(405, "method: allowed: POST")
        self._check_sender(request)
        with self._turns.places(client, 1), self._memory(client, self._size(request)):
            data = await read_body(
                request,
                most_bytes=self.settings.max_body_mb << 20,
                within_s=self.settings.body_timeout_s,
            )
            if path == ROUTE:
                return json_response(await self._check(request, _parse(CheckRequest, data)))
            items = _parse(BatchRequest, data).items
            if len(items) > self.settings.max_batch:
                allowed = self.settings.max_batch
                raise HTTPException(413, f"items: got {len(items)}, allowed: up to {allowed}")
            with self._turns.places(client, len(items) - 1):
                checks = (self._check_item(request, item) for item in items)
                return json_response({"items": await asyncio.gather(*checks)})

    def _check_sender(self, request: Request) -> None:
        if self._token:
            authorization = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
                raise HTTPException(401, "authorization: allowed: the server's bearer token")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "content-type: allowed: application/json")

    def _size(self, request: Request) -> int:
        """The size that the body will have."""
        if "transfer-encoding" in request.headers:
            reason = "transfer-encoding: got one, allowed: none, and a content-length"
            raise HTTPException(411, reason)
        if "content-length" not in request.headers:
            raise HTTPException(411, "content-length: got none, allowed: the size of the body")
        size = int(request.headers["content-length"])
        if size > self.settings.max_body_mb << 20:
            raise HTTPException(413, f"body: allowed: up to {self.settings.max_body_mb} MiB")
        return size

    @contextlib.contextmanager
    def _memory(self, client: str, size: int) -> Iterator[None]:
        """Hold memory for a body of this size, or refuse it."""
        if not self._bodies.take(client, size):
            raise HTTPException(503, "body: allowed: no more bodies now")
        try:
            yield
        finally:
            self._bodies.give_back(client, size)

    async def _check_item(self, sender: Request, item: CheckRequest) -> dict[str, Any]:
        """The verdict of one submission of a batch, or `error` with `status`."""
        try:
            return await self._check(sender, item)
        except HTTPException as refusal:
            return {"error": refusal.detail, "status": refusal.status_code}

    async def _check(self, sender: Request, request: CheckRequest) -> dict[str, Any]:
        """The verdict of an admitted submission."""
        client = client_of(sender)
        try:
            self._check_limits(request)
            async with self._turns.turn(client):
                if await sender.is_disconnected():
                    raise HTTPException(408, "the client has left")
                verdict = await asyncio.get_running_loop().run_in_executor(
                    self._threads,
                    verify,
                    self.pool,
                    request.in_outs,
                    request.generation,
                    request.timeout,
                    request.stop_at_failure and not request.eval_mode,
                    self.settings.max_tests,
                )
                self._turns.charge(client, verdict.cpu_s)
        except SandboxError as error:
            raise HTTPException(503, str(error)) from None
        except RewardError as error:
            raise HTTPException(422, str(error)) from None
        finally:
            self.served += 1
        return {"result": verdict.result, "metadata": verdict.metadata}

    def _check_limits(self, request: CheckRequest) -> None:
        longest_s, longest = self.settings.max_timeout_s, self.settings.max_generation_kb << 10
        if request.timeout > longest_s:
            raise HTTPException(
                422, f"timeout: got {request.timeout:g}, allowed: up to {longest_s:g}"
            )
        if (size := len(request.generation)) > longest:
            raise HTTPException(413, f"generation: got {size} characters, allowed: up to {longest}")

    def health(self) -> dict[str, Any]:
        admitted, workers = self._turns.admitted, self.settings.sandbox.workers
        return {
            "status": "ok",
            "isolation": self.level,
            "running": min(admitted, workers),
            "waiting": max(0, admitted - workers),
            "served": self.served,
        }

    async def close(self) -> None:
        """End every process; running submissions are answered with 503."""
        self._turns.close()
        await asyncio.to_thread(self.pool.close)
        await asyncio.to_thread(self._threads.shutdown, wait=True)


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise HTTPException(422, f"{where}: {first['msg']}") from None


async def serve_on(
    listening: socket.socket, service: VerificationService, stopped: asyncio.Event
) -> None:
    """Serve on a socket until `stopped` is set, then end every submission."""
    connections = service.settings.max_connections
    server = AppServer(
        service.app,
        connections=connections,
        connections_per_client=max(1, connections // 2),
        silent_s=service.settings.header_timeout_s,
    )
    await server.start(listening)
    try:
        await stopped.wait()
    finally:
        await service.close()
        await server.close()


def serve(
    host: str = "127.0.0.1",
    port: int = 8080,
    token_variable: str = TOKEN_VARIABLE,
    settings: ServerSettings | None = None,
) -> None:
    """Run the server until it is stopped. Without a token it listens on this machine only."""
    settings = settings or ServerSettings()
    token = from_environment("--token-variable", token_variable, default=TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        raise UserError(
            f"sandbox serve: host got {host!r} without a token, allowed: 127.0.0.1, or a token "
            f"in the environment variable {token_variable}"
        )
    service = VerificationService(settings, token)
    try:
        listening = listen(host, port)
    except OSError as error:
        service.pool.close()
        raise UserError(f"sandbox serve: host {host!r}, port {port}: {error.strerror}") from None
    print(f"verification server: http://{host}:{listening.getsockname()[1]} ", end="")
    print(f"isolation {service.level}, {settings.sandbox.workers} workers", flush=True)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()  # a collection of all modules' objects would hold every request up for 10 ms

    async def main() -> None:
        await serve_on(listening, service, stop_signal())

    with listening:
        asyncio.run(main())


# -- whose submission runs next -----------------------------------------------------------------


REMEMBERED_S = 60.0  # a client takes part until so long after its last submission
SHARES = 3  # clients that can have all their submissions running at once
START_S = 0.02  # processor time of the start and end of a sandbox


@dataclass(slots=True)
class _Client:
    used_s: float  # processor time of its submissions
    seen: float = 0.0  # when it last came
    admitted: int = 0
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Turns:
    """Gives out turns to run a submission, one client after the other."""

    def __init__(self, workers: int, places: int) -> None:
        self._workers, self._places = workers, places
        self._clients: dict[str, _Client] = {}  # by their addresses
        self._closed = False

    @property
    def admitted(self) -> int:
        """How many submissions run or wait."""
        return sum(client.admitted for client in self._clients.values())

    def _client(self, address: str) -> _Client:
        """A client, which takes part from now on; those that no longer do are forgotten."""
        now = time.monotonic()
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.admitted or client.running or now - client.seen <= REMEMBERED_S
        }
        least = min((client.used_s for client in self._clients.values()), default=0.0)
        client = self._clients.setdefault(address, _Client(least))  # no credit for time away
        client.seen = now
        return client

    def room(self, address: str) -> int:
        """How many more submissions this client may hand in now."""
        free = self._places - self._client(address).admitted
        if len(self._clients) > 1:
            free -= self._places // 2
        return max(0, min(free, self._places - self.admitted))

    @contextlib.contextmanager
    def places(self, address: str, count: int) -> Iterator[None]:
        """Hold places for `count` submissions, or refuse them all."""
        room, client = self.room(address), self._client(address)
        if count > room:
            raise HTTPException(429, f"the queue is full: got {count}, allowed: {room} now")
        client.admitted += count
        try:
            yield
        finally:
            client.admitted -= count

    @contextlib.asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait for this client's turn, and hold it; SandboxError if the server closes meanwhile."""
        client, turn = self._client(address), asyncio.get_running_loop().create_future()
        client.waiting.append(turn)
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(client, 0.0)
            raise
        try:
            if self._closed:
                raise SandboxError("sandbox: the server is closing")
            yield
        finally:
            self._free(client, START_S)

    def charge(self, address: str, used_s: float) -> None:
        """Add processor time that a submission of this client has used."""
        self._client(address).used_s += used_s

    def _free(self, client: _Client, used_s: float) -> None:
        client.running -= 1
        client.used_s += used_s
        self._wake()

    def _wake(self) -> None:
        """Give free workers to the clients that have used least."""
        clients = self._clients.values()
        while sum(c.running for c in clients) < self._workers * min(SHARES, len(clients)):
            ready = [c for c in clients if c.waiting and c.running < self._workers]
            if not ready:
                return
            client = min(ready, key=lambda c: (c.running, c.used_s))
            turn = client.waiting.popleft()
            if not turn.done():
                client.running += 1
                turn.set_result(None)

    def close(self) -> None:
        """Let every later turn raise SandboxError."""
        self._closed = True
