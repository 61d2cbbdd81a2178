"""Seeded fuzzing of what enemies send: replies to the judge, reports to the referee, requests to the server.

A thousand cases in every run; `make test-fuzz` runs many more (PENSTOCK_FUZZ_CASES). A failure names its
seed; PENSTOCK_FUZZ_SEED starts there.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import random
import socket
import struct
from typing import Any

import pytest

from penstock.reward.sandbox.inside import judging, remote, wire
from penstock.reward.sandbox.serve import ServerSettings, VerificationService, serve_on
from penstock.reward.sandbox.settings import SandboxSettings
from stages.sandbox_pools import make_pool

CASES = int(os.environ.get("PENSTOCK_FUZZ_CASES", "1000"))
FIRST = int(os.environ.get("PENSTOCK_FUZZ_SEED", "0"))
SEEDS = range(FIRST, FIRST + CASES)
SECRET = "k3y-7f2c9d"  # the right answer, which no generator here makes
JUNK: list[Any] = [
    None, True, False, 0, -1, 1 << 53, 1 << 70, 1.5, 1e400, float("nan"), "", "x" * 50, "__builtins__",
    [], [[]], {}, {"int": "0x1"}, {"int": "9" * 20}, {"float": "nan"}, {"float": "1" * 50}, {"set": [[]]},
    {"dict": [[1, 2], [3]]}, {"tuple": 1}, {"bytes": "zz"}, {"range": [1, 2, 0]}, {"object": [0, "function"]},
    {"object": [0, "iterator"]}, {"object": [-1, "object"]}, {"object": 5}, {"complex": ["1"]}, {"a": 1, "b": 2},
]  # fmt: skip
REPLIES: list[dict[str, Any]] = [
    {"value": [[{"object": [0, "function"]}]]},
    {"value": {"tuple": [1, {"dict": [["a", [2.0]]]}]}, "changed": [None]},
    {"raise": ["StopIteration", "Exception"], "text": "no"},
    {"value": {"object": [1, "iterator"]}, "changed": [[1, 2]]},
    {"value": 3},
    {"raise": ["ValueError", "Exception", "BaseException", "object"], "text": "x"},
]
ALLOWED = (remote.Fault, Exception)
STAND_INS = (remote.RemoteFunction, remote.RemoteInstance, remote.RemoteIterator)
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range,
)  # fmt: skip


def mutate(draw: random.Random, value: Any) -> Any:
    """Return a copy of JSON data with something in it replaced, dropped, repeated or added."""
    if draw.random() < 0.25:
        return draw.choice(JUNK)
    if isinstance(value, list) and value:
        copy = list(value)
        place = draw.randrange(len(copy))
        copy[place] = mutate(draw, copy[place])
        return copy * draw.choice((1, 1, 1, 0, 3))
    if isinstance(value, dict) and value:
        copy = dict(value)
        key = draw.choice(list(copy))
        changed = mutate(draw, copy.pop(key))
        copy[draw.choice((key, key, key, "value", "raise", "blobs", "x"))] = changed
        return copy
    return draw.choice(JUNK)


def spoil(draw: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, removed or added."""
    changed = bytearray(data)
    for _ in range(draw.choice((0, 0, 1, 3))):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(3)
        if kind == 0:
            changed[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del changed[place : place + draw.randrange(1, 20)]
        else:
            changed[place:place] = draw.choice((b"\x00" * 5, b"\r\n", b"[" * 2000, b"{", b"9" * 40))
    return bytes(changed)


def frames(draw: random.Random) -> bytes:
    """Return what a hostile solution writes: replies, some of them bent, some no frames at all."""
    sent = b""
    for number in range(6):
        reply = REPLIES[0] if number == 0 and draw.random() < 0.6 else draw.choice(REPLIES)
        if draw.random() < 0.6:
            reply = mutate(draw, reply)
        body = spoil(draw, json.dumps(reply).encode())
        size = len(body) if draw.random() < 0.95 else draw.choice((0, 3, 1 << 31, len(body) + 9))
        sent += struct.pack("!I", size) + body
    return sent


def is_plain(value: Any) -> bool:
    if type(value) in STAND_INS:
        return True
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return type(value) in PLAIN


class Crossed(BaseException):
    """Something that is no plain data reached the tests; no test catches this."""


def need_plain(value: Any) -> Any:
    if not is_plain(value):
        raise Crossed(type(value))
    return value


def use(function: Any) -> None:
    """What a test does with a solution; it must not come to its end."""
    result = need_plain(function([3, 1]))
    with contextlib.suppress(TypeError):
        need_plain(list(result))
    right = map(lambda x: need_plain(function(x)) == SECRET, [1, 2])  # noqa: C417  StopIteration
    assert all(right)
    assert need_plain(function()) == SECRET


@pytest.mark.parametrize("chunk", range(4))
def test_no_reply_decides_a_test(chunk: int) -> None:
    kinds = set[type[BaseException]]()
    for seed in SEEDS[chunk::4]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(frames(random.Random(seed)))
            theirs.shutdown(socket.SHUT_WR)
            connection = remote.Connection(wire.Pipe(ours.fileno(), remote.MAX_REPLY_BYTES))
            passed = False
            try:
                names = need_plain(connection.names(["f"]))
                if names.keys() - {"f"}:
                    raise Crossed(names)
                if "f" in names:
                    use(names["f"])
                    passed = True
            except ALLOWED as error:
                kinds.add(type(error))
            assert not passed, f"seed {seed}"
    assert remote.OutOfProtocol in kinds
    assert not kinds & {StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt}
    own = {remote.SolutionError, *remote.Fault.__subclasses__()}
    assert {
        kind for kind in kinds - own if getattr(builtins, kind.__name__, None) is not kind
    } == set()


def test_no_report_is_taken_for_the_right_value() -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        lines = [mutate(draw, {"value": {"tuple": [1, {"dict": [["a", 2]]}]}}) for _ in range(3)]
        report = spoil(draw, b"\n".join(json.dumps(line).encode() for line in lines))
        expected = draw.choice([SECRET, [SECRET], {"dict": [[SECRET, 1]]}, {"float": "0.123"}])
        outcome = {"status": draw.choice((0, 0, 0, 1, -9)), "stopped": "", "limit_s": 1.0}
        blobs = [b"", spoil(draw, b"error"), report]
        request = {"form": "call", "expected": expected, "outcome": outcome, "blobs": blobs}
        assert judging.answer(request)["code"] in (0, -1, -2), f"seed {seed}"
        counted = [{"count": 2}, {"test": 0, "code": 0, "note": "", "gone": False}]
        lines = [mutate(draw, line) if draw.random() < 0.5 else line for line in counted]
        report = spoil(draw, b"\n".join(json.dumps(line).encode() for line in lines))
        request = {"form": "asserts", "max_tests": 5, "outcome": outcome, "blobs": [report, b""]}
        reply = judging.answer(request)
        assert reply.keys() & {"result", "broken", "too_many"}, f"seed {seed}"
        if "result" in reply:
            assert len(reply["result"]) == len(reply["notes"]) <= 5, f"seed {seed}"
            assert all(code in (1, 0, -1, -2) for code in reply["result"])


@pytest.mark.parametrize("line", [b"\n", b"x\n", b"{}\n"])
def test_a_long_report_is_a_wrong_answer_and_takes_no_time(line: bytes) -> None:
    """If the referee read all of it, it would be too late, and a wrong answer would be a failure."""
    outcome = {"status": 0, "stopped": "", "limit_s": 1.0}
    blobs = [b"", b"", line * (4_000_000 // len(line))]
    request = {"form": "call", "expected": 1, "outcome": outcome, "blobs": blobs}
    assert judging.answer(request)["code"] == judging.ERROR


@pytest.mark.parametrize("form", ["call", "stdio", "asserts"])
def test_data_that_takes_long_to_judge_is_a_wrong_answer(form: str) -> None:
    value = list(range(200_000))
    report = json.dumps({"value": value}).encode()
    words = " ".join(f"{number}.0" for number in value)
    request = {
        "form": form,
        "expected": words.replace(".0", ".1") if form == "stdio" else value,
        "outcome": {"status": 0, "stopped": "", "limit_s": 1.0},
        "max_tests": 9,
        "blobs": [words.encode(), b"", report]
        if form != "asserts"
        else [b'{"test": 0, "code": 1}\n' * 100_000, b""],
    }
    reply = judging.answer(request, processor_s=0.01)
    assert reply.get("code", reply.get("result")) in (judging.WRONG, [judging.WRONG])
    assert "TimeoutError" in str(reply)


def test_what_is_no_frame_closes_the_link() -> None:
    for seed in SEEDS:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(frames(random.Random(seed)))
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(wire.Closed):
                while True:
                    assert type(wire.receive(ours)[0]) is dict, f"seed {seed}"


REQUEST = (
    b"POST /check_correctness HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 12\r\n\r\n{\"a\": [1,2]}"
)  # fmt: skip
PIECES = [
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Host: evil\r\n",
    b"Origin: null\r\n", b" folded\r\n", b"Expect: 100-continue\r\n", b"x" * 20_000, b"A: b\r\n" * 70, b"\xff:\r\n",
    b"Connection: close\r\n", b"\n\n", b"\r\n\r\n", b"HTTP/0.9", b"GET / HTTP/1.1\r\n\r\n",
]  # fmt: skip


def request_bytes(draw: random.Random) -> bytes:
    sent = REQUEST * draw.choice((1, 1, 2))
    for _ in range(draw.choice((0, 1, 1, 2))):
        place = sent.find(b"\r\n", draw.randrange(len(sent))) + 2
        sent = sent[:place] + draw.choice(PIECES) + sent[place:]
    return spoil(draw, sent)[: draw.choice((10**6, 10**6, draw.randrange(1, 200)))]


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


REFUSALS = {b"400", b"403", b"404", b"405", b"408", b"411", b"413", b"415", b"421", b"422", b"503"}


@pytest.mark.slow
def test_the_server_survives_every_request(caplog: pytest.LogCaptureFixture) -> None:
    """No request is a submission: each is refused, or cut off in time."""
    make_pool("namespaces").close()  # skips where nothing can be isolated
    settings = ServerSettings(
        sandbox=SandboxSettings(minimum="filtered"), header_timeout_s=0.05, body_timeout_s=0.05
    )

    async def attack(port: int, seeds: range) -> None:
        for seed in seeds:
            reply = await exchange(port, request_bytes(random.Random(seed)))
            statuses = {part[:3] for part in reply.split(b"HTTP/1.1 ")[1:]}
            assert statuses <= REFUSALS | {b"100"}, f"seed {seed}: {reply[:200]!r}"

    async def run() -> None:
        service, stopped = VerificationService(settings), asyncio.Event()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
            serving = asyncio.create_task(serve_on(listening, service, stopped))
            port = listening.getsockname()[1]
            await asyncio.gather(*(attack(port, SEEDS[start::20]) for start in range(20)))
            assert b" 422 " in await exchange(port, REQUEST)
            assert service.health()["running"] == 0
            stopped.set()
            await serving

    asyncio.run(run())
    assert caplog.records == []
