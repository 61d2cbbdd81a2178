"""`penstock rollouts`: the right samples, their outcome, and conditions that can only read."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from penstock import files
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.errors import UserError
from penstock.inspection.rollout_viewer import RolloutView, show_rollouts
from penstock.store.journal.codec import decode_rollout, encode_rollout, rollout_key
from penstock.store.run_folder import RunFolder
from penstock.types import Prompt
from stages.made_run import GROUP_SIZE, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs") / "made", steps=4, groups_per_step=3)


def shown(run: RunFolder, **options: object) -> str:
    console = files.console(file=io.StringIO(), width=100)
    show_rollouts(run, console=console, **options)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def objects(run: RunFolder, **options: object) -> list[dict]:
    return [json.loads(line) for line in shown(run, as_json=True, **options).splitlines()]


def test_json_has_one_whole_object_a_line(run: RunFolder) -> None:
    samples = objects(run, limit=1000)
    assert len(samples) == (4 * 3 + 4) * GROUP_SIZE
    first = samples[0]
    assert set(first) == set(RolloutView.__dataclass_fields__)
    assert first["prompt"][0]["role"] == "user"
    assert set(first["parts"]) == {"format", "answer"}
    assert sum(length for _, length in first["versions"]) == first["num_tokens"]


def test_step_task_and_limit_choose(run: RunFolder) -> None:
    assert {sample["step"] for sample in objects(run, step=3, limit=1000)} == {3}
    assert len(objects(run, step=3, limit=1000)) == 3 * GROUP_SIZE
    assert len(objects(run, limit=5)) == 5
    assert objects(run, task="train", limit=2) == objects(run, limit=2)


def test_where_is_a_condition_on_the_view(run: RunFolder) -> None:
    for sample in objects(run, where="reward > 0 AND num_tokens < 20", limit=1000):
        assert sample["reward"] > 0
        assert sample["num_tokens"] < 20
    some = objects(run, where="step = 1 OR step = 2 -- a comment", step=2, limit=1000)
    assert {sample["step"] for sample in some} == {2}


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("rewrd > 0", "no such column: rewrd"),
        ("reward >", "syntax error"),
        ("1); DELETE FROM group_rows; --", "one statement"),
        ("step = ?", "binding"),
    ],
)
def test_a_wrong_condition_says_what_sqlite_says(run: RunFolder, where: str, says: str) -> None:
    before = run.journal.read_bytes()
    with pytest.raises(UserError) as caught:
        shown(run, where=where)
    assert says in str(caught.value)
    assert "rollout_id" in str(caught.value)
    assert run.journal.read_bytes() == before


def test_people_see_text_reward_versions_and_fate(run: RunFolder) -> None:
    text = shown(run, step=4, where="oldest_version < newest_version", limit=1)
    prompt = ChatTemplate(load_tokenizer("demo")).decode_prompt(range(1, 6))
    for words in (
        f"prompt  {prompt}",
        "<answer>",
        "expected",
        "trained in step 4, staleness 1",
        "v2 x",
        ", v3 x",
    ):
        assert words in text
    assert "more with --limit" in text


def test_without_the_tokenizer_the_messages_are_shown(run: RunFolder, tmp_path: Path) -> None:
    copied = shutil.copytree(run.path, tmp_path / "moved")
    text = (copied / "config.toml").read_text().replace('path = "demo"', 'path = "/no/such/model"')
    (copied / "config.toml").write_text(text)
    assert "user  What is" in shown(RunFolder(copied), limit=1)
    assert objects(RunFolder(copied), limit=1)[0]["rendered_prompt"] is None


@pytest.mark.parametrize("reason", ["filtered", "expired", "failed"])
def test_a_drop_is_told_with_its_reason(run: RunFolder, reason: str) -> None:
    text = shown(run, where=f"drop_reason = '{reason}'")
    assert f"dropped: {reason}" in text
    assert ("RewardError: the judge did not answer in 5 s" in text) == (reason == "failed")


def test_a_group_that_waits_is_told(run: RunFolder) -> None:
    assert "waiting in the buffer" in shown(run, where="step IS NULL AND drop_reason IS NULL")


def test_nothing_found_is_said(run: RunFolder) -> None:
    assert "no sample matches" in shown(run, step=99)
    assert objects(run, step=99) == []


def test_bad_arguments_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit: got 0"):
        shown(run, limit=0)
    with pytest.raises(UserError, match="task: got 'trian', allowed: train"):
        shown(run, task="trian")
    with pytest.raises(UserError, match=r"journal\.db"):
        shown(RunFolder(tmp_path))


def set_texts(run: RunFolder, text: str) -> None:
    """Give every recorded response that text, with payloads that fit it."""
    prompt = Prompt("p:1", (), np.array([1]))
    with sqlite3.connect(run.journal) as database:
        rows = database.execute(
            "SELECT group_id, number, rollout_id, text, data FROM rollout_rows"
        ).fetchall()
        for group_id, number, rollout_id, old, data in rows:
            key = rollout_key(group_id, number, rollout_id)
            rollout = decode_rollout(data, rollout_id, prompt, text=old, key=key)
            rollout.text = text
            database.execute(
                "UPDATE rollout_rows SET text = ?, data = ? WHERE rollout_id = ?",
                (text, encode_rollout(rollout, text=text, key=key), rollout_id),
            )
    database.close()


def test_text_of_a_model_is_neither_markup_nor_control(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups_per_step=1)
    set_texts(run, "[bold]x[/bold] [/nothing] \x1b[2J\x07")
    text = shown(run, limit=1)
    assert "[bold]x[/bold] [/nothing]" in text
    assert "\x1b" not in text
    assert "\x07" not in text
