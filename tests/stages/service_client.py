"""A server of `penstock serve` in a process of its own, and a client that writes the protocol by hand."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.store import wire
from stages import nursery
from stages.warm_services import WarmServices


class ServerProcess:
    """A server that can be killed and started again on the same folder and port; `warm` or this test's process forks it."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        keys: str = "",
        model: str = "demo",
        warm: WarmServices | None = None,
        forked: bool = False,
    ) -> None:
        self.folder, self._words, self._keys, self.port = folder, words, keys, 0
        self._model, self._warm, self._forked = model, warm, forked
        self.process: nursery.ForkedProcess | subprocess.Popen[str] | None = None
        self._pid = 0  # 0: it does not run

    def start(self) -> None:
        """Start it, and wait until it answers."""
        arguments = ["serve", self._model, "--port", str(self.port), f"run.dir={self.folder}", *self._words]  # fmt: skip
        if self._warm is not None:
            self._pid, output = self._warm.start(self.folder, arguments), self._warm.output
        else:
            environment = {**os.environ, "PENSTOCK_SERVICE_KEYS": self._keys}
            self.process = (
                nursery.open_program(
                    "penstock.cli:main", arguments, directory=self.folder, environment=environment
                )
                if self._forked
                else subprocess.Popen(
                    [sys.executable, "-m", "penstock.cli", *arguments],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=self.folder,  # a model may be a folder in it
                    env=environment,
                )
            )
            assert self.process.stdout is not None
            self._pid, output = self.process.pid, self.process.stdout
        line = output.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", line)
        assert found, line
        self.port = int(found[1])

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        if self._pid:
            self._end(signal.SIGTERM)

    def _end(self, sign: signal.Signals) -> None:
        os.kill(self._pid, sign)
        self._pid = 0
        waits = self._warm or self.process
        assert waits is not None
        waits.wait()


@contextlib.contextmanager
def serving(
    folder: Path,
    *words: str,
    keys: str = "",
    model: str = "demo",
    warm: WarmServices | None = None,
    forked: bool = False,
) -> Iterator[ServerProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(folder, *words, keys=keys, model=model, warm=warm, forked=forked)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class WireClient:
    """One client; without a server it waits for the next one (`revive`) and asks again."""

    def __init__(self, server: ServerProcess, key: str = "tml-a") -> None:
        self.server, self._key = server, key

    def ask(
        self, path: str, body: Any = None, *, method: str = "POST", key: str | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of the answer; OSError or HTTPException if the server died."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
            headers = {"X-API-Key": key or self._key, "X-Idempotency-Key": f"once-{self._key}"}
            connection.request(method, f"/api/v1/{path}", data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, *, method: str = "POST") -> dict[str, Any]:
        status, data = self.ask(path, body, method=method)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def answer(self, request_id: str) -> bytes:
        while True:
            status, data = self.ask("retrieve_future", {"request_id": request_id})
            if status == 200:
                return data
            assert status == 408, (request_id, status, data)

    def create(self, *, rank: int = 2, number: int = 0, base_model: str = "demo") -> bytes:
        session = self.json("create_session", {"tags": []})["session_id"]
        fields = {"session_id": session, "model_seq_id": number, "base_model": base_model}
        promise = self.json("create_model", {**fields, "lora_config": {"rank": rank}})
        return self.answer(promise["request_id"])


def forward_backward(
    model_id: str, seq: int, ids: list[int], loss: str = "cross_entropy", **inputs: list[float]
) -> bytes:
    """The body of a forward_backward over one sequence."""
    arrays = inputs or {"weights": [1.0] * (len(ids) - 1)}
    tensors = {
        "target_tokens": {
            "dense": np.array(ids[1:], "<i8").tobytes(),
            "dtype": wire.INT64,
            "shape": [len(ids) - 1],
        }
    }
    for name, values in arrays.items():
        octets = np.array(values, "<f4").tobytes()
        tensors[name] = {"dense": octets, "dtype": wire.FLOAT32, "shape": [len(values)]}
    chunk = {"encoded_text": {"tokens": np.array(ids[:-1], "<i4").tobytes()}}
    datum = {"model_input": [chunk], "loss_fn_inputs": tensors}
    message = {"model_id": model_id, "seq_id": seq, "data": [datum], "loss_fn": loss}
    return wire.encode("ForwardBackwardRequest", message)
