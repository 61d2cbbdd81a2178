"""Take the pictures of docs/images that show a program: python scripts/take_screenshots.py RUN OTHER [--to FOLDER]

RUN and OTHER are two runs of one folder, such as two of `penstock train seed=N`; RUN has its report. Needs what
`make test` installs, and Chromium or Chrome.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))

from stages.browser import LivePage  # noqa: E402
from stages.dashboard_server import serving  # noqa: E402

DRAWN = (  # a chart is there, and nothing is still being read
    "document.querySelectorAll('svg').length > 2 && !document.body?.innerText.includes('Reading …')"
)
WIDE, PHONE, LONG = (1280, 860), (390, 844), (1280, 1500)


def take(run: Path, other: Path, to: Path) -> list[Path]:
    """Write the pictures; return their files."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        serving(run.parent) as client,
        LivePage(Path(profile)) as page,
    ):
        ids = {name: line["id"] for name, line in client.lines().items()}
        one, both = f"#/run/{ids[run.name]}", f"#/compare/{ids[run.name]},{ids[other.name]}"
        pictures = {
            "dashboard.png": (client.address + one, WIDE),
            "dashboard-compare.png": (client.address + both, WIDE),
            "dashboard-phone.png": (client.address + one, PHONE),
            "report.png": ((run / "report.html").resolve().as_uri(), LONG),
        }
        for name, (address, size) in pictures.items():
            page.open("about:blank")
            page.resize(*size)
            page.open(address)
            page.until(DRAWN)
            page.picture(to / name)
        return [to / name for name in pictures]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Take the pictures of docs/images that show a program."
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images")
    words = parser.parse_args()
    for file in take(words.run, words.other, words.to):
        print(file)
