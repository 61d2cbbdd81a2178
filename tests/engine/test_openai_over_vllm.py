"""The openai engine against a real vLLM server on a CPU. Run by scripts/test_vllm.sh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import tiny
from engine_contract import CHECKS, EngineCase
from engine_lacks import LACKS

from penstock.engine.openai_engine import OpenAIEngine, OpenAIOptions

if os.environ.get("PENSTOCK_TEST_VLLM") != "1":
    pytest.skip("run by scripts/test_vllm.sh", allow_module_level=True)

START_S = 240.0
# the server's memory is its own, and it loads no weights from disk
LEFT_OUT = {"sleep_and_wake"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny.save_policy(tmp_path_factory.mktemp("served"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        "--model", str(folder), "--served-model-name", "tiny", "--dtype", "float32",
        "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}, start_new_session=True,
    )  # fmt: skip
    lines, ready = _watch(process)
    try:
        assert ready.wait(START_S), "the server does not start:\n" + "".join(lines[-30:])
        assert process.poll() is None, "the server ended:\n" + "".join(lines[-30:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _watch(process: subprocess.Popen[str]) -> tuple[list[str], threading.Event]:
    """Reads the server's log; the event is set when it serves, or when it ended."""
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "Application startup complete" in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    return lines, ready


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in LEFT_OUT])
def test_contract(check: str, url: str) -> None:
    options = OpenAIOptions(urls=(url,), timeout_s=60.0, retries=1)
    case = EngineCase(
        "openai over vllm",
        lambda: OpenAIEngine(options, fetch=tiny.fetch),
        LACKS["openai"] | {"weight updates"},
    )
    CHECKS[check](case)
