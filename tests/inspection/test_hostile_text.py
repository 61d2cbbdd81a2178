"""Text of models, data and strangers is data: on the terminal, in the log and in the report."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest

from penstock import cli, files
from penstock.inspection.track.logs import NoteLog, RunInfo
from penstock.store.run_folder import RunFolder
from stages.browser import BROWSER, LivePage
from stages.hostile_run import MARKUP, PAYLOAD, TERMINAL, make_hostile_run

VIEWS = {
    "compare/0,1": "svg[data-chart]",
    "run/0/overview": "svg[data-chart]",
    "run/0/samples": ".group",
    "run/0/journal": ".events tr",
    "run/0/timeline": "canvas",
    "run/0/settings": ".config",
}
UNSEEN = re.compile(r"[^\n\t\x20-\x7e\u00a0-\u2029\u202f-\U0010ffff]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_hostile_run(tmp_path_factory.mktemp("runs"))


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    "command",
    [
        ["rollouts"],
        ["rollouts", "--where", "state = 'dropped'"],
        ["rollouts", "--json"],
        ["rollouts", "--task", "no such task"],
        ["audit"],
        ["audit", "--json"],
        ["doctor"],
        ["doctor", "--json"],
        ["timeline"],
        ["report"],
        ["scale", "producers=2"],
        ["resume", "sede=1"],
        ["eval", "eval.max_problems=-1"],
    ],
    ids=" ".join,
)
def test_no_command_sends_control_codes_to_the_terminal(
    run: RunFolder,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    penstock(monkeypatch, command[0], str(run.path), *command[1:])
    said = "".join(capsys.readouterr())
    assert said
    assert UNSEEN.findall(said) == []


def test_a_config_of_a_stranger_is_printed_as_it_is(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copyfile(run.path / "config.toml", tmp_path / "theirs.toml")
    assert penstock(monkeypatch, "config", str(tmp_path / "theirs.toml")) == 0
    said = capsys.readouterr().out
    assert UNSEEN.findall(said) == []
    assert "[/][red][/dim]" in said


def test_a_console_and_the_log_show_every_character(tmp_path: Path) -> None:
    made = files.console(file=io.StringIO(), force_terminal=True, width=200)
    made.print(PAYLOAD, highlight=False)
    made.print_json('["fine"]')
    shown = made.file.getvalue()  # type: ignore[attr-defined]
    assert UNSEEN.findall(re.sub(r"\x1b\[[0-9;]*m", "", shown)) == []
    assert "pwned[/][red][/dim]" in shown
    NoteLog(tmp_path / "run.log").note(PAYLOAD)
    assert UNSEEN.findall((tmp_path / "run.log").read_text()) == []


def test_the_live_panel_shows_every_character(tmp_path: Path) -> None:
    from penstock.config.source import load_config
    from penstock.inspection.track.console import ConsoleTracker

    out = files.console(file=io.StringIO(), force_terminal=True, width=200)
    info = RunInfo(
        config=load_config().config,
        folder=tmp_path,
        name="run",
        total_steps=2,
        first_step=0,
        live=lambda: TERMINAL,
    )
    tracker = ConsoleTracker(info, out)
    tracker.log_step(1, {"reward/mean": 1.0})
    tracker.log_eval(1, {f"eval/{TERMINAL}/accuracy": 0.5})
    tracker.note(PAYLOAD)
    tracker.close()
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "pwned" in shown
    assert not re.search(r"\x1b\]|\x9b|\u202e|\x1b\[2J\x1b\]|\x07|\x08", shown)


def test_the_card_and_the_curves_of_an_export_hold_no_markup_of_the_run(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert penstock(monkeypatch, "export", str(run.path), "--to", str(tmp_path / "out")) == 0
    for name in ("README.md", "curves.svg"):
        text = (tmp_path / "out" / name).read_text("utf-8")
        assert "pwned" in text
        assert not re.search(r"<(script|img|iframe|a |base|meta|svg onload)|\]\(javascript", text)
        assert UNSEEN.findall(text) == []


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_report_of_a_hostile_run_is_drawn_and_runs_no_script_of_it(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    assert penstock(monkeypatch, "report", str(run.path), str(run.path), "--out", str(out)) == 0
    everything = ""
    with LivePage(tmp_path / "profile") as browser:
        for part, drawn in VIEWS.items():
            browser.open("about:blank")
            browser.open(f"{out.as_uri()}#/{part}")
            browser.until(f"document.querySelectorAll('#page {drawn}').length > 0")
            page = browser.shown()
            assert (page.root.get("data-ready"), page.root.get("data-error")) == ("yes", None)
            assert "data-pwned" not in page.root
            tags = {tag for tag, _ in page.elements}
            assert not tags & {"img", "iframe", "base", "object", "embed"}
            assert all(link["href"].startswith("#/") for link in page.all("a"))
            assert sum(tag == "script" for tag, _ in page.elements) == 2  # the data and our own
            assert all(not name.startswith("on") for _, given in page.elements for name in given)
            everything += browser.value("document.getElementById('page').textContent")
            if part.endswith("samples"):
                for field in ("prompt", "said", "tool-call", "role"):
                    assert any(MARKUP in text for text in page.texts[field]), field
    assert everything.count("javascript:") >= 8  # shown as text, in every place that has it
