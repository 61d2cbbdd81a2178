"""What a run tells of each task: in metrics.jsonl, to trackers, in the live panel and in the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.store.run_folder import RunFolder
from stages.command_runs import CommandRun, penstock, train
from stages.recording_tracker import RECORDER, Recorder
from stages.rewards import ODD_REWARD
from stages.tiny_run import STEPS

SYSTEM = "3+4"
RULES = '''
def keep_even(rollouts):
    """Refuse every second prompt."""
    return rollouts[0].prompt.messages[-1]["content"][1] in "02468"


def wants_more(completed, batch):
    return True
'''
FIGURES = {
    "samples",
    "tokens",
    "groups",
    "reward_sum",
    "reward_count",
    "produce_s",
    "group_time_p50_s",
    "group_time_p99_s",
    "retried",
    "failed",
    "aborted",
    "expired",
    "filtered",
    "tail_calls",
    "pause_timeouts",
    "temperature",
    "prompts_skipped_long",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CommandRun:
    folder = tmp_path_factory.mktemp("accounting")
    rules = folder / "rules.py"
    rules.write_text(RULES)
    data = folder / "sums.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"{n}+1"}], "gt_answer": str(n + 1)}
        for n in range(10, 30)
    ]
    lines.append({"messages": [{"role": "user", "content": "1+" * 30}], "gt_answer": "30"})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = "{type='think_answer_tags', options={equality='numeric'}}"
    return train(
        folder,
        "told",
        f"tasks.train.data={data}",
        f"tasks.train.system_prompt='{SYSTEM}'",
        "tasks.train.max_prompt_tokens=24",
        f"tasks.other.data={data}",
        "tasks.other.max_prompt_tokens=24",
        f"tasks.other.rewards=[{answers}, {{type='{ODD_REWARD}', weight=0.5}}]",
        f"tasks.other.produce={{is_valid_sample_fn='{rules}:keep_even'}}",
        f"produce.should_continue={rules}:wants_more",
        "produce.max_staleness=0",
        "sampling.anneal={end=0.5, episodes=0.1}",
        f"track.trackers=['{RECORDER}']",
    )


def figures(run: CommandRun, task: str) -> dict[str, float]:
    """Return the sums over the steps of a task's figures."""
    names = {name for line in run.metrics for name in line if name.startswith(f"tasks/{task}/")}
    return {name.split("/", 2)[2]: run.total(name) for name in names}


def test_every_figure_of_a_task_is_in_the_metrics(run: CommandRun) -> None:
    assert run.code == 0, run.told
    for task in ("train", "other"):
        assert set(figures(run, task)) >= FIGURES
    assert {"part/think_answer_tags", "part/odd_reward"} <= set(figures(run, "other"))


def test_figures_agree_with_the_journal(run: CommandRun) -> None:
    for task in ("train", "other"):
        told = figures(run, task)
        where = f"task = '{task}' AND num_tokens > 0 AND status != 'init'"
        ((samples, tokens, reward),) = run.query(
            f"SELECT COUNT(*), SUM(num_tokens), SUM(reward) FROM rollouts WHERE {where}"
        )
        assert (told["samples"], told["tokens"]) == (samples, tokens)
        assert told["reward_sum"] == pytest.approx(reward)
        assert told["reward_count"] == samples
    ((refused,),) = run.query("SELECT COUNT(*) FROM groups WHERE drop_reason = 'filtered'")
    assert figures(run, "other")["filtered"] == refused > 0
    assert figures(run, "train")["filtered"] == 0


def test_a_continue_rule_that_wants_more_does_not_hang_a_run(run: CommandRun) -> None:
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    ((drawn,),) = run.query("SELECT COUNT(*) FROM groups WHERE task = 'train'")
    assert drawn == STEPS  # one group of this task in every step, and none beside


def test_the_temperature_in_force_is_annealed_over_an_episode(run: CommandRun) -> None:
    """20 prompts, one group of each task a step: a tenth of an episode is two steps."""
    told = [line["tasks/train/temperature"] for line in run.metrics]
    assert told == [pytest.approx(value) for value in (1.0, 0.75, 0.5, 0.5)]


def test_prompts_that_are_too_long_are_counted(run: CommandRun) -> None:
    assert [line["tasks/train/prompts_skipped_long"] for line in run.metrics] == [1.0] * STEPS


def test_trackers_get_the_same(run: CommandRun) -> None:
    for told, line in zip(Recorder.steps, run.metrics, strict=True):
        assert {"step": line["step"], **told} == line


def test_the_live_panel_shows_the_batch_and_each_task(run: CommandRun) -> None:
    last = Recorder.panels[-1]
    assert re.search(r"step +4/4", last)
    assert re.search(r"next +\d+/2", last)
    assert re.search(
        r"other, last step: \d+ samples, \d+ tokens, reward [\d.]+, think_answer_tags", last
    )
    assert "temperature 0.5" in last
    assert "prompts skipped long 1" in last


def test_the_report_has_the_account_of_each_task(run: CommandRun, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert penstock("report", str(run.folder.path), "--out", str(page)) == 0
    text = page.read_text()
    told = json.loads(re.search(r'"accounts":(\{.*?\}\})', text)[1])
    assert told["other"]["filtered"] == figures(run, "other")["filtered"]
    assert told["train"]["temperature"] == 0.5
    assert "drawAccounts" in text


def test_rollouts_show_the_prompt_as_the_model_got_it(
    run: CommandRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: RunFolder = run.folder
    assert penstock("rollouts", str(folder.path), "--task", "train", "--limit", "1") == 0
    shown = capsys.readouterr().out
    assert SYSTEM in shown.split("response")[0]
