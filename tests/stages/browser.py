"""A page in a real browser: what it has drawn, as elements and texts."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Self

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
    "--hide-scrollbars",
]
LONGEST_MS = 60_000  # a condition that does not hold by then never will
DUMP = ["--virtual-time-budget=3000", "--dump-dom"]


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
        if tag not in ("meta", "link", "input", "br"):
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
    command = [str(BROWSER), *FLAGS, *DUMP, f"--user-data-dir={profile}", path.absolute().as_uri()]
    environment = {**os.environ, "HOME": str(profile)}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=True)
    return Page(done.stdout.decode())


class LivePage:
    """A page that stays open in a browser: told what to do through the browser's own pipe."""

    def __init__(
        self, profile: Path, width: int = 1280, height: int = 900, flags: tuple[str, ...] = ()
    ) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        words = [
            str(BROWSER),
            *FLAGS,
            *flags,
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        script = f"exec {shlex.join([*words, 'about:blank'])} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "HOME": str(profile)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self._number, self._rest, self._session = 0, b"", ""
        [target] = [
            one["targetId"]
            for one in self._call("Target.getTargets")["targetInfos"]
            if one["type"] == "page"
        ]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def dump(self, path: Path) -> Page:
        """Open a file in an empty page; return what it has drawn when everything in it is loaded."""
        self.open("about:blank")
        self.open(path.absolute().as_uri())
        self.value(
            """new Promise((done) => {
              const drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => done()));
              document.readyState === "complete" ? drawn() : addEventListener("load", drawn);
            })"""
        )
        return self.shown()

    def shown(self) -> Page:
        """Return what the page shows now."""
        return Page(self.value("document.documentElement.outerHTML"))

    def resize(self, width: int, height: int) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **shape)

    def value(self, script: str) -> Any:
        """Return what an expression is in the page; a promise is waited for."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression holds, looking again whenever the page changes."""
        self.value(
            f"""new Promise((done, fail) => {{
              setTimeout(() => fail(new Error({json.dumps(condition)})), {LONGEST_MS});
              const holds = () => {{ try {{ return {condition}; }} catch {{ return false; }} }};
              if (holds()) return done();
              const watch = new MutationObserver(() => holds() && (watch.disconnect(), done()));
              const all = {{ subtree: true, childList: true, attributes: true, characterData: true }};
              watch.observe(document, all);
            }})"""
        )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._in.fileno(), 1 << 16)
                assert piece, "the browser has ended"
                self._rest += piece
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
