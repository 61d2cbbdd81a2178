"""Print the house: every floor, its units, their size and purpose, from the code itself.

python scripts/draw_house.py            print the picture
python scripts/draw_house.py --write    put it into CONTRIBUTING.md
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- house: python scripts/draw_house.py --write -->\n\n", "\n<!-- end of house -->"
WIDTH = 110


def floors() -> tuple[tuple[str, ...], ...]:
    """Return the floors as tests/test_layers.py holds them, the ground floor first."""
    for node in ast.parse((ROOT / "tests" / "test_layers.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLOORS":
            return ast.literal_eval(node.value)
    raise LookupError("tests/test_layers.py has no FLOORS")


def files_of(unit: str) -> list[Path]:
    """Return the unit's files; the one that says what the unit is comes first."""
    folder = SOURCE / unit
    if folder.is_dir():
        return [
            folder / "__init__.py",
            *sorted(set(folder.rglob("*.py")) - {folder / "__init__.py"}),
        ]
    return [SOURCE / f"{unit}.py"]


def purpose(file: Path) -> str:
    """Return the first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "?"
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def size(files: list[Path]) -> str:
    """Return the number of lines, rounded to half a thousand."""
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
    return f"{round(lines / 500) / 2:.1f}k" if lines >= 250 else "<0.5k"


def rows(floor: str, unit: str) -> list[str]:
    """Draw one unit; a long purpose goes on in the next line."""
    files = files_of(unit)
    name = f"{unit}/" if (SOURCE / unit).is_dir() else unit
    first = f"    {floor:>2} | {name:<11} {size(files):>5}  "
    further = f"       |{' ' * (len(first) - 8)}"
    return textwrap.wrap(purpose(files[0]), WIDTH, initial_indent=first, subsequent_indent=further)


def picture() -> str:
    """Draw every floor, the top floor first."""
    lines = []
    for number, units in reversed(list(enumerate(floors()))):
        for place, unit in enumerate(sorted(units)):
            lines += rows(str(number) if place == 0 else "", unit)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the picture or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into CONTRIBUTING.md")
    if not parser.parse_args().write:
        print(picture(), end="")
        return
    text = PAGE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{picture()}{END}{rest.split(END, 1)[1]}", "utf-8")


if __name__ == "__main__":
    main()
