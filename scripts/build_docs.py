"""Build the site of the documentation: python scripts/build_docs.py [FOLDER]. Installs the extra docs first if it is not there.

Pages are README.md (the first), docs/, CONTRIBUTING.md, CHANGELOG.md and the examples' README. Their order is that of the
table "Documentation" in README.md; the reference is made from the docstrings of the public names. A link that leads
nowhere fails the build.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MORE = {  # file: its page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
REFERENCE = "reference.md"
_LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_NOWHERE = re.compile(r"\[([^\[\]]*)\]\(#\)")


def write_pages(pages: Path) -> None:
    """Copy every page to one folder, with links that hold there."""
    shutil.copytree(ROOT / "docs", pages)
    sources = {ROOT / file: pages / page for file, page in MORE.items()}
    places = {
        **sources,
        **{p: pages / p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*")},
    }
    for source, page in places.items():
        if source.suffix == ".md":
            page.write_text(_moved(source, page, places), "utf-8")
    (pages / REFERENCE).write_text(_reference(), "utf-8")


def _moved(source: Path, page: Path, places: dict[Path, Path]) -> str:
    """The text of a page whose links lead to the copies; a link to a file that is no page becomes its name."""

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if not target or "://" in target:
            return match[0]
        file = (source.parent / target).resolve()
        if file not in places:
            return f"{match[1]}#{match[4]}" if file.exists() else match[0]
        copy = Path(os.path.relpath(places[file], page.parent))
        return f"{match[1]}{copy.as_posix()}{match[3] or ''}{match[4]}"

    return _NOWHERE.sub(r"\1", _LINK.sub(link, source.read_text("utf-8")))


def _reference() -> str:
    sys.path.insert(0, str(ROOT / "src"))
    import penstock

    names = [*penstock.__all__, "PenstockError", "RunError", "StopRequested", "UserError"]
    blocks = [f"::: penstock.{name}\n" for name in sorted(names, key=str.lower)]
    return "\n".join(["# Reference\n", "The public names of `import penstock`.\n", *blocks])


def navigation() -> list[tuple[str, list[str]]]:
    """The sections of the site and their pages, from the table in README.md."""
    table = (ROOT / "README.md").read_text("utf-8").partition("## Documentation")[2]
    rows = re.findall(r"^\| (?!to |---)([^|]+) \| (.+) \|$", table, re.MULTILINE)
    return [(name, re.findall(r"\]\(docs/([\w./-]+\.md)\)", links)) for name, links in rows]


def settings() -> str:
    """mkdocs.yml with the order of the pages."""
    lines = ["nav:", "  - Penstock: index.md"]
    for name, pages in navigation():
        if pages:
            lines += [f"  - {name[0].upper()}{name[1:]}:", *(f"    - {page}" for page in pages)]
        if "coming-from.md" in pages:
            systems = sorted(path.name for path in (ROOT / "docs" / "coming-from").glob("*.md"))
            lines += [f"    - coming-from/{name}" for name in systems]
    lines += ["  - Reference:", f"    - {REFERENCE}", "    - examples.md"]
    lines += ["  - Change the code:", "    - contributing.md", "    - changelog.md"]
    return f"{(ROOT / 'mkdocs.yml').read_text('utf-8')}{chr(10).join(lines)}\n"


def main(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if importlib.util.find_spec("mkdocs") is None:
        subprocess.run([sys.executable, ROOT / "scripts" / "locked_install.py", "docs"], check=True)
    write_pages(folder / "pages")
    (folder / "mkdocs.yml").write_text(settings(), "utf-8")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(folder / "mkdocs.yml"),
    ]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build" / "docs")))
