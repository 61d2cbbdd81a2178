"""What a client of the verification server takes from others: rounds of its event loop, and the processor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.reward.sandbox import pool
from penstock.reward.sandbox.host import Mode
from penstock.reward.sandbox.layers import Isolation
from penstock.reward.sandbox.links import Client, Link, Waste
from penstock.reward.sandbox.listener import Listener, ListenerLimits, Refusal, Request
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings, job_limits
from penstock.reward.sandbox.verify import verify
from stages.sandbox_pools import make_pool

LIMITS = ListenerLimits(
    connections=64,
    connections_per_client=40,
    header_s=60,
    body_s=60,
    body_bytes=1 << 20,
    all_bodies_bytes=1 << 20,
)
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
GOOD, GREEDY = "127.0.0.1", "127.0.0.2"


def order_of_service(
    send: Callable[[list[socket.socket], socket.socket], None], number: int
) -> list[str]:
    """Return whose requests were served, in order: of one client with many connections, and of another."""
    served: list[str] = []
    all_served = asyncio.Event()

    async def answer(request: Request) -> dict[str, Any]:
        served.append(request.client)
        if len(served) == number:
            all_served.set()
        return {}

    async def run() -> None:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            listener = Listener(answer, LIMITS)
            await listener.start(listening)
            links = [
                stack.enter_context(
                    socket.create_connection(listening.getsockname(), 60, (address, 0))
                )
                for address in [GREEDY] * 30 + [GOOD]
            ]
            for _ in range(200):  # until every connection waits for a request
                await asyncio.sleep(0)
            send(links[:-1], links[-1])
            await asyncio.wait_for(all_served.wait(), 60)
            await listener.close()

    asyncio.run(run())
    return served


def test_a_request_waits_for_few_of_another_client_that_are_ready_too() -> None:
    def send(greedy: list[socket.socket], good: socket.socket) -> None:
        for link in (*greedy, good):
            link.sendall(HEAD)

    assert order_of_service(send, 31).index(GOOD) < 6


def test_requests_that_came_in_one_piece_take_turns_too() -> None:
    def send(greedy: list[socket.socket], good: socket.socket) -> None:
        greedy[0].sendall(HEAD * 200)
        good.sendall(HEAD)

    assert order_of_service(send, 201).index(GOOD) < 6


def test_who_wastes_connections_waits_for_each_past_a_few() -> None:
    now = [100.0]
    waste = Waste(0.01, lambda: now[0])
    for _ in range(50):
        waste.add(GREEDY)
    assert waste.wait_s(GREEDY) == pytest.approx(0)
    for _ in range(50):
        waste.add(GREEDY)
    assert waste.wait_s(GREEDY) == pytest.approx(0.5)
    assert waste.wait_s(GOOD) == 0
    now[0] += 0.4
    assert waste.wait_s(GREEDY) == pytest.approx(0.1)
    now[0] += 60
    assert waste.wait_s(GREEDY) == 0


def test_no_waste_makes_an_address_wait_for_more_than_five_seconds() -> None:
    """Good clients may call from the same address."""
    now = [100.0]
    waste = Waste(0.01, lambda: now[0])
    for _ in range(100_000):
        waste.add(GREEDY)
    assert waste.wait_s(GREEDY) == pytest.approx(5)
    now[0] += 5
    assert waste.wait_s(GREEDY) == pytest.approx(0)


def test_no_number_of_clients_takes_all_memory_by_their_waste() -> None:
    now = [100.0]
    waste = Waste(1.0, lambda: now[0])
    for number in range(5000):
        waste.add(str(number))
    assert len(waste._until) == 1024
    assert waste.wait_s("0") == 0.5
    now[0] += 60  # all have waited
    waste.add(GREEDY)
    assert waste._until.keys() == {GREEDY}


async def ask(port: int, address: str, data: bytes) -> bytes:
    """Return the reply to `data` on a new connection; empty if it was cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("first", "waits"),
    [(b"GARBAGE\r\n\r\n", True), (b"", True), (HEAD, False)],
    ids=["no request", "nothing", "a request that cannot be granted"],
)
def test_a_client_that_wasted_connections_waits_and_others_do_not(
    first: bytes, waits: bool
) -> None:
    answered: list[str] = []

    async def answer(request: Request) -> dict[str, Any]:
        answered.append(request.client)
        raise Refusal(422, "the tests are broken")

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(answer, replace(LIMITS, waste_s=3600))
            await listener.start(listening)
            port = listening.getsockname()[1]
            await ask(port, GREEDY, first)
            answered.clear()
            second = asyncio.create_task(ask(port, GREEDY, HEAD))
            assert b" 422 " in await ask(port, GOOD, HEAD)
            assert waits or b" 422 " in await second
            await listener.close()
            assert bool(await second) != waits

    asyncio.run(run())
    assert sorted(answered) == ([GOOD] if waits else [GOOD, GREEDY])


def on_a_link(use: Callable[[Link, socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            theirs = socket.create_connection(listening.getsockname(), 60)
            ours, _ = listening.accept()
        ours.setblocking(False)
        client = Client(GOOD)
        try:
            with theirs, ours:
                await use(Link(ours, client), theirs)
        finally:
            client.close()

    asyncio.run(run())


def test_who_waits_for_a_reply() -> None:
    async def use(link: Link, theirs: socket.socket) -> None:
        assert not link.has_left()
        theirs.shutdown(socket.SHUT_WR)
        assert not link.has_left()  # all is sent, the reply is awaited
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        assert link.has_left()
        link.socket.close()
        assert link.has_left()

    on_a_link(use)


def test_more_than_the_kernel_takes_at_once_is_sent_and_read_whole() -> None:
    data = bytes(range(256)) * (1 << 16)

    async def use(link: Link, theirs: socket.socket) -> None:
        theirs.settimeout(60)
        sending = asyncio.create_task(link.send(data))
        got = bytearray()
        while len(got) < len(data):
            got += await asyncio.to_thread(theirs.recv, 1 << 20)
        await sending
        assert got == data
        sender = threading.Thread(target=theirs.sendall, args=(b"ab\n" + data,))
        sender.start()
        assert await link.read_until(b"\n", 100) == b"ab\n"
        got.clear()
        while len(got) < len(data):
            got += await link.read_some(len(data) - len(got), wait=False)
        sender.join()
        assert got == data
        theirs.sendall(b"x" * 100)
        with pytest.raises(ValueError):
            await link.read_until(b"\n", 100)

    on_a_link(use)


class FakeSandbox:
    facts, is_ready = True, True

    def stop(self) -> None:
        pass

    def end(self) -> None:
        pass


class FakeNursery:
    """Makes sandboxes of nothing and counts them."""

    alive = True

    def __init__(self) -> None:
        self.number, self._lock = 0, threading.Lock()

    def spawn(self) -> FakeSandbox:
        with self._lock:
            self.number += 1
        return FakeSandbox()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("pause_s", "ready"), [(0.0, pool.WARM + pool.SPARE), (3600.0, pool.FEW + 1)]
)
def test_sandboxes_are_set_up_between_submissions_while_enough_are_ready(
    pause_s: float, ready: int
) -> None:
    uses, nursery = 16, FakeNursery()
    isolation = Isolation(Mode(False, False, False), "filtered", ())
    one = SandboxPool(SandboxSettings(workers=1), isolation, pause_s)
    one._nursery = nursery  # type: ignore[assignment]
    for _ in range(uses):
        with one.sandbox():
            pass
        if pause_s == 0:
            one._gardener.submit(int).result()  # all that was to do is done
    if pause_s == 0:
        assert nursery.number == uses + ready
    one.close()
    assert nursery.number <= uses + ready


def test_a_solution_of_assert_style_tests_is_charged_for_its_time() -> None:
    one = make_pool("namespaces", submission_timeout_s=60)
    try:
        tests = {"asserts": "assert f() == 1"}
        source = "def f():\n    import time\n    until = time.monotonic() + 0.2\n"
        source += "    while time.monotonic() < until: pass\n    return 1"
        verdict = verify(one, tests, source, 20)
    finally:
        one.close()
    assert verdict.result == [1]
    assert verdict.cpu_s >= 0.2


def test_a_program_that_runs_on_is_stopped_with_its_submission() -> None:
    one = make_pool("namespaces")
    limits = job_limits(one.settings, 600.0)
    try:
        with one.sandbox() as sandbox:
            sandbox.run({"job": "program", "source": ""}, limits)
            sandbox.stop()  # nothing runs: it can be used on
            assert sandbox.run({"job": "program", "source": "print(1)"}, limits).stdout == b"1\n"
            sandbox.start({"job": "program", "source": "while True: pass"}, limits)
            ended = os.pidfd_open(sandbox.pid)
            sandbox.stop()
            assert select.select([ended], [], [], 60)[0]
            os.close(ended)
    finally:
        one.close()
