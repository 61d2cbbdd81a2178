"""Clients of a verification server that mean no good, from two addresses of their own, until they are stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import struct
import threading
from typing import Any

ADDRESS = "127.0.0.2"
PROGRAMS = "127.0.0.3"  # hands in programs; the connections of the other one do not hold these up
_HEAD = "POST /check_correctness HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_ALIKE = """
import json, os
def f():
    form = {"set": [{"int": hex(n * ((1 << 61) - 1))} for n in range(60_000)]}
    os.write(3, json.dumps({"value": form}).encode() + b"\\n")
    os._exit(0)
"""
STDIO = {"inputs": ["1 2"], "outputs": ["3"]}
CALL = {"inputs": [[]], "outputs": [1], "fn_name": "f"}
SUBMISSIONS: list[tuple[dict[str, Any], str]] = [
    (STDIO, "while True: pass"),
    (STDIO, "while True: print('x' * 1000)"),
    (STDIO, "x = bytearray(64 << 30)"),
    (STDIO, "import os\nwhile True:\n    try: os.fork()\n    except OSError: os._exit(1)"),
    (STDIO, "(" * 5000),
    ({"asserts": "assert f() == 1"}, "def f():\n    while True: pass"),
    (CALL, _ALIKE),
    (CALL, "def f(): return 'x' * (100 << 20)"),
    ({"asserts": "assert f() == 1"}, "import os\nos.write(4, b'\\xff' * 4096)"),
    ({"asserts": "assert 3 in f()"}, "class A:\n    def __contains__(self, x): return True\nf = A"),
    ({"asserts": "(" * 100_000}, ""),
]


class HostileClients:
    """Threads that hold connections, break the protocol, leave early, and hand in hostile programs."""

    def __init__(self, port: int, holders: int = 40, submitters: int = 4) -> None:
        self._port, self._stopped = port, threading.Event()
        self.passed: list[str] = []  # hostile programs that were called right: there must be none
        self.submitted = 0  # hostile programs that were judged
        jobs = [self._submit] * submitters + [self._garbage, self._leave, self._flood]
        jobs += [self._hold_body, self._hold_header] * (holders // 2)
        self._threads = [
            threading.Thread(target=self._repeat, args=(job, random.Random(seed)), daemon=True)
            for seed, job in enumerate(jobs)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _repeat(self, job: Any, draw: random.Random) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                job(draw)
            self._stopped.wait(0.02)

    def _connect(self) -> socket.socket:
        address = ("127.0.0.1", self._port)
        return socket.create_connection(address, timeout=30, source_address=(ADDRESS, 0))

    def _hold_header(self, draw: random.Random) -> None:
        with self._connect() as link:
            link.sendall(_HEAD[: draw.randrange(len(_HEAD))].encode())
            self._wait_for_end(link)

    def _hold_body(self, draw: random.Random) -> None:
        with self._connect() as link:
            link.sendall(f"{_HEAD}Content-Length: {7 << 20}\r\n\r\n".encode() + b"x" * (1 << 20))
            self._wait_for_end(link)

    def _wait_for_end(self, link: socket.socket) -> None:
        link.settimeout(0.2)
        while not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                if not link.recv(1 << 12):
                    return

    def _garbage(self, draw: random.Random) -> None:
        with self._connect() as link:
            link.sendall(draw.randbytes(2000) + b"\r\n\r\n")

    def _flood(self, draw: random.Random) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(300):  # more than one client may have
                stack.enter_context(self._connect())
            self._stopped.wait(1.0)

    def _leave(self, draw: random.Random) -> None:
        body = json.dumps({"in_outs": STDIO, "generation": "print(3)", "timeout": 1}).encode()
        with self._connect() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _submit(self, draw: random.Random) -> None:
        tests, source = draw.choice(SUBMISSIONS)
        body = json.dumps({"in_outs": tests, "generation": source, "timeout": 0.5})
        link = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=60, source_address=(PROGRAMS, 0)
        )
        with contextlib.closing(link):
            link.request("POST", "/check_correctness", body, {"Content-Type": "application/json"})
            reply = link.getresponse()
            fields = json.loads(reply.read())
        self.submitted += reply.status == 200
        if reply.status == 200 and 1 in fields["result"]:
            self.passed.append(source)
