"""Read a Markdown page: its code blocks, its inline code, its tables."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

_INLINE = re.compile(r"`([^`]+)`")


@dataclass(slots=True, frozen=True)
class Block:
    """One code block; an indented block has no language."""

    language: str
    text: str
    line: int


@dataclass(slots=True, frozen=True)
class InlineCode:
    """One piece of inline code."""

    text: str
    line: int


@dataclass(slots=True, frozen=True)
class Table:
    """One table below one heading."""

    heading: str
    header: list[str]
    rows: list[list[str]]


@dataclass(slots=True)
class Page:
    """One page, in parts."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    inline: list[InlineCode] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def of_language(self, *languages: str) -> list[Block]:
        """Return the page's blocks in one of these languages."""
        return [block for block in self.blocks if block.language in languages]


def codes(cell: str) -> list[str]:
    """Return every piece of inline code in a text."""
    return _INLINE.findall(cell)


@functools.cache
def read_page(path: Path) -> Page:
    """Split a page into blocks, inline code and tables."""
    page, heading = Page(path), ""
    lines = [*path.read_text("utf-8").splitlines(), ""]
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        if line.startswith("```"):
            at += 1
            while not lines[at].startswith("```"):
                at += 1
            page.blocks.append(Block(line[3:].strip(), "\n".join(lines[start + 1 : at]), start + 2))
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while lines[at].startswith("    ") or (
                not lines[at].strip() and at + 1 < len(lines) and lines[at + 1].startswith("    ")
            ):
                at += 1
            text = "\n".join(row[4:] for row in lines[start:at])
            page.blocks.append(Block(_guess_language(text), text, start + 1))
            continue
        else:
            heading = line if line.startswith("#") else heading
            if line.startswith("|") and not lines[start - 1].startswith("|"):
                page.tables.append(_read_table(heading, lines[start:]))
        at += 1
    page.inline = _read_inline(lines)
    return page


def _guess_language(text: str) -> str:
    return "python" if re.match(r"(from|import) [\w.]+", text) else ""


def _read_table(heading: str, lines: list[str]) -> Table:
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        rows.append([cell.strip() for cell in cells])
    return Table(heading, rows[0], rows[2:])


def _read_inline(lines: list[str]) -> list[InlineCode]:
    """Return the inline code outside of blocks; a piece may go over a line's end."""
    found, fenced, after_blank, indented = [], False, True, False
    text = []
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
            text.append("")
            continue
        indented = line.startswith("    ") and (after_blank or indented)
        after_blank = not line.strip()
        text.append("" if fenced or indented else line)
    joined = "\n".join(text)
    for match in _INLINE.finditer(joined):
        if "\n\n" not in match[1]:
            found.append(
                InlineCode(" ".join(match[1].split()), joined.count("\n", 0, match.start()) + 1)
            )
    return found
