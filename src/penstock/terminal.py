"""What a person reads on a terminal: control codes in the text of models, data and files never reach it.

An escape sequence in a response could rewrite the screen, the window's title or the clipboard. Commands
print through `console` (rich) or `say` (plain lines), which show such characters as U+FFFD.
"""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import Segment

_HIDDEN, _KEPT = "\ufffd", "\n\t\u200c\u200d"  # the last two join letters and emoji


def visible(text: str) -> str:
    """Return the text with every character that cannot be seen, but line feeds and tabs, replaced."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT or _is_space(c) else _HIDDEN for c in text)


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def console(**options: Any) -> Console:
    """Return a rich console that reads no markup in text and makes it visible; options as rich's."""
    made = Console(**{"markup": False, **options})
    made.push_render_hook(_MakeVisible())
    return made


def say(text: object, *, error: bool = False) -> None:
    """Print one plain line, to stderr if it is an error."""
    print(visible(str(text)), file=sys.stderr if error else sys.stdout, flush=True)


class Visible:
    """A renderable with visible text; a live display needs it, which draws behind the console's hook."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


class _MakeVisible(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [one if isinstance(one, Control) else Visible(one) for one in renderables]
