"""The verification server: runs solutions against tests for clients over HTTP.

    POST /check_correctness        {in_outs, generation, timeout} -> {result, metadata}
    POST /check_correctness_batch  {items: [...]}                 -> {items: [...]}
    GET  /healthz

At most `workers` submissions run and `queue_size` wait; more get a 429. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config import Section
from penstock.config.secrets import from_environment
from penstock.errors import RewardError, SandboxError, UserError
from penstock.sandbox.client import TOKEN_VARIABLE
from penstock.sandbox.pool import SandboxPool
from penstock.sandbox.settings import SandboxSettings
from penstock.sandbox.testcases import AssertTests, read_tests
from penstock.sandbox.verify import verify

if TYPE_CHECKING:
    from fastapi import FastAPI

RETRY_AFTER_S = 1


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
    max_body_mb: int = Field(32, ge=1)
    """Largest request."""
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


class Refusal(Exception):
    """A refused request: an HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class VerificationService:
    """Consumes submissions, produces verdicts, within its bounds; knows nothing of HTTP."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.pool = SandboxPool(settings.sandbox)
        self._threads = ThreadPoolExecutor(settings.sandbox.workers, thread_name_prefix="verify")
        self._in_flight = 0
        self.served = 0

    def admit(self, count: int) -> None:
        """Admit `count` submissions, or refuse them all."""
        room = self.settings.sandbox.workers + self.settings.queue_size - self._in_flight
        if count > room:
            raise Refusal(429, f"the queue is full: got {count}, allowed: {max(0, room)} now")
        self._in_flight += count

    async def check(self, request: CheckRequest) -> dict[str, Any]:
        """Return the verdict of an admitted submission, or `error` with `status`."""
        try:
            self._check_limits(request)
            loop = asyncio.get_running_loop()
            verdict = await loop.run_in_executor(
                self._threads,
                verify,
                self.pool,
                request.in_outs,
                request.generation,
                request.timeout,
                request.stop_at_failure and not request.eval_mode,
            )
            return {"result": verdict.result, "metadata": verdict.metadata}
        except Refusal as refusal:
            return {"error": str(refusal), "status": refusal.status}
        except SandboxError as error:
            return {"error": str(error), "status": 503}
        except RewardError as error:
            return {"error": str(error), "status": 422}
        finally:
            self._in_flight -= 1
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
        tests = read_tests(request.in_outs)
        if not isinstance(tests, AssertTests) and len(tests.inputs) > settings.max_tests:
            raise Refusal(
                422, f"in_outs: got {len(tests.inputs)} tests, allowed: up to {settings.max_tests}"
            )

    def health(self) -> dict[str, Any]:
        workers = self.settings.sandbox.workers
        return {
            "status": "ok",
            "isolation": self.pool.isolation.level,
            "running": min(self._in_flight, workers),
            "waiting": max(0, self._in_flight - workers),
            "served": self.served,
        }

    async def close(self) -> None:
        """End every process; running submissions are answered with 503."""
        await asyncio.to_thread(self.pool.close)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)


def create_app(settings: ServerSettings | None = None, token: str = "") -> FastAPI:
    """Return the application. Raises SandboxError if code may not run under these settings."""
    try:
        from fastapi import FastAPI, Request, Response
        from fastapi.responses import JSONResponse
    except ImportError:
        raise UserError(
            "sandbox serve: fastapi is not installed, allowed: pip install 'penstock[serve]'"
        ) from None
    service = VerificationService(settings or ServerSettings())
    level = service.pool.isolation.level

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="Penstock sandbox", lifespan=lifespan, openapi_url=None)
    app.state.service = service
    app.state.level = level

    def refused(status: int, reason: str) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else {}
        return JSONResponse({"error": reason}, status, headers)

    async def check_correctness(request: Request) -> Response:
        try:
            submission = await _read(request, CheckRequest, service.settings, token)
            service.admit(1)
        except Refusal as refusal:
            return refused(refusal.status, str(refusal))
        reply = await service.check(submission)
        if "error" in reply:
            return refused(reply["status"], reply["error"])
        return JSONResponse(reply)

    async def check_correctness_batch(request: Request) -> Response:
        try:
            batch = await _read(request, BatchRequest, service.settings, token)
            if len(batch.items) > service.settings.max_batch:
                allowed = service.settings.max_batch
                raise Refusal(413, f"items: got {len(batch.items)}, allowed: up to {allowed}")
            service.admit(len(batch.items))
        except Refusal as refusal:
            return refused(refusal.status, str(refusal))
        replies = await asyncio.gather(*(service.check(item) for item in batch.items))
        return JSONResponse({"items": replies})

    async def healthz() -> Response:
        return JSONResponse(service.health())

    for function in (check_correctness, check_correctness_batch):
        function.__annotations__["request"] = Request  # a name that FastAPI cannot look up here
        app.add_api_route(f"/{function.__name__}", function, methods=["POST"], response_model=None)
    app.add_api_route("/healthz", healthz, methods=["GET"], response_model=None)
    return app


async def _read(request: Any, model: type[Any], settings: ServerSettings, token: str) -> Any:
    """Check token, content type and size of a request, then parse it."""
    if token:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise Refusal(401, "authorization: allowed: the server's bearer token")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refusal(415, "content-type: allowed: application/json")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > settings.max_body_mb << 20:
            raise Refusal(413, f"body: allowed: up to {settings.max_body_mb} MiB")
        chunks.append(chunk)
    try:
        return model.model_validate_json(b"".join(chunks))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise Refusal(422, f"{where}: {first['msg']}") from None


def serve(
    host: str = "127.0.0.1",
    port: int = 8080,
    token_variable: str = TOKEN_VARIABLE,
    settings: ServerSettings | None = None,
) -> None:
    """Run the server until it is stopped. Without a token it listens on this machine only."""
    settings = settings or ServerSettings()
    token = from_environment("--token-variable", token_variable, default=TOKEN_VARIABLE)
    if not token and not _is_loopback(host):
        raise UserError(
            f"sandbox serve: host got {host!r} without a token, allowed: 127.0.0.1, or a token "
            f"in the environment variable {token_variable}"
        )
    app = create_app(settings, token)
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="info")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
