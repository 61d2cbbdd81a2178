"""What happens to running responses when new weights arrive: `sync.on_update`, each way in a run."""

from __future__ import annotations

import pytest

from penstock.types import expand_segments
from stages.command_runs import CommandRun, penstock, train
from stages.held_engine import HELD_ENGINE, STEP_ENDS
from stages.tiny_run import STEPS

HELD = (f"engine.name={HELD_ENGINE}", "produce.max_staleness=1", "checkpoint.every_steps=0")
RUNS = {
    "keep": ("produce.pause_timeout_s=5",),
    "abort": ("sync.on_update=abort",),
    "partial": ("sync.on_update=abort", "produce.enable_partial_rollout=true"),
    "wait": ("sync.on_update=wait", f"track.trackers=['{STEP_ENDS}']"),
    "tail": (
        "produce.max_staleness=0",
        "produce.over_sample_threshold=1.0",
        "produce.tail_batch_trigger_size=2",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CommandRun]:
    folder = tmp_path_factory.mktemp("updates")
    return {name: train(folder, name, *HELD, *words) for name, words in RUNS.items()}


def versions(run: CommandRun) -> set[tuple[int, ...]]:
    """Return how many tokens of each version the trained responses have, without the version numbers."""
    with run.journal() as journal:
        batches = [journal.batch(step) for step in range(1, STEPS + 1)]
    segments = [rollout.segments for batch in batches for rollout in batch.rollouts]
    assert all(len(expand_segments(one)) == 4 for one in segments)
    return {tuple(segment.length for segment in one) for one in segments}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_way_of_an_update_trains_to_the_end_and_balances(
    runs: dict[str, CommandRun], name: str
) -> None:
    assert runs[name].code == 0
    assert len(runs[name].metrics) == STEPS
    assert penstock("audit", str(runs[name].folder.path)) == 0


def test_keep_continues_running_responses_under_the_new_weights(
    runs: dict[str, CommandRun],
) -> None:
    assert versions(runs["keep"]) == {(4,), (2, 2)}
    assert runs["keep"].total("tasks/train/aborted") == 0


def test_abort_restarts_running_responses(runs: dict[str, CommandRun]) -> None:
    assert versions(runs["abort"]) == {(4,)}
    assert runs["abort"].total("tasks/train/aborted") >= STEPS - 1
    assert runs["abort"].total("tasks/train/retried") >= STEPS - 1


def test_abort_continues_partial_responses_if_asked(runs: dict[str, CommandRun]) -> None:
    assert versions(runs["partial"]) == {(4,), (2, 2)}
    assert runs["partial"].total("tasks/train/aborted") >= STEPS - 1


def test_wait_lets_running_responses_finish_under_the_old_weights(
    runs: dict[str, CommandRun],
) -> None:
    run = runs["wait"]
    assert versions(run) == {(4,)}
    assert run.total("tasks/train/aborted") == 0
    assert run.total("time/pause_s") > 0
    assert run.query("SELECT MAX(staleness) FROM groups WHERE state = 'trained'") == [(1,)]


def test_expired_groups_come_back_in_a_tail_batch(runs: dict[str, CommandRun]) -> None:
    run = runs["tail"]
    assert run.total("tasks/train/expired") >= 2
    assert run.total("tasks/train/tail_calls") >= 1
    assert run.query("SELECT MAX(staleness) FROM groups WHERE state = 'trained'") == [(0,)]
    assert run.query("SELECT COUNT(*) FROM groups WHERE state = 'trained' AND tries > 1") != [(0,)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["produce.enable_partial_rollout=true"], "enable_partial_rollout has no effect"),
        (["produce.tail_batch_trigger_size=4"], "tail_batch_trigger_size has no effect"),
        (["produce.pause_timeout_s=5"], "pause_timeout_s has no effect"),
        (["sync.on_update=abort", "produce.strategy=sync"], "sync.on_update abort has no effect"),
        (["sync.on_update=wait", "produce.max_staleness=0"], "sync.on_update wait has no effect"),
    ],
)
def test_a_switch_without_effect_is_named_at_the_start(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock("config", *words) == 0
    assert f"warning: {told}" in capsys.readouterr().err.replace("tasks.train: ", "")


def test_a_run_tells_of_a_switch_without_effect(runs: dict[str, CommandRun]) -> None:
    assert "warning: tasks.train: pause_timeout_s has no effect" in runs["keep"].told
    assert "warning" not in runs["partial"].told
