"""Links between the pages lead somewhere: to a file that exists, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https://[\w.-]+/?\S*$", target):
            continue  # the network is not asked
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in headings(file), f"{page.name}: {target}"
    for name in re.findall(r"\bdocs/[\w-]+\.md\b", text):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_every_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    missing = [page.name for page in PAGES if f"docs/{page.name}" not in readme]
    assert set(missing) <= {page.name for page in ROOT.glob("*.md")}
