"""Put the records of runs into one HTML page; the scripts in `assets/` draw it in the browser.

No text of a run ever reaches the page as markup: the data is JSON without a `<`, the scripts set text
only, and the page's own policy allows no other script, no style and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections import Counter
from dataclasses import asdict
from importlib.resources import files

from penstock.inspection.report.data import RunRecord
from penstock.inspection.report.figures import take_figures

SHARED_SCRIPTS = (
    "dom.js",
    "curves.js",
    "bars.js",
    "samples.js",
    "sections.js",
)  # with the dashboard
SCRIPTS = (*SHARED_SCRIPTS, "page.js")


def render(records: list[RunRecord]) -> str:
    """Return the page; several runs are drawn over each other, in their order."""
    names = Counter(record.name for record in records)
    runs = [
        asdict(record)
        | {"name": record.name if names[record.name] == 1 else record.path}
        | {"figures": asdict(take_figures(record))}
        for record in records
    ]
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "title": html.escape(" · ".join(record.name for record in records)),
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}",
        "style": style,
        "script": script,
        "data": embed({"written": time.strftime("%Y-%m-%d %H:%M"), "runs": runs}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def embed(value: object) -> str:
    """Return JSON that is safe inside a script element: without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("penstock.inspection.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
