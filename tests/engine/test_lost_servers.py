"""Servers of the openai engine are killed and started again: no token comes from unknown weights."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_contract import until_running

from penstock.engine.openai.engine import OpenAIEngine, OpenAIOptions
from penstock.engine.openai.servers import Server
from penstock.engine.protocol import Generation
from penstock.errors import EngineError
from stages import small_server
from stages import tiny_policy as tiny
from stages.engine_case import run
from stages.fake_server import ServedEngine
from stages.small_server import FIRST_TOKEN

PROGRAM = small_server.__file__
# how weights reach a server; both in `make test-long`
kinds = pytest.mark.parametrize("kind", [pytest.param("reload", marks=pytest.mark.slow), "rl"])


class ServerProcess:
    """One server process; it keeps its port when it is started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, kind: str, *more: str) -> None:
        """Start it and wait until it listens; the first start picks a port below the ephemeral ones."""
        ports = [self._port] if self._port else random.sample(range(20000, 32000), 20)
        for port in ports:
            command = [sys.executable, str(PROGRAM), str(port), kind, *more]
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline() == "ready\n":
                self._port = port
                return
            self.kill()
        raise AssertionError(f"no server starts on {ports}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    made = [ServerProcess(), ServerProcess()]
    yield made
    for server in made:
        server.kill()


def make_engine(kind: str, folder: Path, *servers: ServerProcess) -> OpenAIEngine:
    reload = {"reload_path": "/reload", "weights_folder": str(folder)} if kind == "reload" else {}
    urls = tuple(server.url for server in servers)
    return OpenAIEngine(OpenAIOptions(urls=urls, backoff_s=0.0, **reload), fetch=tiny.fetch)


def assert_all_of(made: Generation, version: int, tokens: int = 8) -> None:
    assert made.error == ""
    assert made.token_ids.tolist() == [FIRST_TOKEN + version] * tokens
    assert {segment.version for segment in made.segments} == {version}


async def until_lost(server: Server) -> None:
    """Wait until the idle connection shows that the process has ended."""
    if server.watching is not None:
        await asyncio.wait([server.watching])
    assert not server.ready


async def until_ready_or_given_up(engine: OpenAIEngine, server: Server) -> None:
    """Wait until the server is ready or given up; woken by the end of each restore."""
    while not (server.ready or server.given_up):
        await engine._servers.wait_ready()
        if server.restoring is not None:
            await asyncio.wait([server.restoring])


@pytest.fixture
def both(kind: str, servers: list[ServerProcess]) -> list[ServerProcess]:
    """Two running servers."""
    for server in servers:
        server.start(kind)
    return servers


@kinds
def test_one_that_was_killed_gets_the_newest_weights_before_it_serves(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    """No request ran there while it restarted, so only the idle connection shows the loss."""
    server = servers[0]
    server.start(kind)

    async def main() -> None:
        engine = make_engine(kind, tmp_path, server)
        await engine.start()
        for version in (1, 2):
            await engine.update_weights(version, tiny.handle(version))
            assert_all_of(await engine.generate(tiny.request("a", max_tokens=8)), version)
            server.kill()
            server.start(kind)
            made = await engine.generate_many(
                [tiny.request(f"b{n}", max_tokens=8) for n in range(4)]
            )
            for one in made:
                assert_all_of(one, version)
        assert (await engine.stats()).policy_version == 2
        await engine.close()

    run(main)


@kinds
def test_one_that_is_killed_within_a_response(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    """Tokens from before the kill stay, and the rest is sampled with the same weights."""
    server = servers[0]
    server.start(kind, "5")

    async def main() -> None:
        engine = make_engine(kind, tmp_path, server)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        task = asyncio.create_task(engine.generate(tiny.request("a", max_tokens=8)))
        await until_running(engine, 5)
        server.kill()
        server.start(kind)
        assert_all_of(await task, 1)
        await engine.close()

    run(main)


@kinds
def test_one_of_two_misses_an_update_and_catches_up(
    kind: str, both: list[ServerProcess], tmp_path: Path
) -> None:
    first, second = both

    async def main() -> None:
        engine = make_engine(kind, tmp_path, first, second)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        first.kill()
        await until_lost(engine._servers.all[0])
        await engine.update_weights(2, tiny.handle(2))  # the other server loads it
        assert_all_of(await engine.generate(tiny.request("a", max_tokens=8)), 2)
        first.start(kind)
        await until_ready_or_given_up(engine, engine._servers.all[0])
        second.kill()
        assert_all_of(await engine.generate(tiny.request("b", max_tokens=8)), 2)
        first.kill()
        with pytest.raises(EngineError, match="no server answers"):
            await engine.update_weights(3, tiny.handle(3))
        await engine.close()

    run(main)


@kinds
def test_one_that_comes_back_and_takes_no_weights_is_left_out(
    kind: str,
    both: list[ServerProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was restarted without our backend: one line names it, and the other server continues."""
    first, second = both

    async def main() -> None:
        engine = make_engine(kind, tmp_path, first, second)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        first.kill()
        first.start("frozen")
        lost = engine._servers.all[0]
        await until_lost(lost)
        await until_ready_or_given_up(engine, lost)
        assert lost.given_up
        lines = [line for line in caplog.messages if "not used again" in line]
        assert len(lines) == 1
        assert first.url in lines[0]
        for number in range(4):
            assert_all_of(await engine.generate(tiny.request(str(number), max_tokens=8)), 1)
        second.kill()
        second.start("frozen")
        made = await engine.generate(tiny.request("late", max_tokens=8))
        assert made.finish_reason == "error"
        assert second.url in made.error
        with pytest.raises(EngineError, match="not used again"):
            await engine.stats()
        await engine.close()

    with caplog.at_level(logging.WARNING):
        run(main)


def test_without_any_update_a_server_that_is_back_serves(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    """In an evaluation, it serves the weights it was started with."""
    server = servers[0]
    server.start("frozen")

    async def main() -> None:
        engine = make_engine("frozen", tmp_path, server)
        await engine.start()
        server.kill()
        made = await engine.generate(tiny.request("a", max_tokens=8))
        assert "Connection" in made.error
        server.start("frozen")
        assert_all_of(await engine.generate(tiny.request("b", max_tokens=8)), 0)
        await engine.close()

    run(main)


@pytest.mark.parametrize(("rl", "loads"), [(False, 2), (True, 1)])
def test_faults_in_a_row_are_a_loss_and_one_that_can_say_what_it_holds_is_asked(
    rl: bool, loads: int, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, "500", "500", "500", rl=rl)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        made = await engine.generate(tiny.request("a", [7, 8, 9]))
        assert made.finish_reason in ("stop", "length"), made.error
        calls = engine.fakes[0].calls
        assert calls.count("/update_weights" if rl else "/update_weights_from_disk") == loads
        assert calls.count("/weight_info") == (1 if rl else 0)
        await engine.close()

    run(main)


def test_one_fault_is_no_loss(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, "500", "", "500", "", "500")
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        for number in range(3):
            made = await engine.generate(tiny.request(str(number), [7, 8, 9]))
            assert made.finish_reason in ("stop", "length"), made.error
        assert engine.fakes[0].calls.count("/update_weights_from_disk") == 1
        await engine.close()

    run(main)


@pytest.mark.parametrize("held", [True, False])
def test_one_that_comes_back_is_paused_as_the_others_are(
    held: bool, servers: list[ServerProcess], tmp_path: Path
) -> None:
    first, second = servers
    first.start("rl")
    second.start("rl")

    async def main() -> None:
        engine = make_engine("rl", tmp_path, first, second)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        first.kill()
        server = engine._servers.all[0]
        await until_lost(server)
        if held:
            await engine.pause("keep")
        first.start("rl")
        await until_ready_or_given_up(engine, server)
        assert await server.is_paused() == held
        await engine.resume()
        assert not await server.is_paused()
        await engine.close()

    run(main)
