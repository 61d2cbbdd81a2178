"""Files that docstrings and docs name exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.rglob("src/**/*.py")]
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|sh|toml|md))`")
MADE_BY_RUNS = {"config.toml", "my_rewards.py", "my.toml", "configs/until-step-N.toml"}
EXISTING = {
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "docs", "scripts", "benchmarks", "configs", "examples")
    for path in (ROOT / folder).rglob("*")
} | {path.name for path in ROOT.iterdir()}


def test_every_named_file_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in set(NAMED.findall(page.read_text())) - MADE_BY_RUNS
        if not any(path == name or path.endswith(f"/{name}") for path in EXISTING)
    ]
    assert not missing, "\n".join(missing)


def test_the_test_files_that_run_first_exist() -> None:
    listed = re.search(
        r"LONGEST_FIRST = \((.*?)\n\)", (ROOT / "tests/conftest.py").read_text(), re.S
    )
    assert listed is not None
    names = re.findall(r'"(.+?)"', listed[1])
    assert names
    assert {f"tests/{name}" for name in names} <= EXISTING
