"""CONTRIBUTING.md shows the house as the code has it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
