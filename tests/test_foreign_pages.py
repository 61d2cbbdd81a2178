"""A web page of another origin, in a real browser, gets nothing from the three servers of this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from penstock.reward.sandbox.serve import ServerSettings, VerificationService, serve_on
from penstock.rollout.agent.endpoint import Endpoint
from stages.browser import BROWSER, LivePage
from stages.dashboard_server import serving
from stages.made_run import make_run

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

EVIL = "evil.example"
ATTACKS = """(async (address) => {
  const read = [];
  const ask = async (path, how) => {
    try { read.push((await fetch(address + path, how)).type); } catch { read.push("refused"); }
  };
  await ask("/v1/chat/completions", { method: "POST", body: "{}", mode: "no-cors" });
  await ask("/check_correctness", { method: "POST", body: "{}", mode: "no-cors" });
  await ask("/api/runs", { mode: "cors" });
  await ask("/healthz", { mode: "no-cors" });
  await new Promise((done) => {
    const frame = Object.assign(document.createElement("iframe"), { name: "frame" });
    const form = Object.assign(document.createElement("form"), {
      action: address + "/check_correctness", method: "POST", target: "frame" });
    document.body.append(frame, form);
    frame.onload = done;
    form.submit();
  });
  await new Promise((done) => {
    const picture = new Image();
    picture.onload = picture.onerror = done;
    picture.src = address + "/v1/models";
  });
  return read;
})"""
REQUESTS = 6
REBOUND = """(async () => {
  const seen = [];
  for (const path of ["/", "/api/runs", "/v1/models", "/healthz"]) {
    seen.push((await fetch(path)).status);
  }
  seen.push((await fetch("/check_correctness", { method: "POST", body: "{}" })).status);
  return seen;
})()"""


class _EvilPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>evil</title><body></body>")

    def log_message(self, *words: object) -> None: ...


@contextmanager
def evil_page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _EvilPage)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{EVIL}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def endpoint_and_judge() -> Iterator[list[int]]:
    """The ports of the agents' endpoint and of a verification server, in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    loop, stopped, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    ports: list[int] = [listening.getsockname()[1]]

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        ports.append(int(endpoint.base_url.split(":")[2].split("/")[0]))
        started.set()
        try:
            await serve_on(listening, VerificationService(ServerSettings(), ""), stopped)
        finally:
            await endpoint.close()

    def work() -> None:
        with closing(loop):
            loop.run_until_complete(run())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield ports
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The status of every response that a server of this process sends."""
    seen: list[int] = []
    send = Response.__call__

    async def noted(response: Response, *words: Any) -> None:
        seen.append(response.status_code)
        await send(response, *words)

    monkeypatch.setattr(Response, "__call__", noted)
    return seen


@pytest.mark.slow
def test_a_page_of_another_origin_reaches_no_server(tmp_path: Path, statuses: list[int]) -> None:
    make_run(tmp_path / "runs" / "r", steps=1, groups_per_step=1)
    rule = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
    with (
        serving(tmp_path / "runs") as dashboard,
        endpoint_and_judge() as ports,
        evil_page() as evil,
        LivePage(tmp_path / "profile", flags=(rule,)) as page,
    ):
        for port in (*ports, dashboard.port):
            page.open(evil)
            page.until("document.title === 'evil' && document.body")
            statuses.clear()
            address = json.dumps(f"http://127.0.0.1:{port}")
            read = page.value(f"{ATTACKS}({address})")
            assert set(read) <= {"opaque", "refused"}  # the page reads none of it
            assert statuses == [403] * REQUESTS
            page.open(f"http://{EVIL}:{port}/")  # the page's own name leads to the server now
            statuses.clear()
            assert page.value(REBOUND) == [421] * 5
            assert set(statuses) == {421}
