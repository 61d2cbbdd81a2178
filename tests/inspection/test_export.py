"""An exported folder: the model as it is, a card that tells what the journal knows and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.errors import RunError, UserError
from penstock.inspection.export import export_run, push_to_hub
from penstock.store import checkpoint as checkpoints
from penstock.store.run_folder import RunFolder
from stages.made_run import make_run

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of six steps with a checkpoint of the last."""
    made = make_run(tmp_path / "private" / "made", steps=6, groups_per_step=3)
    step = made.checkpoints / "step-6"
    (step / "model").mkdir(parents=True)
    for name in FILES:
        (step / "model" / name).write_text(name)
    checkpoints._write_manifest(step, 6, "a1b2" * 8)
    return made


def test_the_folder_has_the_model_and_a_card_from_the_journal(
    run: RunFolder, tmp_path: Path
) -> None:
    out = export_run(run, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*FILES, "README.md", "curves.svg"]
    )
    card = (out / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    known = dict(line.split(": ", 1) for line in front.splitlines())
    assert json.loads(known["tags"]) == ["penstock", "reinforcement-learning", "grpo"]
    assert "The model after step 6" in body
    assert "| accuracy, heldout |" in body
    assert "| `train.groups_per_step` | 3 |" in body
    assert f"`{'a1b2' * 8}`" in body
    assert "groups drawn = 18 trained" in body
    assert "`penstock audit`: " in body
    assert str(tmp_path) not in card  # nothing of this machine
    assert (out / "curves.svg").read_text().count("<polyline") == 2


def add_checkpoint(run: RunFolder, step: int) -> None:
    model = run.checkpoints / f"step-{step}" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(str(step))
    checkpoints._write_manifest(model.parent, step, "a1b2" * 8)


def test_the_best_step_has_a_card_without_what_came_after_it(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_checkpoint(run, 3)
    summary = run.evaluations / "summary.jsonl"
    scores = {0: 0.1, 2: 0.9, 3: 0.75, 6: 0.5}
    row = json.loads(summary.read_text().splitlines()[0])
    lines = (json.dumps({**row, "step": step, "accuracy": score}) for step, score in scores.items())
    summary.write_text("".join(f"{line}\n" for line in lines))
    out = export_run(run, tmp_path / "out", step="best")
    assert (out / "config.json").read_text() == "3"
    assert "| accuracy, heldout | 0.100 | 0.750 (" in (out / "README.md").read_text()
    said = capsys.readouterr().err
    assert "step 3 has the best heldout/accuracy, 0.750" in said
    assert "step 2 had 0.900 and was not kept: set checkpoint.keep_best" in said


def test_best_of_a_run_that_evaluated_nothing_is_refused(run: RunFolder, tmp_path: Path) -> None:
    (run.evaluations / "summary.jsonl").unlink()
    with pytest.raises(UserError, match=r"evaluated by an \[eval.tasks.NAME\] \(none\)"):
        export_run(run, tmp_path / "out", step="best")


def test_the_average_of_the_weights_is_exported_where_there_is_one(
    run: RunFolder, tmp_path: Path
) -> None:
    step = run.checkpoints / "step-6"
    (step / "ema").mkdir()
    (step / "ema" / "model.safetensors").write_text("averaged")
    (step / checkpoints.MANIFEST).unlink()
    checkpoints._write_manifest(step, 6, "a1b2" * 8)
    exported = export_run(run, tmp_path / "averaged")
    assert (exported / "model.safetensors").read_text() == "averaged"


def test_further_chat_templates_of_a_tokenizer_are_exported(run: RunFolder, tmp_path: Path) -> None:
    step, name = run.checkpoints / "step-6", "additional_chat_templates/tool_use.jinja"
    (step / "model" / name).parent.mkdir()
    (step / "model" / name).write_text("{{ tools }}")
    (step / checkpoints.MANIFEST).unlink()
    checkpoints._write_manifest(step, 6, "a1b2" * 8)
    assert (export_run(run, tmp_path / "out") / name).read_text() == "{{ tools }}"


def test_an_existing_folder_is_not_overwritten_and_a_run_needs_a_checkpoint(
    run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    export_run(run, tmp_path / "out")  # an empty folder is as good as none
    with pytest.raises(UserError, match=r"out, which exists already, allowed: a new folder"):
        export_run(run, tmp_path / "out")
    with pytest.raises(UserError, match=r"got a run that trained all weights, allowed: model.lora"):
        export_run(run, tmp_path / "adapter", adapter=True)
    (run.checkpoints / "step-6" / "model" / "config.json").write_text("damaged")
    with pytest.raises(UserError, match="got no valid checkpoint"):
        export_run(run, tmp_path / "other")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "private"}  # no draft is left


class Hub:
    """Stands in for the hub's client."""

    calls: ClassVar[list[Any]] = []

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        self.calls.append((name, private, exist_ok))
        if name == "gone/away":
            raise OSError("no connection\nmore")
        return f"https://hub/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        self.calls.append((repo_id, folder_path))


def test_a_push_is_private_unless_it_is_asked_to_be_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    assert push_to_hub(tmp_path, "me/mine") == "https://hub/me/mine"
    push_to_hub(tmp_path, "me/mine", public=True)
    assert Hub.calls[:2] == [("me/mine", True, True), ("me/mine", tmp_path)]
    assert Hub.calls[2] == ("me/mine", False, True)
    with pytest.raises(RunError, match=r"gone/away was not uploaded: no connection; the folder"):
        push_to_hub(tmp_path, "gone/away")
