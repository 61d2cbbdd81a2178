"""Serves the dashboard: one page, and its data as JSON, for which the page asks once a second.

    GET /                      the page, with its scripts and styles
    GET /api/runs              the list of runs
    GET /api/...               what a view shows
    GET /report/ID             the same page with the data of one run in it, to keep

Only reads. Web pages of others cannot use it: a foreign Host or Origin is refused. Bound to another address
than this machine's own, it asks for a token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.secrets import from_environment
from penstock.errors import PenstockError, UserError
from penstock.files import say
from penstock.inspection.dashboard.views import VIEWS, ShownRun, ShownRuns, comparison
from penstock.inspection.report import page, report_page
from penstock.serving import (
    AppServer,
    NoForeignPages,
    is_loopback,
    json_response,
    listen,
    make_app,
    run_until_stopped,
    url_of,
)
from penstock.store.run_folder import find

TOKEN_VARIABLE = "PENSTOCK_DASHBOARD_TOKEN"
_COOKIE = "penstock"
_CONNECTIONS, _SILENT_S = 64, 60.0
_MOST_COMPARED = 8  # the colours of the charts
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# a page carries a policy of its own, with the hashes of its script and its style
_PAGE_POLICY = {"Content-Security-Policy": "frame-ancestors 'none'"}


class _Gate:
    """Middleware: who may look, and the headers of every response."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The response to who may not look; the token of the address is exchanged for a cookie."""
        if request.headers.get("sec-fetch-site") == "cross-site" and request.url.path != "/":
            return json_response({"error": "allowed: the dashboard's own page"}, 403)
        if not self._token or self._is_token(request.cookies.get(_COOKIE, "")):
            return None
        if not self._is_token(request.query_params.get("token", "")):
            reason = "token: allowed: the address that penstock dashboard printed"
            return json_response({"error": reason}, 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(_COOKIE, self._token.decode(), httponly=True, samesite="strict")
        return response

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)


class Dashboard:
    """The app that shows the runs of one folder."""

    def __init__(self, folder: Path, token: str = "", hosts: tuple[str, ...] = ()) -> None:
        self.runs = ShownRuns(folder)
        routes = [
            Route("/api/runs", self._list),
            Route("/report/{run}", self._report),
            Route("/api/compare", self._compare),
            Route("/api/run/{run}/{view}", self._view),
            Route("/", _page),
        ]
        gates = [Middleware(NoForeignPages, hosts=hosts), Middleware(_Gate, token=token)]
        self.app = make_app(routes, middleware=gates)

    def _list(self, request: Request) -> Response:
        return _json(_read(self.runs.look))

    def _report(self, request: Request) -> Response:
        return _html(_read(lambda: report_page([find(self._run(request).folder.path)])))

    def _view(self, request: Request) -> Response:
        view = VIEWS.get(request.path_params["view"])
        if view is None:
            raise HTTPException(404, f"view: allowed: {', '.join(VIEWS)}")
        return _json(_read(lambda: view(self._run(request), dict(request.query_params))))

    def _run(self, request: Request) -> ShownRun:
        return self.runs.find(request.path_params["run"])

    def _compare(self, request: Request) -> Response:
        ids = request.query_params.get("runs", "").split(",")[:_MOST_COMPARED]
        return _json(_read(lambda: comparison([self.runs.find(run).folder for run in ids])))


V = TypeVar("V")


def _read(read: Callable[[], V]) -> V:
    """What `read` finds; a run that is unknown or cannot be read is a refusal."""
    try:
        return read()
    except KeyError:
        raise HTTPException(404, "run: allowed: one of the list") from None
    except (PenstockError, OSError, ValueError) as error:  # damaged, or changed during the look
        raise HTTPException(409, f"the run cannot be read: {error}") from None


async def _page(request: Request) -> Response:
    return _html(page("Penstock dashboard"))


def _html(text: str) -> Response:
    body = text.encode("utf-8", "replace")
    return Response(body, media_type="text/html", headers=_PAGE_POLICY)


def _json(value: object) -> Response:
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, media_type="application/json")


def serve(
    folder: Path, *, host: str = "127.0.0.1", port: int = 8090, names: tuple[str, ...] = ()
) -> None:
    """Serve the runs of a folder until Ctrl-C. Elsewhere than on this machine alone: with a token."""
    if not folder.is_dir():
        raise UserError(f"dashboard: got {str(folder)!r}, allowed: a folder with runs in it")
    token = from_environment("dashboard", TOKEN_VARIABLE, default=TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    with listen("dashboard", host, port) as listening:
        address = f"{url_of(host, listening)}/{f'?token={token}' if token else ''}"
        say(f"dashboard of {folder}: {address}  (Ctrl-C ends it)")
        dashboard = Dashboard(folder, token, names)
        run_until_stopped(lambda stopped: serve_on(listening, dashboard, stopped))


async def serve_on(listening: socket.socket, dashboard: Dashboard, stopped: asyncio.Event) -> None:
    """Serve on a socket until `stopped` is set."""
    server = AppServer(
        dashboard.app,
        connections=_CONNECTIONS,
        connections_per_client=_CONNECTIONS,
        silent_s=_SILENT_S,
    )
    async with server.on(listening, grace_s=0.1):  # pages only read: nothing is lost
        await stopped.wait()
