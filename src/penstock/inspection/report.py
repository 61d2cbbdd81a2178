"""`penstock report`: the dashboard's page as one HTML file, with the data of one or more runs in it.

The page is one template for both (`dashboard/assets`): with data it shows that, without it asks its server.
No text of a run ever reaches the page as markup: the data is JSON without a `<`, the scripts set text only,
and the page's own policy allows no other script and no other style; a report may connect to nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, UserError
from penstock.files import write_for
from penstock.inspection.dashboard.views import VIEWS, ShownRun, comparison, spread_groups
from penstock.inspection.record import read_line
from penstock.store.run_folder import RunFolder

__all__ = ["write_report"]

_SCRIPTS = (
    *("dom.js", "curves.js", "bars.js", "sections.js", "list.js"),
    *("samples.js", "service.js", "run.js", "compare.js", "app.js"),
)


def write_report(folders: list[RunFolder], out: Path | None = None) -> Path:
    """Write the report of these runs, by default into the first run's folder; return its path."""
    if not folders:
        raise UserError("report: got no run, allowed: one run folder or more")
    path = out or folders[0].path / "report.html"
    if path.is_dir():
        raise UserError(f"report: got the folder {path}, allowed: the name of an HTML file")
    write_for("report", path, report_page(folders).encode("utf-8", "replace").decode())
    return path


def report_page(folders: list[RunFolder]) -> str:
    """The page with these runs in it; several are compared, in their order."""
    runs = [ShownRun(str(number), folder) for number, folder in enumerate(folders)]
    names = Counter(folder.name for folder in folders)
    lines, answers = [], dict[str, Any]()
    for run in runs:
        name = run.folder.name if names[run.folder.name] == 1 else str(run.folder.path)
        lines.append(run.line_of(read_line(run.folder)) | {"name": name})
        for view in VIEWS:
            answers[f"/api/run/{run.id}/{view}"] = _answer(run, view)
        answers[f"/api/run/{run.id}/overview"]["name"] = name
    if len(runs) > 1:
        answers["/api/compare"] = comparison(folders)
    title = " · ".join(folder.name for folder in folders)
    written = time.strftime("%Y-%m-%d %H:%M")
    return page(
        f"{title} · Penstock report", {"written": written, "lines": lines, "answers": answers}
    )


def _answer(run: ShownRun, view: str) -> dict[str, Any]:
    """What a view shows; a run that lacks what the view reads is a sentence."""
    try:
        return spread_groups(run.folder) if view == "samples" else VIEWS[view](run, {})
    except (
        PenstockError,
        OSError,
        ValueError,
        TypeError,
    ) as error:  # damage can put any type anywhere
        return {"error": f"the run cannot be read: {error}"}


def page(title: str, data: dict[str, Any] | None = None) -> str:
    """The page: with data it needs no server, without it asks the dashboard that serves it."""
    style = _asset("page.css")
    script = "\n".join(map(_asset, _SCRIPTS))
    connect = "connect-src 'self'; " if data is None else ""
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"{connect}img-src data:; base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": embed(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("index.html"))


def embed(value: object) -> str:
    """JSON that is safe inside a script element: without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("penstock.inspection.dashboard") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
