"""A run is continued with the data, tokenizer and settings that it began with, or not without a word."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from penstock.store.journal import Journal
from penstock.store.journal.codec import expression, row_check
from penstock.store.run_folder import RunFolder
from stages.tiny_run import SMALL_POLICY, CrashServer, assert_sound, digests

SUMS = Path(__file__).parents[2] / "stages" / "sums.jsonl"
INSERTED = json.dumps({"messages": [{"role": "user", "content": "7+8"}], "gt_answer": "15"})


@pytest.fixture(scope="module")
def original(server: CrashServer) -> RunFolder:
    """Return a run on a relative path, killed in step 4; its data has groups in flight."""
    shutil.copy(SUMS, server.folder / "mine.jsonl")
    words = ("tasks.train.data=mine.jsonl", "checkpoint.every_steps=1", "produce.strategy=sync")
    run, code = server.train("pinned", *words, point="after take", number=4)
    assert code == -9, server.output()
    return run


@pytest.fixture
def killed(original: RunFolder, server: CrashServer, tmp_path: Path) -> RunFolder:
    """Return a copy of that run to continue, with its data as it was."""
    shutil.copy(SUMS, server.folder / "mine.jsonl")
    shutil.copytree(original.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def only_line(server: CrashServer) -> str:
    output = server.output()
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    return line


def insert_a_line(data: Path) -> None:
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:3], INSERTED, *lines[3:]]) + "\n")


def identity(run: RunFolder) -> dict[str, str]:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return journal.read_identity()
    finally:
        journal.close()


def test_a_line_inserted_into_the_data_is_refused(server: CrashServer, killed: RunFolder) -> None:
    insert_a_line(server.folder / "mine.jsonl")
    before = digests(killed)
    assert server.run("resume", str(killed.path)) == 2, server.output()
    line = only_line(server)
    assert f"tasks.train.data: {server.folder / 'mine.jsonl'} has other content" in line
    assert f"penstock resume {killed.path} --accept-changes" in line
    assert digests(killed) == before


@pytest.mark.slow
def test_other_data_is_taken_on_purpose_and_drawn_groups_keep_their_prompts(
    server: CrashServer, killed: RunFolder
) -> None:
    data = server.folder / "mine.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join(reversed(lines)) + "\n")
    drawn = prompts_of_groups(killed)
    code = server.run("resume", str(killed.path), "--accept-changes", "train.steps=6")
    assert code == 0, server.output()
    assert "accepted: tasks.train.data: " in server.output()
    assert_sound(killed, steps=6)
    later = prompts_of_groups(killed)
    assert {group: later[group] for group in drawn} == drawn
    for group in later.keys() - drawn.keys():
        number = int(later[group].partition("@")[0].removeprefix("train:"))
        assert prompt_of(killed, group) == json.loads(lines[-number])["messages"]
    assert server.run("audit", str(killed.path)) == 0, server.output()
    assert "accepted after step 3: tasks.train.data: " in " ".join(server.output().split())
    assert server.run("resume", str(killed.path), "train.steps=7") == 0, server.output()


def prompts_of_groups(run: RunFolder) -> dict[str, str]:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return dict(journal.query("SELECT group_id, prompt_id FROM groups"))
    finally:
        journal.close()


def prompt_of(run: RunFolder, group: str) -> list[dict]:
    journal = Journal.open(run.journal, readonly=True)
    try:
        return list(journal.group(group).prompt.messages)
    finally:
        journal.close()


def test_a_relative_path_names_the_same_file_from_any_directory(
    server: CrashServer, killed: RunFolder, tmp_path: Path
) -> None:
    shutil.copy(SUMS, tmp_path / "mine.jsonl")
    insert_a_line(tmp_path / "mine.jsonl")
    assert server.run("resume", str(killed.path), directory=tmp_path) == 0, server.output()
    assert_sound(killed)
    assert killed.config().tasks["train"].data == str(server.folder / "mine.jsonl")


def test_data_that_moved_can_be_named_and_data_that_is_gone_is(
    server: CrashServer, killed: RunFolder, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.jsonl"
    (server.folder / "mine.jsonl").rename(moved)
    assert server.run("resume", str(killed.path)) == 2
    assert "which does not exist; put it back, or name its new place" in only_line(server)
    assert server.run("replay", str(killed.path)) == 0, server.output()
    assert server.run("resume", str(killed.path), f"tasks.train.data={moved}") == 0
    assert_sound(killed)
    insert_a_line(moved)
    words = [str(killed.path), "train.steps=5", f"tasks.train.data={moved}"]
    assert server.run("resume", *words) == 2
    assert f"tasks.train.data: {moved} has other content" in only_line(server)


def test_a_replay_and_a_fork_say_what_has_changed_and_use_the_journal(
    server: CrashServer, killed: RunFolder
) -> None:
    insert_a_line(server.folder / "mine.jsonl")
    assert server.run("replay", str(killed.path)) == 0, server.output()
    assert "note: tasks.train.data: " in server.output()
    assert server.run("replay", str(killed.path), "--algo", "rloo") == 0, server.output()
    assert "note: tasks.train.data: " in server.output()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("teachers.big.path", ("algorithm.name=distill", "algorithm.teacher=big")),
        ("train.reference", ("algorithm.kl_beta=0.1",)),
    ],
)
def test_a_model_that_scores_must_be_the_same(
    server: CrashServer, tmp_path: Path, key: str, words: tuple[str, ...]
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(SMALL_POLICY, teacher)
    run, code = server.train(
        f"scored-{key}",
        f"{key}={teacher}",
        *words,
        "produce.strategy=sync",
        point="after take",
        number=4,
    )
    assert code == -9, server.output()
    weights = teacher / "model.safetensors"
    old = weights.read_bytes()
    weights.write_bytes(old[:-2] + b"aa")
    said = f"{key}: {teacher} has other content"
    for command in ("resume", "replay"):
        assert server.run(command, str(run.path)) == 2, server.output()
        assert said in only_line(server)
    weights.write_bytes(old)
    assert server.run("replay", str(run.path)) == 0, server.output()
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run)


@pytest.mark.slow
def test_a_hand_edited_config_is_refused_with_the_way_to_change_it(
    server: CrashServer, killed: RunFolder
) -> None:
    copy = killed.path / "config.toml"
    whole = copy.read_text()
    copy.write_text(whole.replace("lr = 0.001", "lr = 0.1").replace("seed = 0", "seed = 1"))
    assert server.run("resume", str(killed.path)) == 2
    line = only_line(server)
    assert "config.toml was edited (seed=1 and 1 more)" in line
    assert f"penstock resume {killed.path} KEY=VALUE" in line
    assert server.run("replay", str(killed.path)) == 0, server.output()
    assert "note: config.toml was edited" in server.output()
    copy.write_text(whole.replace("lr = 0.001", "lr = 0.1"))
    assert server.run("resume", str(killed.path), "train.lr=0.1") == 0, server.output()
    assert [era.config.train.lr for era in killed.eras()] == [0.001, 0.1]


@pytest.mark.parametrize("lost", ["empty", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_lost_config_is_written_again_from_the_journal(
    server: CrashServer, killed: RunFolder, lost: str
) -> None:
    copy = killed.path / "config.toml"
    whole = copy.read_text()
    copy.write_text("") if lost == "empty" else copy.unlink()
    assert server.run("audit", str(killed.path)) == 0, server.output()
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert "config.toml is missing or empty: it is written again" in server.output()
    assert copy.read_text() == whole
    assert_sound(killed)


def test_an_empty_config_without_a_journal_is_not_taken_for_defaults(
    server: CrashServer, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert server.run("resume", str(tmp_path / "run")) == 2
    assert "config.toml is missing or empty and the journal has no settings" in only_line(server)


@pytest.mark.slow
def test_earlier_settings_are_in_the_journal_too(server: CrashServer, killed: RunFolder) -> None:
    assert server.run("resume", str(killed.path), "train.lr=2e-3") == 0, server.output()
    assert (killed.path / "configs" / "until-step-3.toml").is_file()
    shutil.rmtree(killed.path / "configs")
    assert [era.last_step for era in killed.eras()] == [3, None]
    assert server.run("replay", str(killed.path)) == 0, server.output()


def test_another_chat_template_is_refused(server: CrashServer, tmp_path: Path) -> None:
    from penstock.config.demo import policy_path

    model = tmp_path / "model"
    shutil.copytree(policy_path(), model)
    run, code = server.train("template", f"model.path={model}", "train.steps=1")
    assert code == 0, server.output()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    file = model / "chat_template.jinja"
    before = file.read_text() if file.is_file() else settings["chat_template"]
    file.write_text(before + " ")
    assert server.run("resume", str(run.path), "train.steps=2") == 2
    assert f"chat template: {model} has other content" in only_line(server)


def in_older_form(run: RunFolder) -> None:
    """Rename the prompts of a journal as an older Penstock did: by their line alone."""
    with sqlite3.connect(run.journal) as database:
        database.create_function("row_check_of", -1, row_check)
        database.execute(
            "UPDATE group_rows SET prompt_id = substr(prompt_id, 1, instr(prompt_id, '@') - 1)"
        )
        database.execute(
            "UPDATE prompt_rows SET prompt_id = substr(prompt_id, 1, instr(prompt_id, '@') - 1)"
        )
        for table in ("group_rows", "prompt_rows"):
            database.execute(f"UPDATE {table} SET row_check = {expression(table)}")


@pytest.mark.slow
def test_a_journal_without_identity_is_taken_over_and_said_once(
    server: CrashServer, killed: RunFolder
) -> None:
    with sqlite3.connect(killed.journal) as database:
        database.execute("DELETE FROM identity_rows")
    in_older_form(killed)
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert "the journal is older: settings, data and code are recorded" in server.output()
    assert identity(killed).keys() >= {"config", "tasks.train.data", "tokenizer", "code"}
    assert server.run("resume", str(killed.path), "train.steps=13") == 0, server.output()
    assert "the journal is older" not in server.output()
    assert server.run("audit", str(killed.path)) == 0, server.output()


def test_changed_code_is_told_and_does_not_stop_the_run(
    server: CrashServer, killed: RunFolder
) -> None:
    code = {**json.loads(identity(killed)["code"]), "torch": "1.0"}
    journal = Journal.open(killed.journal)
    journal.record_identity({"code": json.dumps(code)})
    journal.close()
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert "code changed since the run began: torch 1.0 -> " in server.output()
