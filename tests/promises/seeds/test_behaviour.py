"""Behaviour that both systems have or lack, seen in what one run of `penstock train` left."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from penstock.types import Prompt, Rollout
from stages.command_runs import CommandRun, train
from stages.rewards import ODD_REWARD

STEPS, BATCH, LONG_PROMPTS = 6, 8, 3
LIMIT, WINDOW = 8, 4  # tokens
WEIGHTS = {"train": 9.0, "second": 1.0, "third": 0.5}
HELD_OUT = 5


def broken_for_some(rollout: Rollout, prompt: Prompt) -> float:
    """A user's reward with a mistake that shows for one prompt only."""
    if prompt.messages[0]["content"] == "31+12":
        raise ZeroDivisionError("a mistake in the reward")
    return float(int(rollout.response_ids.sum()) % 5) / 4


def write_sums(path: Path, numbers: range, *, long: int = 0) -> Path:
    texts = [f"{number}+12" for number in numbers] + ["1+1" * 200] * long
    rows = ({"messages": [{"role": "user", "content": t}], "gt_answer": "1"} for t in texts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CommandRun:
    folder = tmp_path_factory.mktemp("behaviour")
    first = write_sums(folder / "first.jsonl", range(31, 37), long=LONG_PROMPTS)
    others = write_sums(folder / "others.jsonl", range(41, 45))
    held_out = write_sums(folder / "held_out.jsonl", range(51, 51 + HELD_OUT))
    overlong = (
        f"[{{type='{ODD_REWARD}'}}, {{type='soft_overlong', options={{buffer_tokens={WINDOW}}}}}]"
    )
    done = train(
        folder,
        "run",
        "model.path=demo",  # it ends its responses
        f"train.steps={STEPS}",
        f"train.groups_per_step={BATCH}",
        "produce.strategy=async",
        "produce.max_staleness=1",
        f"produce.max_buffered_groups={2 * BATCH}",
        f"sampling.max_tokens={LIMIT}",
        "track.rollouts_every_steps=1",
        f"tasks.train.data={first}",
        f"tasks.train.weight={WEIGHTS['train']}",
        f"tasks.train.rewards=[{{type='{__file__}:broken_for_some'}}]",
        f"tasks.second={{data='{others}', weight={WEIGHTS['second']}, rewards={overlong}}}",
        f"tasks.third={{data='{others}', weight={WEIGHTS['third']}, rewards={overlong}}}",
        f"eval.tasks={{held={{data='{held_out}', rewards=[{{type='{ODD_REWARD}'}}]}}}}",
    )
    assert done.code == 0, done.told
    return done


@pytest.mark.slow
def test_soft_overlong_is_a_straight_line_before_the_limit(run: CommandRun) -> None:
    with run.journal() as journal:
        batches = [journal.batch(step) for step in range(1, STEPS + 1)]
    rollouts = [
        one
        for batch in batches
        for group in batch.groups
        if group.task != "train"
        for one in group.rollouts
    ]
    for one in rollouts:
        cut = one.finish_reason == "length"
        share = 1.0 if cut else max(0.0, (len(one.response_ids) - (LIMIT - WINDOW)) / WINDOW)
        assert one.score is not None
        assert one.score.parts["soft_overlong"] == pytest.approx(-share)
    assert len({len(one.response_ids) for one in rollouts}) > 1


def test_a_task_of_small_weight_is_trained_in_its_share(run: CommandRun) -> None:
    trained = Counter(
        dict(run.query("SELECT task, COUNT(*) FROM groups WHERE step IS NOT NULL GROUP BY task"))
    )
    assert trained.total() == STEPS * BATCH
    for task, weight in WEIGHTS.items():
        share = STEPS * BATCH * weight / sum(WEIGHTS.values())
        assert abs(trained[task] - share) <= 1, trained


def test_a_long_prompt_is_skipped_counted_and_never_cut(run: CommandRun) -> None:
    assert run.metrics[-1]["tasks/train/prompts_skipped_long"] == LONG_PROMPTS
    with run.journal() as journal:
        texts = {group.prompt.messages[0]["content"] for group in journal.batch(1).groups}
    assert not any("1+11+1" in text for text in texts)


def test_a_reward_that_raises_costs_its_own_groups(run: CommandRun) -> None:
    dropped = run.query("SELECT task, error FROM groups WHERE state = 'dropped'")
    assert dropped
    assert all(task == "train" and "a mistake in the reward" in error for task, error in dropped)


def test_ids_stay_unique_over_epochs(run: CommandRun) -> None:
    rows = run.query("SELECT group_id, prompt_id FROM groups")
    assert len({group_id for group_id, _ in rows}) == len(rows)
    assert len({prompt_id for _, prompt_id in rows}) < len(rows)  # more than one epoch


def test_the_rollout_log_has_rewards_and_versions(run: CommandRun) -> None:
    lines = (run.folder.path / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    assert all({"reward", "versions"} <= set(row) for row in rows)


def test_an_evaluation_asks_each_problem_once(run: CommandRun) -> None:
    (saved, *_) = sorted((run.folder.path / "eval").rglob("*.jsonl"))
    asked = [json.loads(line)["prompt"] for line in saved.read_text().splitlines()]
    assert len(asked) == len(set(map(str, asked))) == HELD_OUT


def test_the_buffer_holds_no_more_groups_than_its_bound(tmp_path: Path) -> None:
    """Without the bound the same run keeps 8 groups that wait for the trainer."""
    bound = 4
    bounded = train(
        tmp_path,
        "bounded",
        f"train.steps={STEPS}",
        f"train.groups_per_step={bound}",
        "produce.strategy=async",
        "produce.max_staleness=2",
        f"produce.max_buffered_groups={bound}",
    )
    assert bounded.code == 0, bounded.told
    times = bounded.query(
        "SELECT landed_at, begun_at FROM groups JOIN steps ON steps.step = groups.step"
    )
    moves = sorted([(landed, 1) for landed, _ in times] + [(taken, -1) for _, taken in times])
    assert max(itertools.accumulate(change for _, change in moves)) == bound
