"""Servers of openai engines are killed and started again: no token comes from unknown weights."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_contract import until_running

from penstock.config import LaunchConfig
from penstock.engine.openai.engine import OpenAIEngine, OpenAIOptions
from penstock.engine.protocol import Generation
from penstock.errors import EngineError
from penstock.waits import Waits
from penstock.workers.inline import ThreadWorker
from penstock.workers.pool.pool import EnginePool
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from stages import small_server
from stages import tiny_policy as tiny
from stages.engine_case import run
from stages.fake_server import ServedEngine
from stages.small_server import FIRST_TOKEN
from stages.tiny_run import CrashServer

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


class ServedPool:
    """A pool with one engine for each server; `may_start` holds back the engines that are started again."""

    def __init__(self, kind: str, folder: Path, *servers: ServerProcess) -> None:
        self._reload = kind == "reload"
        self._folder = folder
        self.notes: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._back = asyncio.Event()
        events = SupervisionCallbacks(waits=Waits(), note=self._note)
        self._supervised = [
            Supervised(
                f"engine-{number}",
                lambda server=server: self._spawn(server.url),
                LaunchConfig(restart_backoff_s=0.0),
                events,
            )
            for number, server in enumerate(servers)
        ]
        self._events = events

    def _note(self, line: str) -> None:
        self.notes.append(line)
        if "serves again" in line:
            self._back.set()

    async def _spawn(self, url: str) -> ThreadWorker:
        await self.may_start.wait()
        reload = {"reload_path": "/reload", "weights_folder": str(self._folder)}
        options = OpenAIOptions(urls=(url,), backoff_s=0.0, **(reload if self._reload else {}))
        return await ThreadWorker.start("engine", lambda: OpenAIEngine(options, fetch=tiny.fetch))

    async def start(self) -> EnginePool:
        for worker in self._supervised:
            await worker.start()
        return EnginePool(self._supervised, self._events, slots=8)

    async def until_one_is_back(self) -> None:
        await self._back.wait()
        self._back.clear()


def assert_all_of(made: Generation, version: int, tokens: int = 8) -> None:
    assert made.error == ""
    assert made.token_ids.tolist() == [FIRST_TOKEN + version] * tokens
    assert {segment.version for segment in made.segments} == {version}


@pytest.fixture
def both(kind: str, servers: list[ServerProcess]) -> list[ServerProcess]:
    """Two running servers."""
    for server in servers:
        server.start(kind)
    return servers


@kinds
def test_a_server_that_was_killed_gets_the_newest_weights_before_it_serves(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    """No request ran there while it restarted, so only the idle connection shows the loss."""
    server = servers[0]
    server.start(kind)

    async def main() -> None:
        pool = await ServedPool(kind, tmp_path, server).start()
        for version in (1, 2):
            await pool.update_weights(version, tiny.handle(version))
            assert_all_of(await pool.generate(tiny.request("a", max_tokens=8)), version)
            server.kill()
            server.start(kind)
            answers = await pool.generate_many(
                [tiny.request(f"b{n}", max_tokens=8) for n in range(4)]
            )
            for answer in answers:
                assert_all_of(answer, version)
        assert (await pool.stats()).policy_version == 2
        await pool.close()

    run(main)


@kinds
def test_a_server_that_is_killed_within_a_response(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    """The response is sampled again, with the same weights."""
    server = servers[0]
    server.start(kind, "5")

    async def main() -> None:
        pool = await ServedPool(kind, tmp_path, server).start()
        await pool.update_weights(1, tiny.handle(1))
        task = asyncio.create_task(pool.generate(tiny.request("a", max_tokens=8)))
        await until_running(pool, 5)
        server.kill()
        server.start(kind)
        assert_all_of(await task, 1)
        await pool.close()

    run(main)


@kinds
def test_a_server_that_misses_an_update_catches_up(
    kind: str, both: list[ServerProcess], tmp_path: Path
) -> None:
    first, second = both

    async def main() -> None:
        served = ServedPool(kind, tmp_path, first, second)
        pool = await served.start()
        await pool.update_weights(1, tiny.handle(1))
        served.may_start.clear()
        first.kill()
        await pool.update_weights(2, tiny.handle(2))  # the other server loads it
        assert_all_of(await pool.generate(tiny.request("a", max_tokens=8)), 2)
        first.start(kind)
        served.may_start.set()
        await served.until_one_is_back()
        served.may_start.clear()
        second.kill()
        assert_all_of(await pool.generate(tiny.request("b", max_tokens=8)), 2)
        await pool.close()

    run(main)


@kinds
def test_a_server_that_comes_back_and_takes_no_weights_is_given_up(
    kind: str, both: list[ServerProcess], tmp_path: Path
) -> None:
    """It was restarted without our backend: the other server continues, and without it all requests fail."""
    first, second = both

    async def main() -> None:
        served = ServedPool(kind, tmp_path, first, second)
        pool = await served.start()
        await pool.update_weights(1, tiny.handle(1))
        first.kill()
        first.start("frozen")
        for number in range(8):
            assert_all_of(await pool.generate(tiny.request(str(number), max_tokens=8)), 1)
        second.kill()
        second.start("frozen")
        with pytest.raises(EngineError, match="no engine is left"):
            await pool.generate(tiny.request("late", max_tokens=8))
        await pool.close()

    run(main)


def test_without_any_update_a_server_that_is_back_serves(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    """In an evaluation, it serves the weights it was started with."""
    server = servers[0]
    server.start("frozen")

    async def main() -> None:
        pool = await ServedPool("frozen", tmp_path, server).start()
        assert_all_of(await pool.generate(tiny.request("a", max_tokens=8)), 0)
        server.kill()
        server.start("frozen")
        assert_all_of(await pool.generate(tiny.request("b", max_tokens=8)), 0)
        await pool.close()

    run(main)


def test_a_server_that_stays_away_ends_the_engine_with_the_reason(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    server = servers[0]
    server.start("frozen")

    async def main() -> None:
        pool = await ServedPool("frozen", tmp_path, server).start()
        server.kill()
        with pytest.raises(EngineError, match=r"no engine is left: .*max_restarts = 3"):
            await pool.generate(tiny.request("a", max_tokens=8))
        await pool.close()

    run(main)


@pytest.mark.parametrize("rl", [False, True])
def test_a_closed_idle_connection_is_a_loss_unless_the_server_says_what_it_holds(
    rl: bool, tmp_path: Path
) -> None:
    """A proxy may close it; the weights of a server that cannot tell are unknown then."""

    async def main() -> None:
        engine = ServedEngine(tmp_path, rl=rl)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        engine.fake.close_connections()
        made = await engine.generate(tiny.request("a", [7, 8, 9]))
        assert (made.finish_reason == "error") != rl, made.error
        if rl:
            assert (await engine.stats()).policy_version == 1
        else:
            assert "lost" in made.error
            with pytest.raises(EngineError, match="lost"):
                await engine.stats()
        await engine.close()

    run(main)


def test_faults_of_a_server_that_is_alive_are_no_loss(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ServedEngine(tmp_path, *["500"] * 6)
        await engine.start()
        await engine.update_weights(1, tiny.handle(1))
        assert (await engine.generate(tiny.request("a", [7, 8, 9]))).finish_reason == "error"
        assert (await engine.stats()).policy_version == 1
        assert (await engine.generate(tiny.request("b", [7, 8, 9]))).error == ""
        assert engine.fake.calls.count("/update_weights_from_disk") == 1
        await engine.close()

    run(main)


@pytest.mark.slow
def test_a_run_has_one_engine_for_each_server(
    servers: list[ServerProcess], server: CrashServer
) -> None:
    for each in servers:
        each.start("rl")
    urls = [each.url for each in servers]
    words = ("engine.name=openai", f"engine.options.urls={urls}", "launch.kind=local")
    served, code = server.train("served", *words)
    assert code == 0, server.output()
    logs = {path.stem for path in (served.path / "logs").glob("engine-*")}
    assert logs == {"engine-0", "engine-1"}
