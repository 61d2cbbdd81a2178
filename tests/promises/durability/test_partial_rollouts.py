"""Responses that an update stops continue from their tokens, also where driver, trainer or engine is killed."""

from __future__ import annotations

import pytest

from penstock.inspection.audit import audit_run
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.tiny_run import KILLED, CrashServer, assert_no_worker_is_left, assert_sound

STEPS = 6
PARTIAL = [
    "launch.kind=local",
    "launch.restart_backoff_s=0",
    f"train.steps={STEPS}",
    "sampling.max_tokens=64",
    "produce.max_staleness=3",
    "produce.over_sample_threshold=1.0",
    "produce.enable_partial_rollout=true",
    "sync.on_update=abort",
]


def continued(run: RunFolder) -> int:
    """How many trained responses have tokens of several versions."""
    journal = Journal.open(run.journal, readonly=True)
    try:
        return journal.query(
            "SELECT COUNT(*) FROM rollouts WHERE step IS NOT NULL AND oldest_version < newest_version"
        )[0][0]
    finally:
        journal.close()


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("after engine update", "SIGKILL"),
        pytest.param("before engine update", "SIGKILL engine-0", marks=pytest.mark.slow),
        pytest.param("after engine update", "SIGKILL trainer", marks=pytest.mark.slow),
        pytest.param("before take", "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_kill_among_partial_rollouts_loses_no_group(
    server: CrashServer, point: str, fault: str
) -> None:
    name = f"partial-{point}-{fault}".replace(" ", "-")
    run, code = server.train(name, *PARTIAL, point=point, number=3, fault=fault)
    if fault == "SIGKILL":
        assert code == KILLED, server.output()
        assert_no_worker_is_left(run)
        code = server.run("resume", str(run.path))
    assert code == 0, server.output()
    assert "Traceback" not in server.output()
    assert_sound(run, steps=STEPS)
    assert audit_run(run, as_json=True) == 0
    assert continued(run) > 0
