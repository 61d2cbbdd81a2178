"""The openai engine against a real vLLM server on a CPU. Run by scripts/test_vllm.sh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from engine_contract import CHECKS, assert_true_logprobs

from penstock.engine.openai.engine import OpenAIEngine, OpenAIOptions
from penstock.engine.openai.server import HttpError
from penstock.engine.openai.server_weights import VllmCalls
from stages import tiny_policy as tiny
from stages.engine_case import LACKS, EngineCase

if os.environ.get("PENSTOCK_TEST_VLLM") != "1":
    pytest.skip("run by scripts/test_vllm.sh", allow_module_level=True)

START_S = 240.0
SERVES = "Application startup complete"  # in the log, shortly before the server listens


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny.save_policy(tmp_path_factory.mktemp("served"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        "--model", str(folder), "--served-model-name", "tiny", "--dtype", "float32",
        "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port),
        "--weight-transfer-config", '{"backend": "penstock"}',
        "--worker-extension-cls", "penstock.engine.vllm.engine.WorkerExtension",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"},
        start_new_session=True,
    )  # fmt: skip
    lines, ready = _watch(process)
    try:
        assert ready.wait(START_S), "the server does not start:\n" + "".join(lines[-30:])
        assert any(SERVES in line for line in lines), "the server ended:\n" + "".join(lines[-30:])
        _until_it_listens(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _until_it_listens(process: subprocess.Popen[str], port: int) -> None:
    for _ in range(150):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    raise AssertionError("the server does not listen")


def _watch(process: subprocess.Popen[str]) -> tuple[list[str], threading.Event]:
    """Read the server's log; set the event when the server is ready or has ended."""
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if SERVES in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    return lines, ready


@pytest.fixture(scope="module")
def case(url: str) -> Iterator[EngineCase]:
    """One engine for all checks, because the server keeps the weights it was given."""
    options = OpenAIOptions(urls=(url,), timeout_s=120.0, retries=1)
    with asyncio.Runner() as loop:
        engine = OpenAIEngine(options, fetch=tiny.fetch)
        loop.run(engine.start())
        yield EngineCase(
            "openai, vLLM serves",
            lambda: OpenAIEngine(options, fetch=tiny.fetch),
            LACKS["openai, vLLM serves"],
            held_tokens=400,
            timeout_s=240.0,
            shared=engine,
            loop=loop,
        )
        loop.run(engine.close())


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check: str, case: EngineCase) -> None:
    CHECKS[check](case)


def test_a_server_says_which_weights_it_holds(case: EngineCase) -> None:
    """A real server reports the label of its weights; a fresh process has another label."""
    engine, loop = case.shared, case.loop
    assert isinstance(engine, OpenAIEngine)
    assert loop is not None

    async def main() -> None:
        server, loader, source = engine._server, engine._loader, tiny.handle(1)
        assert isinstance(loader, VllmCalls)
        await engine.update_weights(1, source)
        assert await loader.holds(server, 1, source.digest)
        assert not await loader.holds(server, 1, tiny.handle(2).digest)
        await server.post("/update_weight_version", {"new_version": "default"})
        assert not await loader.holds(server, 1, source.digest)
        made = await engine.generate(tiny.request("a", [7, 8, 9]))
        assert_true_logprobs(case, made, [7, 8, 9])
        await engine.update_weights(0, tiny.handle(0))

    loop.run(main())


def test_the_server_refuses_weights_that_are_not_those_announced(
    case: EngineCase,
) -> None:
    """The server's workers check the digest of what they read. Runs last: it ends the server."""
    engine, loop = case.shared, case.loop
    assert isinstance(engine, OpenAIEngine)
    assert loop is not None

    async def main() -> None:
        loader = engine._loader
        assert isinstance(loader, VllmCalls)
        source = tiny.handle(1)
        weights = dict(tiny.fetch(tiny.handle(2)))
        async with loader.prepared(source, weights) as place, engine._holding(loader):
            with pytest.raises(HttpError, match="500"):
                await loader.load(engine._server, source, place)

    loop.run(main())
