"""Metrics reach their files; a faulty tracker is dropped and the others continue."""

from __future__ import annotations

import dataclasses
import io
import json
import resource
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console

from penstock.config import Config
from penstock.errors import UserError
from penstock.inspection.track.console import ConsoleTracker, StartDisplay
from penstock.inspection.track.logs import (
    Fanout,
    Finding,
    JsonlTracker,
    LineFile,
    RolloutLog,
    RunInfo,
    restore_metrics,
)
from penstock.types import (
    Batch,
    Group,
    Prompt,
    Rollout,
    Score,
    Status,
    VersionSegment,
)


def info(tmp_path: Path, *trackers: str) -> RunInfo:
    config = Config.model_validate({"track": {"trackers": list(trackers)}})
    return RunInfo(
        config=config,
        folder=tmp_path,
        name="run",
        total_steps=10,
        first_step=0,
        live=lambda: "trainer waits for groups\nmath: drawn 8, trained 4",
    )


class Recorder:
    """A tracker of the tests' own, named in a config by its path."""

    seen: ClassVar[list[tuple[int, dict[str, float]]]] = []

    def __init__(self, run: RunInfo) -> None:
        type(self).seen = []

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.append((step, metrics))

    def log_eval(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Faulty(Recorder):
    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        raise OSError("no network")


def test_a_faulty_tracker_does_not_stop_the_others(tmp_path: Path) -> None:
    fanout = Fanout.from_info(info(tmp_path, f"{__file__}:Faulty", f"{__file__}:Recorder"))
    fanout.log_step(1, {"a": 1.0})
    fanout.log_step(2, {"a": 2.0})
    fanout.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    assert "faulty" not in fanout._trackers


class FaultyInTwoThreads(Recorder):
    """Fails in a step while another thread, such as the one that names blocking code, tells it something."""

    fanout: ClassVar[Fanout]

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        telling = threading.Thread(target=self.fanout.note, args=("the run stands still",))
        telling.start()
        telling.join()
        raise OSError("no network")

    def note(self, text: str) -> None:
        raise OSError("no network")


def test_a_tracker_that_fails_in_two_threads_is_dropped_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = FaultyInTwoThreads(info(tmp_path))
    fanout = FaultyInTwoThreads.fanout = Fanout({"mine": tracker})
    fanout.log_step(1, {"a": 1.0})
    assert capsys.readouterr().err.count("tracker mine failed and is off") == 1


def test_an_unknown_tracker_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allowed: console, tensorboard, wandb"):
        Fanout.from_info(info(tmp_path, "mlflow"))


def test_a_number_that_json_has_no_form_for_becomes_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log_step(1, {"kl": float("nan")})
    tracker.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "kl": None}


def test_lines_of_lost_steps_and_a_torn_line_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    restore_metrics(path, 2, lambda step: {"m": step})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_line_that_was_never_written_comes_from_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    restore_metrics(path, 1, lambda step: {"m": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "m": 0.5}


def test_without_a_terminal_the_console_prints_plain_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(info(tmp_path), Console(file=out, width=200))
    tracker.log_eval(0, {"eval/heldout/accuracy": 0.25})
    tracker.log_step(10, {"reward/mean": 0.5, "tokens/generated": 100.0, "time/step_s": 0.5})
    tracker.close()
    text = out.getvalue()
    assert "step 10/10" in text
    assert " left" not in text  # after the last step nothing is
    assert "reward 0.500" in text
    assert "tokens/s 200" in text
    assert "heldout accuracy 0.250" in text
    assert "    math: drawn 8, trained 4" in text
    assert "\x1b" not in text


def test_nothing_is_shown_of_answers_that_nothing_judges(tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(info(tmp_path), Console(file=out, width=200))
    tracker.log_eval(0, {"eval/heldout/reward": 0.25})
    tracker.log_step(10, {"reward/mean": 0.5})
    tracker.close()
    assert "accuracy" not in out.getvalue()
    assert "heldout reward 0.250  reward 0.500" in out.getvalue()


def test_the_panel_has_curves_samples_and_findings(tmp_path: Path) -> None:
    prompt = Prompt("p:0", ({"role": "user", "content": "2+[b]3"},), np.array([1]), gt_answer="5")
    rollouts = []
    for number, text in enumerate(("5\n", "four")):
        rollout = Rollout(rollout_id=f"t:0.{number}", prompt_ids=np.array([1]), seed=0, text=text)
        rollout.score = Score(1.0 - number)
        rollouts.append(rollout)
    group = Group(group_id="t:0", task="t", cursor=0, prompt=prompt, rollouts=rollouts)
    finding = Finding(
        name="x", what="It is [red]ill", since=3, evidence="", advice="", change=("train.lr=1e-5",)
    )
    shown = dataclasses.replace(
        info(tmp_path),
        findings=lambda: [finding] * 5,
        batch=lambda: Batch(step=4, groups=(group,)),
    )
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    tracker = ConsoleTracker(shown, console)
    tracker.log_eval(0, {"eval/heldout/accuracy": 0.25})
    tracker.log_eval(2, {"eval/heldout/accuracy": 1.0})
    for step in range(1, 5):
        tracker.log_step(step, {"reward/mean": step / 4, "accuracy/mean": 0.5})
    tracker.close()
    plain = Console(file=io.StringIO(), width=100)
    plain.print(tracker._render())
    lines = [line.rstrip() for line in plain.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "heldout accuracy  1.000  ▃█" in lines
    assert "reward            1.000  ▁▃▆█" in lines
    assert "best   1.000  2+[b]3 -> 5" in lines
    assert "worst  0.000  2+[b]3 -> four" in lines
    assert lines.count("● It is [red]ill  since step 3") == 3
    assert "  train.lr=1e-5" in lines
    assert f"  and 2 more: penstock doctor {tmp_path}" in " ".join(lines)


def test_a_figure_stays_on_one_line_and_only_the_steps_have_a_time(tmp_path: Path) -> None:
    shown = dataclasses.replace(info(tmp_path), next_batch=lambda: (3, 4))
    tracker = ConsoleTracker(shown, Console(file=io.StringIO(), width=60))
    tracker.log_step(4, {"reward/mean": 0.5, "time/producer_wait_s": 1.81, "tasks/t/samples": 0.0})
    plain = Console(file=io.StringIO(), width=60)
    plain.print(tracker._render())
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("producer waited 1.81 s" in line for line in lines)
    assert [line.split()[0] for line in lines if "0:00" in line or "-:--" in line] == ["step"]
    assert any(line.startswith("next 3/4") for line in lines)
    assert not any("last step" in line for line in lines)  # nothing was produced for it


def test_a_start_says_what_it_does_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StartDisplay("reading the data"):
        pass
    assert capsys.readouterr() == ("", "")
    made = Console(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr("penstock.files.console", lambda stderr: made)
    with StartDisplay("reading the data") as display:
        display.tell("loading the model")
        display._progress.refresh()
        StartDisplay.console().print("stop requested")
    shown = made.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("reading the data") < shown.index("loading the model")
    assert "\r\x1b[2Kstop requested\n" in shown  # on a line of its own, above what is shown
    assert StartDisplay._shown is None


def test_on_a_terminal_the_panel_says_who_waits(tmp_path: Path) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(info(tmp_path), Console(file=out, width=120, force_terminal=True))
    tracker.log_step(1, {"reward/mean": 0.5})
    tracker.close()
    assert "trainer waits for groups" in out.getvalue()


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fanout = Fanout.from_info(info(tmp_path, "tensorboard"))
    fanout.log_step(1, {"reward/mean": 0.5})
    fanout.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_rollout_log_carries_reward_and_versions(tmp_path: Path) -> None:
    rollout = Rollout(rollout_id="t:0.0", prompt_ids=np.array([1]), seed=0)
    rollout.append(
        np.array([5, 6]), np.array([0.0, 0.0]), (VersionSegment(1, 1), VersionSegment(2, 1))
    )
    rollout.score = Score(1.0, {"answer": 1.0})
    rollout.move_to(Status.COMPLETED)
    prompt = Prompt("p:0", ({"role": "user", "content": "?"},), np.array([1]), gt_answer="4")
    group = Group(group_id="t:0", task="t", cursor=0, prompt=prompt, rollouts=[rollout])
    log = RolloutLog(tmp_path / "rollouts.jsonl", every_steps=2, num_groups=1)
    log.write(Batch(step=1, groups=(group,)))
    log.write(Batch(step=2, groups=(group,)))
    (line,) = [json.loads(text) for text in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert (line["step"], line["reward"], line["versions"]) == (2, 1.0, [1, 2])


def test_a_line_that_does_not_fit_leaves_no_torn_one(tmp_path: Path) -> None:
    notes: list[str] = []
    file = LineFile(tmp_path / "lines", notes.append)
    file.append(["first"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # room for half of the next line
    try:
        file.append(["second line"])
        file.append(["third line", "fourth line"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "lines").read_text() == "first\n"
    file.append(["fifth"])
    assert (tmp_path / "lines").read_text() == "first\nfifth\n"
    assert [note.split(": ", 1)[1] for note in notes] == [
        "cannot write: No space left on device; the run continues",
        "3 lines could not be written",
    ]
