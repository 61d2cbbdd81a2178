"""A run folder becomes a record and a page; missing, torn or damaged parts are reported, never raised."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.source import load_config, to_toml
from penstock.errors import UserError
from penstock.inspection.dashboard.views import MAX_TEXT, clip, spread_groups
from penstock.inspection.record import read_run, take_figures
from penstock.inspection.report import embed, report_page, write_report
from penstock.store.run_folder import RunFolder
from stages.made_run import GROUP_SIZE, make_run, metrics_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture
def run(made: RunFolder, tmp_path: Path) -> RunFolder:
    """Return a copy that a test may damage."""
    return RunFolder(Path(shutil.copytree(made.path, tmp_path / "run")))


def test_curves_are_the_metrics(made: RunFolder) -> None:
    record, rows = read_run(made), metrics_of(made)
    assert record.steps == [row["step"] for row in rows]
    for name in ("reward/mean", "grad_norm", "time/step_s", "staleness/max"):
        assert record.curves[name] == pytest.approx([row[name] for row in rows], rel=1e-6)
    assert record.missing == []


def test_evaluations_are_in_order_and_a_repeated_one_counts_once(run: RunFolder) -> None:
    summary = run.evaluations / "summary.jsonl"
    lines = summary.read_text().splitlines()
    again = json.loads(lines[2]) | {"accuracy": 0.123}
    summary.write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    rows = read_run(run).evaluations["heldout"]
    assert [row["step"] for row in rows] == sorted({json.loads(line)["step"] for line in lines})
    assert rows[2]["accuracy"] == 0.123


def test_histograms_and_fates_balance_with_the_journal(made: RunFolder) -> None:
    record = read_run(made)
    trained = 12 * 6
    assert record.groups == {"trained": trained, "dropped": 3, "buffered": 1, "in_flight": 1}
    assert record.drops == {"filtered": 1, "expired": 1, "failed": 1}
    assert sum(record.staleness.values()) == trained
    assert max(record.staleness) == 1
    finished, of_them_trained = (sum(row[i] for row in record.lengths) for i in (1, 2))
    assert of_them_trained == trained * GROUP_SIZE
    assert finished == (trained + 4) * GROUP_SIZE


def test_samples_cover_the_steps_and_the_drops(made: RunFolder) -> None:
    samples = [answer for group in spread_groups(made)["groups"] for answer in group["answers"]]
    states = Counter(sample["state"] for sample in samples)
    assert states["dropped"] == 3 * GROUP_SIZE
    steps = {sample["step"] for sample in samples if sample["state"] == "trained"}
    assert {1, 12} <= steps
    assert 100 <= len(samples) <= 400


def test_figures(made: RunFolder) -> None:
    record, rows = read_run(made), metrics_of(made)
    figures = take_figures(record)
    seconds = sum(row["time/step_s"] for row in rows)
    waited = sum(row["time/consumer_wait_s"] for row in rows)
    assert figures.trainer_waited == pytest.approx(waited / seconds, rel=1e-5)
    assert figures.reward is not None
    assert figures.reward.last == pytest.approx(rows[-1]["reward/mean"], rel=1e-6)
    assert (figures.drawn, figures.trained, figures.dropped) == (77, 72, 3)
    assert figures.largest_staleness == 1
    assert figures.steps == figures.planned_steps == 12


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("metrics.jsonl", "no step was logged"),
        ("eval/summary.jsonl", "no evaluation was done"),
        ("journal.db", "no histograms"),
        ("config.toml", "cannot be read"),
    ],
)
def test_a_missing_file_is_said(run: RunFolder, name: str, says: str) -> None:
    (run.path / name).unlink()
    record = read_run(run)
    assert any(says in line for line in record.missing)
    assert says in report_page([run])


def test_a_run_that_evaluates_nothing_misses_nothing(run: RunFolder) -> None:
    shutil.rmtree(run.evaluations)
    config = load_config(run.path / "config.toml").config
    plain = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": {}})})
    (run.path / "config.toml").write_text(to_toml(plain))
    assert read_run(run).missing == []


def test_an_empty_folder_still_gives_a_report(tmp_path: Path) -> None:
    path = write_report([RunFolder(tmp_path)])
    record = read_run(RunFolder(tmp_path))
    assert path == tmp_path / "report.html"
    assert len(record.missing) == 4
    assert take_figures(record).reward is None


def test_a_torn_last_line_is_left_out_and_said(run: RunFolder) -> None:
    text = run.metrics.read_bytes()
    run.metrics.write_bytes(text[:-30])
    record = read_run(run)
    assert record.steps == list(range(1, 12))
    assert record.missing == ["metrics.jsonl: the last line is cut off and was left out"]


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_device_or_a_pipe_is_no_file_of_a_run(run: RunFolder, target: str) -> None:
    run.metrics.unlink()
    if target == "pipe":
        os.mkfifo(run.metrics)
    else:
        run.metrics.symlink_to(target)
    assert "metrics.jsonl cannot be read: not a file" in read_run(run).missing


def test_a_damaged_journal_is_said(run: RunFolder) -> None:
    data = bytearray(run.journal.read_bytes())
    data[5000:60000] = bytes(55000)
    run.journal.write_bytes(bytes(data))
    record = read_run(run)
    assert any("journal" in line for line in record.missing)
    assert record.curves
    report_page([run])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["metrics.jsonl", "eval/summary.jsonl", "rollouts.jsonl", "config.toml"]),
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(
                ["step", "task", "accuracy", "reward/mean", "prompt", "parts", "versions", "reward"]
            ),
            st.one_of(
                st.none(),
                st.floats(),
                st.integers(),
                st.text(max_size=5),
                st.lists(st.integers(), max_size=2),
            ),
        ),
        max_size=4,
    ),
    tail=st.binary(max_size=12),
)
def test_no_content_raises(
    tmp_path_factory: pytest.TempPathFactory, name: str, rows: list, tail: bytes
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("any"))
    folder.evaluations.mkdir()
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    (folder.path / name).write_bytes(lines + tail)
    report_page([folder])


def test_numbers_that_are_not_finite_become_gaps(run: RunFolder) -> None:
    rows = metrics_of(run)
    rows[3]["grad_norm"], rows[4]["grad_norm"] = None, float("inf")
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read_run(run)
    assert record.curves["grad_norm"][3:5] == [None, None]
    report_page([run])


def test_long_texts_are_cut_with_a_word() -> None:
    text = clip("x" * 50_000)
    assert len(text) < MAX_TEXT + 50
    assert "cut: 50000 characters" in text


def test_embedded_text_cannot_leave_its_element() -> None:
    hostile = "</script><script>alert(1)</script><!-- \u2028 {{style}} &lt;"
    text = embed({"response": hostile})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["response"] == hostile


def test_runs_of_the_same_name_are_told_apart_by_their_paths(
    run: RunFolder, made: RunFolder
) -> None:
    again = RunFolder(Path(shutil.copytree(made.path, run.path.parent / "deeper" / "run")))
    page = report_page([run, again])
    assert f'"name":"{run.path}"' in page
    assert f'"name":"{again.path}"' in page


def test_a_report_of_no_run_or_to_a_bad_place_is_refused(made: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run"):
        write_report([])
    with pytest.raises(UserError, match="folder"):
        write_report([made], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_report([made], tmp_path / "file" / "report.html")


def test_the_page_needs_no_network(made: RunFolder, tmp_path: Path) -> None:
    page = write_report([made], tmp_path / "deep" / "report.html").read_text()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe" not in policy
    head = page.split('<script type="application/json"')[0]
    links = re.findall(r"""(?:src|href|@import|url\()=?["']?([^"')]*)""", head.replace(policy, ""))
    assert all(link.startswith(("#", "data:")) for link in links), links
