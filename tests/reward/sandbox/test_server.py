"""The verification server and its client: form, limits, failures, and a load with hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import RewardError, SandboxError, UserError
from penstock.reward.code import VerificationClient
from penstock.reward.sandbox.serve import (
    ServerSettings,
    Turns,
    VerificationService,
    serve,
    serve_on,
)
from penstock.reward.sandbox.settings import SandboxSettings
from stages.hostile_clients import HostileClients
from stages.sandbox_pools import factories, left_over, make_pool

SUM = {"inputs": ["1 2"], "outputs": ["3"]}
GOOD = "print(sum(map(int, input().split())))"


class Server:
    """A real server on a free port of this machine, in a thread of its own."""

    def __init__(self, settings: ServerSettings, token: str) -> None:
        self.service = VerificationService(settings, token)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.complaints: list[object] = []  # what asyncio would have printed
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, what: self.complaints.append(what))
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(serve_on(self.socket, self.service, self._stopped))

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        address = ("127.0.0.1", self.port)
        return socket.create_connection(address, timeout=60, source_address=(source, 0))

    def ask_raw(self, head: str, body: bytes = b"") -> bytes:
        """Send bytes as they are; return everything that comes back until the end."""
        with self.connect() as link:
            link.sendall(head.replace("\n", "\r\n").encode() + body)
            return read_all(link)

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            sent_back = {name.lower(): value for name, value in response.getheaders()}
            return response.status, json.loads(response.read()), sent_back
        finally:
            connection.close()

    def check(self, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        request = {"in_outs": SUM, "generation": GOOD, "timeout": 20} | fields
        return self.request("POST", "/check_correctness", request)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.socket.close()
        assert self.complaints == []


def read_all(link: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := link.recv(1 << 16):
            got += chunk
    return got


@contextmanager
def running(*, token: str = "", **settings: Any) -> Iterator[Server]:
    make_pool("namespaces").close()  # skips where nothing can be isolated
    sandbox = SandboxSettings(**{"minimum": "filtered", **settings.pop("sandbox", {})})
    before = set(factories().values())  # another server of this module
    server = Server(ServerSettings(sandbox=sandbox, **settings), token)
    try:
        yield server
    finally:
        server.stop()
        assert left_over(before) == []


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        max_tests=5, max_generation_kb=1, max_body_mb=1, max_timeout_s=30, max_batch=4
    ) as one:
        yield one


def test_request_and_reply_have_the_agreed_form(server: Server) -> None:
    status, reply, _ = server.check()
    assert (status, reply["result"]) == (200, [1])
    assert len(reply["metadata"]) == 1
    assert server.check(generation="print(4)")[1]["result"] == [0]
    assert server.check(generation="1/0")[1]["result"] == [-1]
    assert server.check(generation="print(")[1]["result"] == [-2]
    call = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    source = "def add(a, b): return a + b"
    assert server.check(in_outs=call, generation=source)[1]["result"] == [1]
    asserts = {"asserts": "assert add(1, 2) == 3\nassert add(0, 0) == 1"}
    assert server.check(in_outs=asserts, generation=source)[1]["result"] == [1, 0]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"in_outs": {"inputs": [], "outputs": []}}, 422, "0 inputs and 0 outputs"),
        (
            {"in_outs": {"inputs": [""] * 6, "outputs": [""] * 6}},
            422,
            "got 6 tests, allowed: up to 5",
        ),
        ({"timeout": 31}, 422, "timeout: got 31, allowed: up to 30"),
        ({"timeout": 0}, 422, "timeout"),
        ({"generation": "x" * 2000}, 413, "generation: got 2000 characters, allowed: up to 1024"),
        ({"generation": None}, 422, "generation"),
        ({"generations": ""}, 422, "generations"),
        ({"generation": "x" * (2 << 20)}, 413, "body: allowed: up to 1 MiB"),
    ],
)
def test_requests_past_the_limits_are_refused(
    server: Server, fields: dict[str, Any], status: int, message: str
) -> None:
    got, reply, _ = server.check(**fields)
    assert got == status
    assert message in reply["error"]


def test_what_is_not_json_is_refused(server: Server) -> None:
    assert server.request("POST", "/check_correctness", b"{")[0] == 422
    path = "/check_correctness"
    assert server.request("POST", path, b"{}", Content_Type="text/plain")[0] == 415


def test_a_batch_is_answered_item_by_item(server: Server) -> None:
    items = [
        {"in_outs": SUM, "generation": GOOD, "timeout": 20},
        {"in_outs": {"inputs": []}, "generation": GOOD},
        {"in_outs": SUM, "generation": "print(5)", "timeout": 20},
    ]
    status, reply, _ = server.request("POST", "/check_correctness_batch", {"items": items})
    assert status == 200
    assert [item.get("result") for item in reply["items"]] == [[1], None, [0]]
    assert reply["items"][1]["status"] == 422
    assert server.request("POST", "/check_correctness_batch", {"items": items * 2})[0] == 413
    assert server.request("POST", "/check_correctness_batch", {"items": []})[0] == 422


def test_health_says_how_it_is(server: Server) -> None:
    status, reply, _ = server.request("GET", "/healthz")
    assert status == 200
    assert (reply["status"], reply["running"], reply["waiting"]) == ("ok", 0, 0)
    assert reply["isolation"] in ("full", "filtered")


def test_a_token_is_asked_for() -> None:
    with running(token="open sesame") as server:
        path, body = "/check_correctness", {"in_outs": SUM, "generation": GOOD}
        assert server.request("POST", path, body)[0] == 401
        assert server.request("POST", path, body, Authorization="Bearer wrong")[0] == 401
        assert server.request("POST", path, body, Authorization="Bearer open sesame")[0] == 200

        async def check(token: str) -> list[int]:
            client = VerificationClient([server.url], token=token)
            try:
                return (await client.check(SUM, GOOD, 20)).result
            finally:
                await client.close()

        assert asyncio.run(check("open sesame")) == [1]
        with pytest.raises(RewardError, match="status 401"):
            asyncio.run(check(""))


def test_it_listens_elsewhere_only_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_SANDBOX_TOKEN", raising=False)
    with pytest.raises(UserError, match=r"host got '0\.0\.0\.0' without a token"):
        serve("0.0.0.0", 1)


@pytest.mark.slow
def test_a_full_queue_answers_429_and_clients_come_back() -> None:
    with running(queue_size=0, sandbox={"workers": 1}) as server:
        hold = "import time\ntime.sleep(30)"
        with ThreadPoolExecutor(2) as threads:
            held = threads.submit(server.check, generation=hold, timeout=0.5)
            while not held.done() and not server.request("GET", "/healthz")[1]["running"]:
                continue
            status, reply, headers = server.check()
            if not held.done():
                assert status == 429
                assert "the queue is full" in reply["error"]
                assert headers["retry-after"] == "1"
            assert held.result()[1]["result"] == [-1]

        async def patient() -> list[int]:
            client = VerificationClient([server.url], backoff_s=0.05)
            try:
                verdicts = [client.check(SUM, GOOD, 20) for _ in range(3)]
                return [verdict.result[0] for verdict in await asyncio.gather(*verdicts)]
            finally:
                await client.close()

        assert asyncio.run(patient()) == [1, 1, 1]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_unreachable_server_is_a_failure_and_never_a_zero() -> None:
    client = VerificationClient([f"http://127.0.0.1:{_free_port()}"], retries=2, backoff_s=0.001)
    with pytest.raises(SandboxError, match="no verification server answered after 3 attempts"):
        asyncio.run(client.check(SUM, GOOD, 1))


def test_another_server_takes_over(server: Server) -> None:
    async def run() -> list[int]:
        dead = f"http://127.0.0.1:{_free_port()}"
        client = VerificationClient([dead, server.url], backoff_s=0.001)
        try:
            return [(await client.check(SUM, GOOD, 20)).result[0] for _ in range(4)]
        finally:
            await client.close()

    assert asyncio.run(run()) == [1, 1, 1, 1]


def _answering(body: bytes) -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)

    threading.Thread(target=answer, daemon=True).start()
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "body",
    [
        b"ok",
        b"{}",
        b"[]",
        b'{"result": [], "metadata": []}',
        b'{"result": [2], "metadata": [{}]}',
        b'{"result": [true], "metadata": [{}]}',
        b'{"result": [1], "metadata": []}',
        b'{"result": "1", "metadata": {}}',
    ],
)
def test_a_reply_of_another_form_is_not_a_verdict(body: bytes) -> None:
    listener, url = _answering(body)
    with listener:
        client = VerificationClient([url], retries=0, request_timeout_s=20)
        with pytest.raises(RewardError):
            asyncio.run(client.check(SUM, GOOD, 1))


POST = "POST /check_correctness HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"


def test_requests_of_web_pages_are_refused(server: Server) -> None:
    """DNS rebinding: a page of evil.example whose name now leads to 127.0.0.1."""
    body = json.dumps({"in_outs": SUM, "generation": GOOD}).encode()
    size = f"Content-Length: {len(body)}\nConnection: close\n"
    rebound = POST.replace("localhost", f"evil.example:{server.port}") + size + "\n"
    assert server.ask_raw(rebound, body).startswith(b"HTTP/1.1 421")
    assert server.ask_raw(POST.replace("Host: localhost\n", "") + size + "\n", body)[9:12] == b"421"
    foreign = POST + size + "Origin: http://evil.example\n\n"
    assert server.ask_raw(foreign, body).startswith(b"HTTP/1.1 403")
    for host in ("localhost", "127.0.0.1:80", "[::1]:80", socket.gethostname()):
        kept = POST.replace("localhost", host) + size + "\n"
        assert server.ask_raw(kept, body).startswith(b"HTTP/1.1 200"), host


def test_a_name_of_the_server_can_be_given() -> None:
    with running(hosts=["judge.cluster"]) as server:
        head = "GET /healthz HTTP/1.1\nConnection: close\nHost: "
        assert server.ask_raw(head + "judge.cluster:80\n\n").startswith(b"HTTP/1.1 200")
        assert server.ask_raw(head + "other.cluster:80\n\n").startswith(b"HTTP/1.1 421")


def test_requests_are_admitted_before_their_bodies_are_read() -> None:
    with running(queue_size=3, sandbox={"workers": 1}, max_body_mb=2, max_bodies_mb=3) as server:
        head = (POST + "Content-Length: 2000000\n\n").replace("\n", "\r\n").encode()
        with server.connect() as first, server.connect() as second, server.connect() as third:
            first.sendall(head + b"x")  # two of the three MiB, and one of two places of this client
            while server.request("GET", "/healthz")[1]["running"] == 0:
                continue
            second.sendall(head)
            assert second.recv(12) == b"HTTP/1.1 503"
            small = head.replace(b"2000000", b"20")
            second_place = server.connect()
            second_place.sendall(small)
            while server.request("GET", "/healthz")[1]["waiting"] == 0:
                continue
            third.sendall(small)
            assert third.recv(12) == b"HTTP/1.1 429"
            second_place.close()
        while server.request("GET", "/healthz")[1]["running"]:
            continue
        assert server.check()[1]["result"] == [1]  # everything was given back


def test_a_client_that_takes_its_time_is_cut_off() -> None:
    with running(header_timeout_s=0.2, body_timeout_s=0.2) as server:
        assert server.ask_raw("POST /check_correctness HTTP/1.1\nHost:") == b""
        assert server.ask_raw("") == b""
        slow = server.ask_raw(POST + "Content-Length: 20\n\n", b"{")
        assert slow.startswith(b"HTTP/1.1 408")
        assert server.check()[1]["result"] == [1]


def test_connections_are_limited_in_all_and_per_client() -> None:
    with running(max_connections=4, header_timeout_s=60) as server, contextlib.ExitStack() as stack:
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(2):
                stack.enter_context(server.connect(source))
            over = stack.enter_context(server.connect(source))
            assert over.recv(12) == b"HTTP/1.1 503"
        assert stack.enter_context(server.connect("127.0.0.4")).recv(12) == b"HTTP/1.1 503"


def test_asserts_count_as_tests(server: Server) -> None:
    status, reply, _ = server.check(in_outs={"asserts": "assert True\n" * 6}, generation="")
    assert status == 422
    assert "got 6 tests, allowed: up to 5" in reply["error"]


def test_a_client_that_leaves_is_no_fault(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"in_outs": SUM, "generation": GOOD}).encode()
    whole = (POST + f"Content-Length: {len(body)}\n\n").replace("\n", "\r\n").encode() + body
    served = server.service.served
    for sent in (whole, whole[:-5], whole[:40], b""):
        with server.connect() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(sent)
    while server.service.served == served:
        continue
    assert server.check()[1]["result"] == [1]
    assert caplog.records == []


def test_a_server_that_stops_answers_what_waits_with_503() -> None:
    with ThreadPoolExecutor(3) as threads:
        with running(sandbox={"workers": 1}) as server:
            hold = "import time\ntime.sleep(60)"
            held = [threads.submit(server.check, generation=hold, timeout=50) for _ in range(3)]
            while server.request("GET", "/healthz")[1]["waiting"] < 2:
                continue
        assert [job.result()[0] for job in held] == [503] * 3


def test_a_submission_whose_client_has_left_is_not_run() -> None:
    make_pool("namespaces").close()
    body = json.dumps({"in_outs": SUM, "generation": GOOD}).encode()
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    replies: list[Any] = []
    headers = {"host": "localhost", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/check_correctness",
        "query_string": b"",
        "client": ("1.2.3.4", 5),
        "headers": [
            *((name.encode(), value.encode()) for name, value in headers.items()),
            (b"content-length", str(len(body)).encode()),
        ],
    }

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        replies.append(message)

    async def run() -> None:
        service = VerificationService(ServerSettings(sandbox=SandboxSettings(minimum="filtered")))
        try:
            await service.app(scope, receive, send)
        finally:
            await service.close()

    asyncio.run(run())
    assert replies[0]["status"] == 408
    assert json.loads(replies[1]["body"]) == {"error": "the client has left"}


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped() -> None:
    make_pool("namespaces").close()
    command = [sys.executable, "-m", "penstock.cli", "sandbox", "serve", "--port", "0"]
    command.append("sandbox.minimum=filtered")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[2]

        async def check() -> list[int]:
            client = VerificationClient([url], token="")
            try:
                return (await client.check(SUM, GOOD, 20)).result
            finally:
                await client.close()

        assert asyncio.run(check()) == [1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_clients_take_turns_one_submission_each() -> None:
    """Client a has handed in four before b comes with two: b waits for no more than one of them."""
    order: list[str] = []

    async def run() -> None:
        turns = Turns(workers=1)

        async def submit(name: str) -> None:
            async with turns.turn(name[0]):
                order.append(name)
                await asyncio.sleep(0)

        async with turns.turn("c"):
            waiting = [asyncio.create_task(submit(n)) for n in ["a0", "a1", "a2", "a3", "b0", "b1"]]
            await asyncio.sleep(0)
            waiting[1].cancel()  # a1 has left, and gives its turn up
        await asyncio.gather(*waiting, return_exceptions=True)
        async with turns.turn("a"):  # every turn was given back
            pass

    asyncio.run(run())
    assert order == ["a0", "b0", "b1", "a2", "a3"]


def test_a_client_that_fills_its_part_of_the_queue_leaves_the_other_part() -> None:
    with ThreadPoolExecutor(2) as threads, running(queue_size=3, sandbox={"workers": 1}) as server:
        items = [{"in_outs": SUM, "generation": GOOD, "timeout": 20}] * 3
        status, reply, _ = server.request("POST", "/check_correctness_batch", {"items": items})
        assert (status, reply["error"]) == (429, "the queue is full: got 2, allowed: 1 now")
        hold = "import time\ntime.sleep(60)"
        held = [threads.submit(server.check, generation=hold, timeout=50) for _ in range(2)]
        while server.request("GET", "/healthz")[1]["waiting"] < 1:
            continue
        assert server.check()[0] == 429
        body = json.dumps({"in_outs": SUM, "generation": GOOD}).encode()
        head = POST + f"Content-Length: {len(body)}\n\n"
        with server.connect("127.0.0.2") as other:
            other.sendall(head.replace("\n", "\r\n").encode() + body)
            while server.request("GET", "/healthz")[1]["waiting"] < 2:
                continue
    assert [job.result()[0] for job in held] == [503] * 2


@pytest.mark.slow
def test_verdicts_of_good_clients_stay_right_beside_hostile_ones() -> None:
    with running(sandbox={"workers": 2}, body_timeout_s=1, header_timeout_s=1) as server:
        hostile = HostileClients(server.port, holders=20, submitters=3)
        with ThreadPoolExecutor(3) as threads:
            sources = [GOOD, "print(4)", "1/0", GOOD] * 5
            replies = threads.map(lambda source: server.check(generation=source), sources)
            assert [reply["result"] for _, reply, _ in replies] == [[1], [0], [-1], [1]] * 5
        hostile.stop()
        assert hostile.passed == []
        assert server.check()[1]["result"] == [1]


HOSTILE = [
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: os._exit(1)", -1),
    ("x = bytearray(64 << 30)", -1),
    ("import os\nos.kill(os.getppid(), 9)", -1),
    ("import os\nos._exit(0)", 0),
    ("while True: print('x' * 1000)", -1),
    ("open('/etc/passwd')", -1),
    ("import socket\nsocket.socket()", -1),
    ("(" * 5000, -2),
]


@pytest.mark.slow
def test_load_with_hostile_clients() -> None:
    """2,000 requests of 64 clients, a fifth hostile: each answered once, none wrongly."""
    total, clients = 2000, 64
    answers: list[tuple[int, int] | None] = [None] * total
    numbers = iter(range(total))
    lock = threading.Lock()

    def submission(index: int) -> tuple[dict[str, Any], int]:
        if index % 5 == 0:
            source, expected = HOSTILE[index // 5 % len(HOSTILE)]
            return {"in_outs": SUM, "generation": source, "timeout": 20}, expected
        expected = index % 3 > 0
        answer = index if expected else index + 1
        tests = {"inputs": [str(index)], "outputs": [str(answer)]}
        return {"in_outs": tests, "generation": "print(input())", "timeout": 20}, int(expected)

    def client(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while True:
            with lock:
                index = next(numbers, None)
            if index is None:
                connection.close()
                return
            body, expected = submission(index)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/check_correctness", json.dumps(body), headers)
            reply = connection.getresponse()
            fields = json.loads(reply.read())
            assert reply.status == 200, fields
            assert answers[index] is None
            answers[index] = (fields["result"][0], expected)

    with running(sandbox={"workers": 2, "output_kb": 64}, queue_size=2 * clients) as server:
        started = time.monotonic()
        with ThreadPoolExecutor(clients) as threads:
            for future in [threads.submit(client, server.port) for _ in range(clients)]:
                future.result()
        print(f"{total / (time.monotonic() - started):.0f} requests/s")
        assert server.request("GET", "/healthz")[1]["served"] == total
    assert [index for index, answer in enumerate(answers) if answer is None] == []
    assert [i for i, a in enumerate(answers) if a is not None and a[0] != a[1]] == []
