"""CONTRIBUTING.md shows the house as the code has it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_is_current() -> None:
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / "scripts/draw_house.py")
    assert spec is not None
    assert spec.loader is not None
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    shown = page.split(house.BEGIN)[1].split(house.END)[0]
    assert without_sizes(shown) == without_sizes(house.picture()), (
        "draw it again: python scripts/draw_house.py --write"
    )


def without_sizes(text: str) -> str:
    return re.sub(r" *<?\d+\.\dk", " N", text)


def test_the_tree_of_the_readme_names_every_unit_that_exists_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    tree = readme.split("    src/penstock/\n")[1].split("    benchmarks/")[0]
    units = {name for line in tree.splitlines() for name in re.findall(r"[\w]+(?:/|\.py)", line)}
    source = ROOT / "src" / "penstock"
    there = {f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.name for path in source.glob("*.py")} - {"__init__.py"}
    assert units == there
