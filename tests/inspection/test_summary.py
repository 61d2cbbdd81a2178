"""The closing lines of a run, and the table of an evaluation."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.config.source import load_config, to_toml
from penstock.inspection.report import write_report
from penstock.inspection.summary import duration, print_evaluations, print_summary
from penstock.rollout.evaluation.evaluate import EvalResult
from penstock.store.run_folder import RunFolder
from stages.made_run import make_run, metrics_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "made", steps=6, groups_per_step=3)


def summary_of(run: RunFolder, *, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=100)
    print_summary(console, run)
    file.seek(0)
    return file.read()


def test_the_summary_tells_what_was_reached_and_lost(run: RunFolder) -> None:
    write_report([run])
    text, rows = summary_of(run), metrics_of(run)
    first, last = rows[0]["reward/mean"], rows[-1]["reward/mean"]
    assert f"{first:.3f} -> {last:.3f}" in text
    assert "heldout accuracy" in text
    assert f"6 in {sum(row['time/step_s'] for row in rows):.1f} s" in text
    assert "tokens/s" in text
    assert "3 of 23 groups" in text
    assert "1 filtered" in text
    assert "trainer" in text
    assert "█" in text


def test_paths_are_whole_lines_however_long(run: RunFolder) -> None:
    write_report([run])
    lines = summary_of(run).splitlines()
    assert f"report: {run.path / 'report.html'}" in lines
    assert lines[-1] == f"run folder: {run.path}"


def test_the_time_is_that_of_all_sessions_without_the_pauses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", steps=6, groups_per_step=3)
    (run.path / "timeline").mkdir()
    events = [
        {"lane": "run", "what": "session", "start": 100.0, "end": 100.0},
        {"lane": "trainer", "what": "train", "start": 105.0, "end": 130.0},
        {"lane": "run", "what": "session", "start": 90_000.0, "end": 90_000.0},
        {"lane": "trainer", "what": "train", "start": 90_001.0, "end": 90_010.5},
    ]
    (run.path / "timeline" / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    training = sum(row["time/step_s"] for row in metrics_of(run))
    text = " ".join(summary_of(run).split())
    assert f"6 in {training:.1f} s, 40.5 s with starts and evaluations" in text


def test_the_end_names_the_model_and_the_next_commands(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made", steps=2, groups_per_step=3)
    for step in (1, 2):
        (made.checkpoints / f"step-{step}" / "model").mkdir(parents=True)
    (made.checkpoints / "step-1" / "manifest.json").write_text("{}")  # step 2 is not complete
    lines = summary_of(made).splitlines()
    assert f"model: {made.checkpoints / 'step-1' / 'model'}" in lines
    assert lines[-1] == f"next: penstock export {made.path} --to FOLDER"


def test_the_best_step_is_offered_where_one_is_evaluated_and_kept(tmp_path: Path) -> None:
    made = make_run(tmp_path / "made", steps=2, groups_per_step=3)
    config = load_config(None, ["checkpoint.keep_best=heldout/accuracy"]).config
    (made.path / "config.toml").write_text(to_toml(config))
    model = made.checkpoints / "step-2" / "model"
    model.mkdir(parents=True)
    (model.parent / "manifest.json").write_text("{}")
    assert summary_of(made).endswith(f"export {made.path} --step best --to FOLDER\n")
    (made.evaluations / "summary.jsonl").unlink()  # as in a fork
    assert summary_of(made).endswith(f"export {made.path} --to FOLDER\n")


def test_what_is_wrong_stands_below_the_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "ill", steps=6, groups_per_step=3)
    rows = [row | {"truncated/share": 0.95} for row in metrics_of(run)]
    run.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = summary_of(run)
    assert "The responses are cut off before they end  since step 1" in text
    assert "sampling.max_tokens=48" in text


def test_a_terminal_without_unicode_gets_a_plain_plot(run: RunFolder) -> None:
    assert "#" in summary_of(run, encoding="ascii")


def test_an_empty_folder_is_summed_up_with_what_is_missing(tmp_path: Path) -> None:
    text = summary_of(RunFolder(tmp_path))
    assert "metrics.jsonl is not there" in text
    assert "steps  0" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (61, "1 min 01 s"), (7384, "2 h 03 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_evaluations_are_a_table() -> None:
    result = EvalResult(
        task="held[out]",
        step=0,
        policy_version=0,
        problems=10,
        samples=40,
        accuracy=0.5,
        low=0.31,
        high=0.69,
        pass_at={1: 0.5, 2: 0.625, 4: 0.75},
        failures=2,
    )
    console = Console(file=io.StringIO(), width=80)
    print_evaluations(console, [result])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "held[out]",
        "0.500",
        "0.31-0.69",
        "pass@2",
        "0.625",
        "pass@4",
        "0.750",
        "40",
        "2",
    ):
        assert words in text
    assert "…" not in text
