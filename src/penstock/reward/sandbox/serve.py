"""The verification server: runs solutions against tests for clients over HTTP.

    POST /check_correctness        {in_outs, generation, timeout} -> {result, metadata}
    POST /check_correctness_batch  {items: [...]}                 -> {items: [...]}
    GET  /healthz

At most `workers` submissions of a client run (of all clients, up to three times as many) and `queue_size` wait; more get a 429.
Clients take turns (`turns.py`); what a connection may hold is bounded by `listener.py`.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import ipaddress
import signal
import socket
import sys
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config import Section
from penstock.config.secrets import from_environment
from penstock.errors import RewardError, SandboxError, UserError
from penstock.reward.sandbox.client import TOKEN_VARIABLE
from penstock.reward.sandbox.listener import Listener, ListenerLimits, Refusal, Request
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.reward.sandbox.turns import Turns
from penstock.reward.sandbox.verify import Verdict, verify

M = TypeVar("M", bound=BaseModel)
_SWITCH_INTERVAL_S = 0.0001  # a thread that copies an answer keeps the event loop waiting so long
NICE_IF_AHEAD = 10  # of the processes of a client that has used more than its share


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
    """Consumes submissions, produces verdicts, within its bounds."""

    def __init__(self, settings: ServerSettings, token: str = "") -> None:
        """Raises SandboxError if code may not run under these settings."""
        self.settings, self._token = settings, token
        self.pool = SandboxPool(settings.sandbox)
        self.level = self.pool.isolation.level
        workers = settings.sandbox.workers
        self._turns = Turns(workers, workers + settings.queue_size)
        self.served = 0

    def limits(self) -> ListenerLimits:
        """Return what a connection may hold."""
        settings = self.settings
        return ListenerLimits(
            connections=settings.max_connections,
            connections_per_client=max(1, settings.max_connections // 2),
            header_s=settings.header_timeout_s,
            body_s=settings.body_timeout_s,
            body_bytes=settings.max_body_mb << 20,
            all_bodies_bytes=max(settings.max_bodies_mb, settings.max_body_mb) << 20,
            hosts=settings.hosts,
        )

    async def answer(self, request: Request) -> dict[str, Any]:
        """Answer one request; raise Refusal before its body is read where that can be known."""
        if (request.method, request.path) == ("GET", "/healthz"):
            return self.health()
        batch = request.path == "/check_correctness_batch"
        if not batch and request.path != "/check_correctness":
            raise Refusal(
                404, "path: allowed: /check_correctness, /check_correctness_batch, /healthz"
            )
        if request.method != "POST":
            raise Refusal(405, "method: allowed: POST")
        self._check_sender(request)
        admitted = self._admit(request.client, 1)
        try:
            data = await request.read_body()
            if not batch:
                reply = await self._check(request, _parse(CheckRequest, data))
                if "error" in reply:
                    raise Refusal(reply["status"], reply["error"])
                return reply
            items = _parse(BatchRequest, data).items
            if len(items) > self.settings.max_batch:
                allowed = self.settings.max_batch
                raise Refusal(413, f"items: got {len(items)}, allowed: up to {allowed}")
            admitted += self._admit(request.client, len(items) - 1)
            checks = (self._check(request, item) for item in items)
            return {"items": await asyncio.gather(*checks)}
        finally:
            self._turns.dismiss(request.client, admitted)

    def _check_sender(self, request: Request) -> None:
        if self._token:
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                raise Refusal(401, "authorization: allowed: the server's bearer token")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refusal(415, "content-type: allowed: application/json")

    def _admit(self, client: str, count: int) -> int:
        """Admit `count` submissions, or refuse them all; return the number."""
        room = self._turns.room(client)
        if count > room:
            raise Refusal(429, f"the queue is full: got {count}, allowed: {room} now")
        self._turns.admit(client, count)
        return count

    async def _check(self, sender: Request, request: CheckRequest) -> dict[str, Any]:
        """Return the verdict of an admitted submission, or `error` with `status`."""

        def check_client() -> None:
            if sender.has_left():
                raise Refusal(408, "the client has left")

        def run() -> Verdict:
            check_client()
            stop = request.stop_at_failure and not request.eval_mode
            return verify(
                self.pool,
                request.in_outs,
                request.generation,
                request.timeout,
                stop,
                self.settings.max_tests,
                NICE_IF_AHEAD if self._turns.is_ahead(sender.client) else 0,
            )

        try:
            check_client()  # here it costs no turn
            self._check_limits(request)
            verdict = await self._turns.run(sender.client, run)
            self._turns.charge(sender.client, verdict.cpu_s)
            return {"result": verdict.result, "metadata": verdict.metadata}
        except Refusal as refusal:
            return {"error": str(refusal), "status": refusal.status}
        except SandboxError as error:
            return {"error": str(error), "status": 503}
        except RewardError as error:
            return {"error": str(error), "status": 422}
        finally:
            self.served += 1

    def _check_limits(self, request: CheckRequest) -> None:
        settings = self.settings
        if request.timeout > settings.max_timeout_s:
            raise Refusal(
                422, f"timeout: got {request.timeout:g}, allowed: up to {settings.max_timeout_s:g}"
            )
        if len(request.generation) > settings.max_generation_kb << 10:
            raise Refusal(
                413,
                f"generation: got {len(request.generation)} characters, "
                f"allowed: up to {settings.max_generation_kb << 10}",
            )

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
        await asyncio.to_thread(self.pool.close)
        await self._turns.close()


def _parse(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refusal(422, f"{where}: {first['msg']}") from None


async def serve_on(
    listening: socket.socket, service: VerificationService, stopped: asyncio.Event
) -> None:
    """Serve on a socket until `stopped` is set, then end every submission."""
    listener = Listener(service.answer, service.limits())
    await listener.start(listening)
    try:
        await stopped.wait()
    finally:
        await service.close()
        await listener.close()


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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        service.pool.close()
        raise UserError(f"sandbox serve: host {host!r}, port {port}: {error.strerror}") from None
    print(f"verification server: http://{host}:{listening.getsockname()[1]} ", end="")
    print(f"isolation {service.level}, {settings.sandbox.workers} workers", flush=True)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()  # a collection of all modules' objects would hold every request up for 10 ms
    with listening:
        asyncio.run(_until_signal(listening, service))


async def _until_signal(listening: socket.socket, service: VerificationService) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve_on(listening, service, stopped)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
