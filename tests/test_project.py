"""What others need to join: the site of the documentation, workflows, templates, and the check of a release."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from email.message import Message
from pathlib import Path

import pytest
import yaml

from penstock.inspection.report import write_report
from stages.browser import BROWSER
from stages.made_run import make_run

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_the_site_leads_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    pages = tmp_path / "pages"
    script("build_docs").write_pages(pages)
    count = 0
    for page in pages.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                count += 1
        assert "](#)" not in page.read_text("utf-8"), page.name
    assert count > 100
    assert "::: penstock.train" in (pages / "reference.md").read_text()


def test_the_site_has_every_page_once() -> None:
    text = script("build_docs").settings()
    listed = [page for line in yaml.safe_load(text)["nav"] for page in _pages(line)]
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(set(listed)) == sorted(listed)
    assert docs <= set(listed)


def _pages(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages(value)]
    return (
        [page for item in entry for page in _pages(item)]
        if isinstance(entry, list)
        else [str(entry)]
    )


def test_the_workflows_run_make_targets_on_both_machines_and_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    quick, long = workflow["jobs"]["quick"], workflow["jobs"]["long"]
    commands = [step["run"] for job in (quick, long) for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make ${{ matrix.target }}"]
    assert {"test", *long["strategy"]["matrix"]["target"]} <= TARGETS
    assert quick["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert any("arm" in machine for machine in quick["strategy"]["matrix"]["machine"])


def test_a_bug_report_is_asked_for_what_a_maintainer_needs() -> None:
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()
    for command in ("penstock version --verbose", "penstock doctor RUN"):
        assert command in text


def test_a_release_has_one_version_and_a_changelog() -> None:
    check = script("release_check")
    assert list(check.wrong_texts(check.version())) == []
    assert len(list(check.wrong_texts("9.9.9"))) == 4
    metadata = Message()
    metadata["Version"] = "1"
    assert "the wheel is 1, pyproject.toml says 2" in list(check.wrong_metadata(metadata, "2"))
    assert "the wheel lacks penstock/py.typed" in list(check.wrong_files([], []))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_screenshots_of_the_docs_can_be_taken_again(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name, steps=4) for name in ("one", "two")]
    write_report([runs[0]], None)
    files = script("take_screenshots").take(runs[0].path, runs[1].path, tmp_path)
    assert {file.name for file in files} <= {file.name for file in (ROOT / "docs/images").iterdir()}
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
