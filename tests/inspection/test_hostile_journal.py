"""A stranger's journal cannot hold a look: its queries are ours, and each has an end."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from penstock import cli
from penstock.errors import JournalDamaged, RunError
from penstock.inspection.dashboard.views import ShownRuns, overview
from penstock.store.journal import Journal, schema
from stages.dashboard_server import serving
from stages.made_run import make_run

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


def with_endless_views(path: Path) -> Path:
    """A run whose journal answers every query of a view for ever."""
    folder = make_run(path, steps=2, groups_per_step=2)
    with contextlib.closing(sqlite3.connect(folder.journal)) as database:
        views = database.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchall()
        assert views
        for (view,) in views:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({view})")]
            database.execute(f"DROP VIEW {view}")
            values = ", ".join(f"({ENDLESS}) AS {column}" for column in columns)
            database.execute(f"CREATE VIEW {view} AS SELECT {values}")
        database.commit()
    return folder.path


def penstock(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("command", ["audit", "report", "rollouts", "doctor", "compare", "runs"])
def test_a_look_at_endless_views_ends_and_names_them(
    tmp_path: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(with_endless_views(tmp_path / "theirs"))
    words = {"compare": [run, run], "runs": [str(tmp_path)]}.get(command, [run])
    code = penstock(monkeypatch, command, *words)
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    if command == "audit":
        assert (code, "the definition of" in said) == (1, True)


def test_the_dashboard_lists_good_runs_beside_one_with_endless_views(tmp_path: Path) -> None:
    with_endless_views(tmp_path / "theirs")
    make_run(tmp_path / "good", steps=2, groups_per_step=2)
    with serving(tmp_path) as client:
        lines = client.lines()
    assert lines["theirs"]["state"] == "damaged"
    assert lines["good"]["state"] != "damaged"


def test_the_dashboard_lists_good_runs_beside_one_with_endless_rewards(tmp_path: Path) -> None:
    make_run(tmp_path / "good", steps=2, groups_per_step=1)
    bad = make_run(tmp_path / "bad", steps=2, groups_per_step=1)
    rows = ({"step": step, "reward/mean": 1.7e308} for step in range(1, 300))
    bad.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    runs = ShownRuns(tmp_path).look()["runs"]
    assert {run["name"] for run in runs} == {"good", "bad"}
    assert json.dumps([runs, overview(bad)], allow_nan=False)


def test_a_query_of_a_look_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages can name each other so that a plain table has no end either."""
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    monkeypatch.setattr(schema, "_BRIEF_S", 0.0)
    with (
        contextlib.closing(Journal.look(folder.journal)) as journal,
        pytest.raises(RunError, match="interrupted"),
    ):
        journal.query(ENDLESS)


def test_a_trigger_is_named_before_anything_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2, groups_per_step=2)
    with contextlib.closing(sqlite3.connect(folder.journal)) as database:
        database.execute(
            "CREATE TRIGGER t AFTER INSERT ON identity_rows BEGIN DELETE FROM group_rows; END"
        )
        database.commit()
    with pytest.raises(JournalDamaged, match="the definition of t is not what was written"):
        Journal.open(folder.journal)
