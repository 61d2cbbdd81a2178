"""A start makes its folder exclusively and deletes nothing that it did not make."""

from __future__ import annotations

import asyncio
import shlex
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.config.source import load_config
from penstock.data.sampler import Sampler
from penstock.errors import UserError
from penstock.store import run_folder
from penstock.store.journal import Journal
from penstock.store.journal.writer import OpenFiles
from stages.command_runs import penstock
from stages.rollouts import make_prompts


def named(folder: Path, name: str) -> Config:
    return load_config(None, [f"run.dir={folder}", f"run.name={name}"]).config


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis" / "chapter-1.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(
        UserError, match=r"exists already and is no run; allowed: another run\.name$"
    ):
        run_folder.create(named(tmp_path, "thesis"))
    assert thesis.read_text() == "years of work"


def test_commands_that_a_line_advises_name_their_paths_as_a_shell_reads_them(
    tmp_path: Path,
) -> None:
    run = tmp_path / "my läufe" / "run 1"
    (run / "x").mkdir(parents=True)
    (run / "config.toml").touch()
    with pytest.raises(UserError) as raised:
        run_folder.create(named(run.parent, run.name))
    assert shlex.split(str(raised.value))[-3:] == ["penstock", "resume", str(run)]
    (run / "journal.db").touch()
    line = OpenFiles(run / "journal.db").way_on("removed", run / "saved journal.db")
    put_back = shlex.split(line.partition("with: ")[2].partition(";")[0])
    journal, saved = str(run / "journal.db"), str(run / "saved journal.db")
    assert put_back == [
        *("mkdir", "-p", str(run), "&&", "rm", "-f", f"{journal}*", "&&", "mv", saved, journal)
    ]


@pytest.mark.parametrize("name", [".", "..", "a/b", "/tmp/x", "../x"])
def test_a_name_is_one_folder_name(tmp_path: Path, name: str) -> None:
    kept = tmp_path / "runs" / "old"
    kept.mkdir(parents=True)
    with pytest.raises(UserError, match=r"run\.name: got .*, allowed: one folder name"):
        run_folder.create(named(tmp_path / "runs", name))
    assert kept.is_dir()


def test_of_many_starts_with_one_name_one_gets_the_folder(tmp_path: Path) -> None:
    def start(number: int) -> bool:
        try:
            run_folder.create(named(tmp_path, "same"))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as starts:
        assert sum(starts.map(start, range(30))) == 1


def test_automatic_names_do_not_collide(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starts:
        made = list(starts.map(lambda _: run_folder.create(named(tmp_path, "")).path, range(12)))
    assert len(set(made)) == 12


def test_a_journal_with_groups_counts_as_progress(tmp_path: Path) -> None:
    folder = run_folder.create(named(tmp_path, "one"))
    assert not run_folder.has_progress(folder.path)
    journal = Journal.open(folder.journal)
    assert not run_folder.has_progress(folder.path)
    sampler = Sampler(make_prompts(1), task_name="t", prompt_repeat_k=1, seed=0)
    journal.drawn(sampler.sample("t"))
    journal.close()
    assert run_folder.has_progress(folder.path)


@pytest.mark.parametrize("change", ["value = '{\"seed\": '", "name = x'00'"])
def test_settings_that_are_damaged_in_the_journal_are_told_in_one_line(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder.create(named(tmp_path, "run"))
    with closing(Journal.open(folder.journal)) as journal:
        asyncio.run(folder.record_config(journal, folder.config(), {"fact": "1"}, after_step=0))
    with closing(sqlite3.connect(folder.journal)) as database, database:
        where = "config" if change.startswith("value") else "fact"
        database.execute(f"UPDATE identity_rows SET {change} WHERE name = ?", (where,))
    assert penstock("audit", str(folder.path)) == 1
    said = capsys.readouterr().err
    assert "damaged" in said
    assert "Traceback" not in said
