"""Check what a release needs: one version everywhere, its changelog, and a wheel and an sdist that are whole.

    python scripts/release_check.py     after scripts/test_wheel.sh, which leaves the wheel in dist/

Prints one line for each thing and exits with 1 if something is wrong. Uploads nothing.
"""

from __future__ import annotations

import email
import os
import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    "Name",
    "Version",
    "Summary",
    "License-Expression",
    "Requires-Python",
    "Description-Content-Type",
)


def version() -> str:
    text = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return str(text["project"]["version"])


def wrong_texts(number: str) -> Iterator[str]:
    """Yield what does not say the version."""
    texts = {
        "src/penstock/__init__.py": rf'^__version__ = "{re.escape(number)}"$',
        "CHANGELOG.md": rf"^## {re.escape(number)}$",
        "CITATION.cff": rf"^version: {re.escape(number)}$",
    }
    for name, pattern in texts.items():
        if not re.search(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE):
            yield f"{name} does not name the version {number}"
    notes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition(f"## {number}\n")[2]
    if not notes.partition("\n## ")[0].strip():
        yield f"CHANGELOG.md says nothing of {number}"


def wrong_metadata(metadata: Message, number: str) -> Iterator[str]:
    """Yield what an index would miss."""
    yield from (f"the metadata has no {name}" for name in NEEDED if not metadata[name])
    if metadata["Version"] != number:
        yield f"the wheel is {metadata['Version']}, pyproject.toml says {number}"


def wrong_files(wheel: list[str], sdist: list[str]) -> Iterator[str]:
    """Yield the files of src/penstock that the wheel or the sdist lacks."""
    for path in sorted((ROOT / "src" / "penstock").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(ROOT / "src").as_posix()
            if name not in wheel:
                yield f"the wheel lacks {name}"
            if not any(file.endswith(f"/src/{name}") for file in sdist):
                yield f"the sdist lacks {name}"


def main() -> int:
    number = version()
    faults = list(wrong_texts(number))
    wheels = list((ROOT / "dist").glob(f"penstock-{number}-*.whl"))
    if wheels:
        from setuptools import build_meta

        os.chdir(ROOT)
        sdist = ROOT / "dist" / build_meta.build_sdist("dist")
        with zipfile.ZipFile(wheels[0]) as wheel, tarfile.open(sdist) as archive:
            metadata = wheel.read(f"penstock-{number}.dist-info/METADATA").decode()
            faults += wrong_metadata(email.message_from_string(metadata), number)
            faults += wrong_files(wheel.namelist(), archive.getnames())
    else:
        faults.append(f"dist/ has no wheel of {number}: make release-check builds it")
    for fault in faults:
        print(f"release-check: {fault}", file=sys.stderr)
    print(f"release-check: penstock {number}: {f'{len(faults)} faults' if faults else 'ready'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
