"""docs/security.md names tests that exist, and installs take only files of known hash."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import locked_install  # noqa: E402


def promises() -> dict[str, list[tuple[str, str]]]:
    """Return the (file, test) pairs of each promise."""
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    table = page.partition("## Promises")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    found: dict[str, list[tuple[str, str]]] = {}
    for promise, tests in rows:
        pairs = found[promise.strip("| ")] = []
        for part in tests.strip("| ").split("; "):
            file, _, names = part.partition(": ")
            pairs += [(file, name) for name in names.split(", ")]
    return found


def test_every_promise_names_tests_that_exist() -> None:
    assert len(promises()) >= 14
    for promise, pairs in promises().items():
        assert pairs, promise
        for file, name in pairs:
            tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                f"{promise}: {file} has no {name}"
            )


def test_every_pinned_version_has_hashes() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    hashes = (ROOT / "hashes.txt").read_text()
    assert locked_install.pins(hashes) == locked_install.pins(constraints)
    assert all(locked_install.known_hashes(hashes).values())


def test_make_installs_only_by_hash() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert [line for line in lines if re.search(r"\bpip\b.*\binstall\b", line)] == []
    assert sum("locked_install.py" in line for line in lines) == 2


def item(url: str) -> dict[str, Any]:
    return {"metadata": {"name": "Some_Package", "version": "1"}, "download_info": {"url": url}}


def test_a_file_of_another_hash_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"some-package": {"a" * 64}}
    line = locked_install.requirement(item("https://host/some_package-1.whl"), known)
    assert line == f"Some_Package==1 --hash=sha256:{'a' * 64}"  # pip refuses any other file
    with pytest.raises(SystemExit, match=r"Some_Package 1 is not in hashes\.txt"):
        locked_install.requirement(item("https://host/some_package-1.whl"), {})
    own = tmp_path / "some_package-1.whl"
    own.write_bytes(b"built here")
    line = locked_install.requirement(item(own.as_uri()), known)
    assert line.endswith(hashlib.sha256(b"built here").hexdigest())
    assert str(own) in capsys.readouterr().out
