"""Ctrl-C and SIGTERM at any time: the run saves what it has, says how to continue, and leaves nothing."""

from __future__ import annotations

import pytest

from penstock.store.checkpoint import CheckpointStore
from penstock.store.run_folder import RunFolder
from stages.tiny_run import CrashServer, assert_no_worker_is_left, assert_sound, digests

LONG = ["train.steps=1000", "checkpoint.every_steps=0", "produce.strategy=sync"]


def newest_step(run: RunFolder) -> int | None:
    newest = CheckpointStore(run.checkpoints).newest()
    return None if newest is None else newest.step


def assert_resumes(server: CrashServer, run: RunFolder) -> None:
    done = len(digests(run))
    assert server.run("resume", str(run.path), f"train.steps={done + 1}") == 0, server.output()
    assert_sound(run, steps=done + 1)


@pytest.mark.parametrize(
    ("point", "signal", "launch"),
    [
        pytest.param("before step", "SIGINT", "inline", marks=pytest.mark.slow),
        ("after step", "SIGTERM", "inline"),
        ("before publish", "SIGINT", "local"),
    ],
)
def test_a_stop_saves_the_last_step(
    server: CrashServer, point: str, signal: str, launch: str
) -> None:
    words = [*LONG, f"launch.kind={launch}"]
    run, code = server.train(point.replace(" ", "-"), *words, point=point, number=3, fault=signal)
    assert code == 130, server.output()
    done = len(digests(run))
    assert done >= 2
    assert newest_step(run) == done
    assert "stop requested: saving a checkpoint" in server.output()
    last = (
        f"stopped after step {done} of 1000, checkpoint written; "
        f"continue with: penstock resume {run.path}"
    )
    assert last in server.output()
    assert (run.logs / "run.log").read_text().endswith(f" {last}\n")
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_a_second_stop_gives_the_checkpoint_up_and_says_so(server: CrashServer) -> None:
    run, code = server.train(
        "twice",
        *LONG,
        point="before take",
        number=3,
        fault="SIGINT",
        then=[("before snapshot write", 1, "SIGINT")],
    )
    assert code == 130, server.output()
    assert newest_step(run) is None
    assert "stop requested: stopping without a checkpoint" in server.output()
    assert "stopped after step 2 of 1000, no checkpoint written" in server.output()
    assert "Traceback" not in server.output()
    assert_resumes(server, run)
    assert "2 steps of 2 will be redone from the journal after the start" in server.output()


@pytest.mark.slow
def test_a_third_stop_ends_the_process_at_once_with_a_line(server: CrashServer) -> None:
    # together, and of two kinds, so that neither is merged with the other nor outrun by the second stop
    then = [("before snapshot write", 1, sign) for sign in ("SIGINT", "SIGTERM")]
    run, code = server.train(
        "thrice", *LONG, point="before take", number=3, fault="SIGINT", then=then
    )
    assert code == 130
    assert "killed; nothing that was journalled is lost; continue with" in server.output()
    assert_resumes(server, run)


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_stop_during_the_start_leaves_nothing(server: CrashServer, signal: str) -> None:
    words = [*LONG, "launch.kind=local"]
    run, code = server.train(
        f"start-{signal}", *words, point="before worker start", number=2, fault=signal
    )
    assert code == 130, server.output()
    assert "stopped during the start; nothing was trained" in server.output()
    assert "Traceback" not in server.output()
    assert_no_worker_is_left(run)
    assert not server.folders_left()
    assert not run.path.exists()


@pytest.mark.slow
def test_a_stopped_redo_keeps_what_it_redid(server: CrashServer) -> None:
    run, code = server.train("redo", *LONG, point="before take", number=4)
    assert code == -9
    words = ("resume", str(run.path))
    assert server.run(*words, point="before step", number=3, fault="SIGINT") == 130
    assert "3 steps of 3 will be redone from the journal after the start" in server.output()
    assert "stopped after step 3 of 1000, checkpoint written" in server.output()
    assert newest_step(run) in (2, 3)  # 3: the update was not given up in time
    assert_resumes(server, run)
