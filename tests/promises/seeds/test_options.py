"""Options of the command line of ColossalAI's example, each at work in a run of `penstock train`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stages.command_runs import CommandRun, train
from stages.tiny_run import GROUPS, STEPS

RATE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def plain(folder: Path) -> CommandRun:
    return train(folder, "plain", "train.max_grad_norm=1e9", "produce.max_staleness=0")


@pytest.fixture(scope="module")
def trained(folder: Path) -> CommandRun:
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "1+1=2"}\n{"text": "2+2=4"}\n')
    return train(
        folder,
        "trained",
        "model.path=demo",  # it ends its responses
        f"train.lr={RATE}",
        "train.schedule=cosine",
        "train.max_grad_norm=0.01",
        "train.num_epochs=2",
        "train.ptx.coefficient=0.2",
        f"train.ptx.data={texts}",
        "algorithm.kl_beta=0.1",
        "algorithm.clip_low=0.001",
        "algorithm.clip_high=0.001",
        "algorithm.mask_truncated=true",
        "algorithm.overlong_penalty=1.0",
        "produce.max_staleness=1",
        "sync.every_steps=2",
    )


def test_the_rate_falls_on_a_cosine_to_a_tenth(trained: CommandRun) -> None:
    assert trained.code == 0, trained.told
    waves = [(1 + math.cos(math.pi * done / STEPS)) / 2 for done in range(STEPS)]
    wanted = [RATE * (0.1 + 0.9 * wave) for wave in waves]
    assert [line["lr"] for line in trained.metrics] == pytest.approx(wanted)


def test_kl_to_the_reference_is_part_of_the_loss(trained: CommandRun, plain: CommandRun) -> None:
    assert all("kl/mean" not in line for line in plain.metrics)
    assert trained.total("kl/mean") > 0


def test_the_ratio_is_clipped(trained: CommandRun, plain: CommandRun) -> None:
    """The second pass over a batch has ratios that differ from 1 by more than 0.001."""
    assert plain.total("clip/fraction") == 0
    assert trained.total("clip/fraction") > 0


def test_a_gradient_is_scaled_to_the_norm(folder: Path, plain: CommandRun) -> None:
    """AdamW's steps hardly depend on the scale, so the first one is compared in its digest."""
    scaled = train(folder, "scaled", "train.max_grad_norm=0.01", "train.steps=1")
    before, after = plain.metrics[0], scaled.metrics[0]
    assert before["grad_norm"] == after["grad_norm"] > 0.01  # as it was
    ((first,), *_) = plain.query("SELECT digest FROM steps ORDER BY step")
    assert scaled.query("SELECT digest FROM steps") != [(first,)]


def test_truncated_samples_are_not_trained_and_pay_the_overlong_penalty(
    trained: CommandRun,
) -> None:
    with trained.journal() as journal:
        batches = [journal.batch(step) for step in range(1, STEPS + 1)]
    for batch, line in zip(batches, trained.metrics, strict=True):
        finished = [one for one in batch.rollouts if one.finish_reason != "length"]
        tokens = sum(len(one.response_ids) for one in finished)
        assert line["tokens/trained"] == tokens
    assert 0 < trained.total("truncated/share") < STEPS


def test_a_text_stream_is_part_of_the_loss(trained: CommandRun, plain: CommandRun) -> None:
    assert all(line["ptx/loss"] > 0 for line in trained.metrics)
    assert plain.total("ptx/loss") == 0


def test_staleness_stays_below_two_sync_periods(trained: CommandRun) -> None:
    """(max_staleness + 1) x sync.every_steps = 4 would be expired."""
    newest = max(line["staleness/max"] for line in trained.metrics)
    assert 0 < newest < 4


def test_checkpoints_are_in_the_run_folder(trained: CommandRun) -> None:
    assert {one.name for one in trained.folder.checkpoints.iterdir()} == {"step-2", "step-4"}


@pytest.mark.parametrize(
    "name",
    ["dapo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rloo", "reinforce_pp_baseline"))],
)
def test_an_algorithm_trains_a_run(name: str, folder: Path, plain: CommandRun) -> None:
    run = train(folder, name, f"algorithm.name={name}", "train.steps=1", "train.max_grad_norm=1e9")
    assert run.code == 0, run.told
    (line,) = run.metrics
    assert math.isfinite(line["loss/policy"])
    assert line["grad_norm"] != plain.metrics[0]["grad_norm"]  # GRPO's, on the same rollouts
    if name == "dapo":  # dynamic sampling: a group without a difference teaches nothing
        groups = run.query("SELECT COUNT(DISTINCT reward) FROM rollouts GROUP BY group_id")
        with run.journal() as journal:
            kept = journal.batch(1).groups
        assert len(kept) == GROUPS <= len(groups)
        assert all(len({one.reward for one in group.rollouts}) > 1 for group in kept)


@pytest.mark.slow
def test_rewards_on_the_seed_scale_and_tasks_by_weight(folder: Path) -> None:
    lines = folder / "seed.jsonl"
    message = {"role": "user", "content": "1+1"}
    rows = [{"messages": [message], "gt_answer": "2"}, {"messages": message, "gt_answer": "2"}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    run = train(
        folder,
        "scale",
        "model.path=demo",  # it writes the tags
        "tasks.train.data=addition",
        "tasks.train.rewards=[{type='think_answer_tags', weight=10}]",
        f"tasks.boxes={{data='{lines}', rewards=[{{type='boxed'}}], weight=0.5}}",
        "sampling.max_tokens=24",
        "sampling.num_generations=4",
        "train.groups_per_step=6",
        "train.steps=1",
    )
    assert run.code == 0, run.told
    with run.journal() as journal:
        groups = journal.batch(1).groups
    by_task = {
        task: [group for group in groups if group.task == task] for task in ("train", "boxes")
    }
    assert {task: len(some) for task, some in by_task.items()} == {"train": 4, "boxes": 2}
    rewards = {one.reward for group in by_task["train"] for one in group.rollouts}
    assert rewards == {0.0, 10.0}
    assert {one.reward for group in by_task["boxes"] for one in group.rollouts} == {0.0}
