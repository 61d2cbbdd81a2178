"""Serves the dashboard: one page, its data as JSON, and a stream of changes.

    GET /                      the page; GET /static/NAME: its scripts and styles
    GET /events                changed runs, as server-sent events
    GET /api/...               what a view shows
    GET /report/ID             the report of a run, made now

Only reads. Web pages of others cannot use it (`reward/sandbox/listener.py` refuses a foreign Host or Origin).
Bound to another address than this machine's own, it asks for a token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.config.secrets import from_environment
from penstock.errors import PenstockError, UserError
from penstock.files import say
from penstock.inspection.compare import compare
from penstock.inspection.dashboard import pairs, views
from penstock.inspection.dashboard.shown_run import ShownRun, ShownRuns
from penstock.inspection.report.data import read_run
from penstock.inspection.report.page import SHARED_SCRIPTS, render
from penstock.reward.sandbox.listener import Listener, ListenerLimits, Refusal, Reply, Request
from penstock.reward.sandbox.serve import is_loopback

TOKEN_VARIABLE = "PENSTOCK_DASHBOARD_TOKEN"
MOST_COMPARED = 8  # the colours of the charts
_LOOK_EVERY_S = 1.0  # while a page is open: other processes write the runs
_HEARTBEAT_S = 15.0
_LIMITS = ListenerLimits(
    connections=64,
    connections_per_client=64,
    header_s=60.0,
    body_s=30.0,
    body_bytes=0,
    all_bodies_bytes=0,
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# the report carries a policy of its own, with the hashes of its script and its style
_REPORT_HEADERS = _HEADERS | {"Content-Security-Policy": "frame-ancestors 'none'"}
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_OWN = ("app.js", "list.js", "run.js", "samples_view.js", "compare.js", "dashboard.css", "icon.svg")


class Dashboard:
    """Answers requests about the runs of one folder."""

    def __init__(self, folder: Path, token: str = "") -> None:
        self.runs, self._token = ShownRuns(folder), token
        self._static = _read_static()
        self._watching: set[asyncio.Queue[list[dict[str, Any]]]] = set()
        self._watched = asyncio.Event()  # set while somebody watches
        self._complete = False  # whether every run was looked at once

    async def answer(self, request: Request) -> Reply:
        """Answer one request; raise Refusal for what does not exist or is not allowed."""
        parts = urlsplit(request.path)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if request.method != "GET":
            raise Refusal(405, "method: allowed: GET")
        if request.headers.get("sec-fetch-site") == "cross-site" and parts.path != "/":
            raise Refusal(403, "allowed: the dashboard's own page")
        if self._token and not self._is_known(request):
            return self._let_in(asked)
        if parts.path == "/events":
            stream = self._events()
            return Reply(content_type="text/event-stream", stream=stream, headers=_HEADERS)
        found = self._static.get(parts.path)
        if found is not None:
            return found
        return await asyncio.to_thread(self._read, parts.path, asked)

    # -- who may look ----------------------------------------------------------------------------

    def _is_known(self, request: Request) -> bool:
        given = request.headers.get("cookie", "")
        cookies = dict(part.strip().partition("=")[::2] for part in given.split(";"))
        return hmac.compare_digest(cookies.get("penstock", "").encode(), self._token.encode())

    def _let_in(self, asked: dict[str, str]) -> Reply:
        """Exchange the token of the address for a cookie; refuse everybody else."""
        if not hmac.compare_digest(asked.get("token", "").encode(), self._token.encode()):
            raise Refusal(401, "token: allowed: the address that penstock dashboard printed")
        cookie = f"penstock={self._token}; HttpOnly; SameSite=Strict; Path=/"
        headers = _HEADERS | {"Location": "/", "Set-Cookie": cookie}
        return Reply(content_type="text/plain", status=303, headers=headers)

    # -- reading, in a thread --------------------------------------------------------------------

    def _read(self, path: str, asked: dict[str, str]) -> Reply:
        words = path.strip("/").split("/")
        try:
            if words[0] == "report" and len(words) == 2:
                page = render([read_run(self.runs.find(words[1]).folder)])
                body = page.encode("utf-8", "replace")
                kind = "text/html; charset=utf-8"
                return Reply(content_type=kind, body=body, headers=_REPORT_HEADERS)
            if words[:2] == ["api", "compare"]:
                return _json(self._compare(asked.get("runs", "").split(",")))
            if words[:2] == ["api", "run"] and len(words) == 4 and words[3] in _VIEWS:
                return _json(_VIEWS[words[3]](self.runs.find(words[2]), asked))
        except KeyError:
            raise Refusal(404, "run: allowed: one of the list") from None
        except (PenstockError, OSError, ValueError) as error:  # damaged, or changed during the look
            raise Refusal(409, f"the run cannot be read: {error}") from None
        raise Refusal(404, "path: allowed: /, /events, /report/ID, /api/...")

    def _compare(self, ids: list[str]) -> dict[str, Any]:
        folders = [self.runs.find(run_id).folder for run_id in ids[:MOST_COMPARED]]
        found: list[dict[str, Any]] = []
        for number, other in enumerate(folders[1:], start=1):
            try:
                results = compare(folders[0], other)
            except PenstockError:
                continue  # no prompt in common
            for one in results:
                row = {"run": number, "verdict": one.verdict}
                row |= {name: getattr(one, name) for name in _COMPARED}
                row["examples"] = [
                    [{"prompt": a.prompt, "response": a.response, "score": a.score} for a in pair]
                    for pair in one.examples
                ]
                found.append(row)
        return {"settings": views.differing_settings(folders), "comparisons": found}

    # -- changes ---------------------------------------------------------------------------------

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield the list, then every change, as server-sent events; ends when the client is gone."""
        queue: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._watching.add(queue)
        try:
            self._watched.set()
            yield _event("runs", self.runs.lines())
            if self._complete:
                yield _event("changes", [{"complete": True}])
            while True:
                try:
                    changes = await asyncio.wait_for(queue.get(), _HEARTBEAT_S)
                except TimeoutError:
                    yield b": here\n\n"
                    continue
                yield _event("changes", changes)
        finally:
            self._watching.discard(queue)
            if not self._watching:
                self._watched.clear()

    async def watch(self) -> None:
        """Look for changes once a second while somebody watches; never ends by itself."""
        loop = asyncio.get_running_loop()
        while True:
            await self._watched.wait()
            await asyncio.to_thread(self._look, loop)
            if not self._complete:
                self._complete = True
                self._tell([{"complete": True}])
            await asyncio.sleep(_LOOK_EVERY_S)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for change in self.runs.changes():
                loop.call_soon_threadsafe(self._tell, [change])
        except OSError as error:  # the folder itself is gone or cannot be read
            loop.call_soon_threadsafe(self._tell, [{"error": f"{error}"}])

    def _tell(self, changes: list[dict[str, Any]]) -> None:
        for queue in self._watching:
            queue.put_nowait(changes)


_COMPARED = (
    *("task", "measure", "steps", "pairs", "first", "second"),
    *("difference", "low", "high", "first_wins", "second_wins"),
)


def _overview(run: ShownRun, asked: dict[str, str]) -> dict[str, Any]:
    found, wait = run.value("overview", views.overview)
    return {**found, "id": run.id, "again_in_s": wait}


def _samples(run: ShownRun, asked: dict[str, str]) -> dict[str, Any]:
    return views.groups(run.folder, asked)


def _pairs(run: ShownRun, asked: dict[str, str]) -> dict[str, Any]:
    names = pairs.sources(run.folder)
    source = asked.get("source") if asked.get("source") in names else names[0]
    assert source is not None
    found, wait = run.value(f"pairs {source}", lambda folder: pairs.read_pairs(folder, source))
    offset = asked.get("offset", "0")
    page = pairs.page_of(found, asked.get("order", "better"), int(offset[:9] or 0))
    return {**page, "source": source, "sources": names, "again_in_s": wait}


def _journal(run: ShownRun, asked: dict[str, str]) -> dict[str, Any]:
    found, wait = run.value("journal", views.journal_state)
    return {**found, "again_in_s": wait}


def _timeline(run: ShownRun, asked: dict[str, str]) -> dict[str, Any]:
    worked, wait = run.value("worked", views.read_worked)
    start, end = (float(asked.get(name) or 0) for name in ("from", "to"))
    return {**views.timeline(worked, start, end), "again_in_s": wait}


_VIEWS: dict[str, Callable[[ShownRun, dict[str, str]], dict[str, Any]]] = {
    "overview": _overview,
    "samples": _samples,
    "pairs": _pairs,
    "journal": _journal,
    "timeline": _timeline,
}


def _json(value: object) -> Reply:
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Reply(content_type="application/json", body=body, headers=_HEADERS)


def _event(name: str, value: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def _read_static() -> dict[str, Reply]:
    """Return the page and everything that it loads, by path."""
    own, shared = files("penstock.inspection.dashboard"), files("penstock.inspection.report")
    assets = {"/": own / "assets" / "index.html"}
    assets |= {f"/static/{name}": own / "assets" / name for name in _OWN}
    assets |= {
        f"/static/{name}": shared / "assets" / name for name in (*SHARED_SCRIPTS, "page.css")
    }
    return {
        path: Reply(
            content_type=f"{_TYPES[Path(asset.name).suffix]}; charset=utf-8",
            body=asset.read_bytes(),
            headers=_HEADERS,
        )
        for path, asset in assets.items()
    }


def serve(
    folder: Path, *, host: str = "127.0.0.1", port: int = 8090, names: tuple[str, ...] = ()
) -> None:
    """Serve the runs of a folder until Ctrl-C. Elsewhere than on this machine alone: with a token."""
    if not folder.is_dir():
        raise UserError(f"dashboard: got {str(folder)!r}, allowed: a folder with runs in it")
    token = from_environment("dashboard", TOKEN_VARIABLE, default=TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise UserError(
            f"dashboard: host {host!r}, port {port}: {error.strerror}, allowed: a free port "
            "(--port 0 takes any)"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    say(f"dashboard of {folder}: {address}{f'?token={token}' if token else ''}  (Ctrl-C ends it)")
    with listening:
        asyncio.run(_until_signal(listening, Dashboard(folder, token), names))


async def _until_signal(
    listening: socket.socket, dashboard: Dashboard, names: tuple[str, ...]
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve_on(listening, dashboard, stopped, names)


async def serve_on(
    listening: socket.socket,
    dashboard: Dashboard,
    stopped: asyncio.Event,
    names: tuple[str, ...] = (),
) -> None:
    """Serve on a socket until `stopped` is set."""
    listener = Listener(dashboard.answer, replace(_LIMITS, hosts=names))
    await listener.start(listening)
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(dashboard.watch())
            await stopped.wait()
            watching.cancel()
    finally:
        await listener.close()
