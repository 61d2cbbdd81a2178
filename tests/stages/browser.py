"""A page in a real browser: what it has drawn, as elements and texts."""

from __future__ import annotations

import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=3000",
    "--dump-dom",
]


class Page(HTMLParser):
    """A dumped page: (tag, attributes) of every element, and the text of those with a class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag not in ("meta", "input", "br"):
            self._open.append(found.get("class", ""))

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag
            and all(attributes.get(f"data-{key}") == value for key, value in wanted.items())
        ]

    @property
    def root(self) -> dict[str, str]:
        return self.elements[0][1]


def open_page(path: Path, profile: Path) -> Page:
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", path.absolute().as_uri()]
    environment = {**os.environ, "HOME": str(profile)}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=True)
    return Page(done.stdout.decode())
