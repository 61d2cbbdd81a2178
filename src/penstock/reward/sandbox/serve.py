"""The verification server: runs solutions against tests for clients over HTTP.

    POST /check_correctness        {in_outs, generation, timeout} -> {result, metadata}
    POST /check_correctness_batch  {items: [...]}                 -> {items: [...]}
    GET  /healthz

At most `workers` submissions run and `queue_size` wait; more get a 429. Clients take turns, one submission
each; what a connection may hold is bounded by `serving.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
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
    run_until_stopped,
    url_of,
)

M = TypeVar("M", bound=BaseModel)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_SWITCH_INTERVAL_S = 0.0001  # a thread that copies an answer keeps the event loop waiting so long


class ServerSettings(Section):
    """Limits that the server sets for its clients."""

    sandbox: SandboxSettings = SandboxSettings()
    """Limits of the code that is run."""
    queue_size: int = Field(512, ge=0)
    """Submissions that may wait, at most about half of them from one client; more are answered with 429."""
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
        places = workers + settings.queue_size
        self._places = Shares(places, max(workers, places // 2))
        self._turns = Turns(workers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
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
        if self._token:
            authorization = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(authorization, f"Bearer {self._token}".encode()):
                raise HTTPException(401, "authorization: allowed: the server's bearer token")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "content-type: allowed: application/json")
        refusal = HTTPException(503, "body: allowed: no more bodies now")
        with self._place(client, 1), _hold(self._bodies, client, self._size(request), refusal):
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
            with self._place(client, len(items) - 1):
                checks = (self._check_item(request, item) for item in items)
                return json_response({"items": await asyncio.gather(*checks)})

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

    def _place(self, client: str, count: int) -> AbstractContextManager[None]:
        """Hold places in the queue for `count` submissions, or refuse them all."""
        room = self._places.left(client)
        refusal = HTTPException(429, f"the queue is full: got {count}, allowed: {room} now")
        return _hold(self._places, client, count, refusal)

    async def _check_item(self, sender: Request, item: CheckRequest) -> dict[str, Any]:
        """The verdict of one submission of a batch, or `error` with `status`."""
        try:
            return await self._check(sender, item)
        except HTTPException as refusal:
            return {"error": refusal.detail, "status": refusal.status_code}

    async def _check(self, sender: Request, request: CheckRequest) -> dict[str, Any]:
        """The verdict of an admitted submission."""
        try:
            self._check_limits(request)
            async with self._turns.turn(client_of(sender)):
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
        admitted, workers = self._places.in_use, self.settings.sandbox.workers
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


@contextlib.contextmanager
def _hold(shares: Shares, client: str, amount: int, refusal: HTTPException) -> Iterator[None]:
    if not shares.take(client, amount):
        raise refusal
    try:
        yield
    finally:
        shares.give_back(client, amount)


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
    async with server.on(listening):
        try:
            await stopped.wait()
        finally:
            await service.close()


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
    with listen("sandbox serve", host, port) as listening:
        service = VerificationService(settings, token)
        print(f"verification server: {url_of(host, listening)} ", end="")
        print(f"isolation {service.level}, {settings.sandbox.workers} workers", flush=True)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.freeze()  # a collection of all modules' objects would hold every request up for 10 ms
        run_until_stopped(lambda stopped: serve_on(listening, service, stopped))


# -- whose submission runs next -----------------------------------------------------------------


class Turns:
    """Gives out turns to run: clients that wait take turns, one submission each."""

    def __init__(self, workers: int) -> None:
        self._free = workers
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by address; the first is next
        self._closed = False

    @contextlib.asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait for this client's turn, and hold it; SandboxError if the server closes meanwhile."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        self._wake()
        try:
            await turn
            if self._closed:
                raise SandboxError("sandbox: the server is closing")
            yield
        finally:
            if not turn.cancelled():
                self._free += 1
                self._wake()

    def _wake(self) -> None:
        """Give free workers to the clients whose turn it is."""
        while self._free and self._waiting:
            address = next(iter(self._waiting))
            line = self._waiting.pop(address)
            turn = line.popleft()
            if line:
                self._waiting[address] = line  # behind all others
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def close(self) -> None:
        """Let every later turn raise SandboxError."""
        self._closed = True
