"""Apps that are served in this process: limits per client, silent connections, and a stop that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.errors import UserError
from penstock.serving import (
    AppServer,
    Shares,
    is_loopback,
    listen,
    make_app,
    read_body,
    run_until_stopped,
    url_of,
)

HEAD = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
Main = Callable[[AppServer, int], Awaitable[None]]


async def endless() -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


async def answer(request: Request) -> Response:
    body = await read_body(request, most_bytes=1 << 20, within_s=0.1)
    return JSONResponse({"size": len(body)})


async def refuse(request: Request) -> Response:
    raise HTTPException(429, "full")


async def fail(request: Request) -> Response:
    raise ZeroDivisionError


async def stream(request: Request) -> Response:
    return StreamingResponse(endless(), media_type="text/plain")


def serve(main: Main, *, connections: int = 8, each: int = 8, silent_s: float = 60) -> None:
    async def run() -> None:
        routes = [Route(f"/{view.__name__}", view) for view in (refuse, fail, stream)]
        routes.append(Route("/answer", answer, methods=["GET", "POST"]))
        server = AppServer(
            make_app(routes),
            connections=connections,
            connections_per_client=each,
            silent_s=silent_s,
        )
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with server.on(listening, grace_s=0.1):
                await asyncio.wait_for(main(server, listening.getsockname()[1]), 60)

    asyncio.run(run())


async def connect(
    port: int, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def ask(port: int, path: bytes, data: bytes = b"") -> bytes:
    """Return the status and the rest of the first response."""
    reader, writer = await connect(port)
    writer.write(data or HEAD % path)
    status = (await reader.readuntil(b"\r\n"))[9:12]
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
    body = await reader.readexactly(size)
    writer.close()
    return status + b" " + body


def test_requests_are_answered_and_refusals_are_json(caplog: pytest.LogCaptureFixture) -> None:
    async def main(server: AppServer, port: int) -> None:
        assert await ask(port, b"answer") == b'200 {"size":0}'
        assert await ask(port, b"refuse") == b'429 {"error": "full"}'
        assert (await ask(port, b"nothing"))[:3] == b"404"
        assert caplog.records == []
        assert await ask(port, b"fail") == b'500 {"error": "the server failed"}'
        assert [record.message for record in caplog.records] == ["the server failed a request"]

    serve(main)


def test_a_request_needs_no_host() -> None:
    async def main(server: AppServer, port: int) -> None:
        assert await ask(port, b"", b"GET /answer HTTP/1.1\r\n\r\n") == b'200 {"size":0}'

    serve(main)


def test_bodies_are_bounded_in_size_and_time() -> None:
    async def main(server: AppServer, port: int) -> None:
        head = b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        assert (await ask(port, b"", head % (2 << 20) + b"x" * (2 << 20)))[:3] == b"413"
        assert (await ask(port, b"", head % 10 + b"x"))[:3] == b"408"

    serve(main)


def test_a_silent_connection_is_cut_before_and_after_a_request() -> None:
    async def main(server: AppServer, port: int) -> None:
        for sent in (b"", b"GET /answer HT", HEAD % b"answer"):
            reader, writer = await connect(port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the end
            writer.close()

    serve(main, silent_s=0.05)


def test_connections_are_bounded_in_all_and_per_client() -> None:
    async def main(server: AppServer, port: int) -> None:
        held = [await connect(port, f"127.0.0.{number}") for number in (2, 2, 3)]
        for reader, writer in held:
            writer.write(HEAD % b"answer")
            await reader.readuntil(b"\r\n")  # it is served
        second, other = await connect(port, "127.0.0.2"), await connect(port, "127.0.0.3")
        assert (await second[0].readuntil(b"\r\n"))[9:12] == b"503"
        other[1].write(HEAD % b"answer")
        assert (await other[0].readuntil(b"\r\n"))[9:12] == b"200"
        late = await connect(port, "127.0.0.4")
        assert (await late[0].readuntil(b"\r\n"))[9:12] == b"503"
        for _, writer in (*held, second, other, late):
            writer.close()

    serve(main, connections=4, each=2)


def test_a_stop_cuts_streams_and_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main(server: AppServer, port: int) -> None:
        idle, streaming = await connect(port), await connect(port)
        streaming[1].write(HEAD % b"stream")
        await streaming[0].readuntil(b"first")
        await server.close(grace_s=0.01)
        for reader, writer in (idle, streaming):
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert caplog.records == []

    serve(main)


def test_shares_come_back() -> None:
    shares = Shares(total=10, each=6)
    assert shares.take("a", 6)
    assert not shares.take("a", 1)
    assert shares.take("b", 4)
    assert (shares.left("b"), shares.left("c"), shares.in_use) == (0, 0, 10)
    shares.give_back("a", 6)
    assert (shares.left("b"), shares.left("c"), shares.in_use) == (2, 6, 4)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_each_server_names_itself_and_a_free_port_when_its_port_is_taken() -> None:
    with listen("first", "127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=rf"serve: host '127.0.0.1', port {port}: .*free port"):
            listen("serve", "127.0.0.1", port)


def test_an_address_of_version_6_has_brackets_in_its_url() -> None:
    with listen("test", "127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert url_of("127.0.0.1", listening) == f"http://127.0.0.1:{port}"
        assert url_of("::1", listening) == f"http://[::1]:{port}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_that_serves(number: signal.Signals) -> None:
    ended = []

    async def serve(stopped: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stopped.wait(), 60)
        ended.append(number)

    run_until_stopped(serve)
    assert ended == [number]
