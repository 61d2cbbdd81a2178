"""An engine that dies of an error is started again like a killed one; one that always dies stops the run."""

from __future__ import annotations

import json
import re

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.faulty_engine import plan
from stages.tiny_run import STEPS, CrashServer, assert_sound, digests

FAULT = "engine-0: it died: IndexError: gather kernel index 7 is out of bounds"
SYNC = "produce.strategy=sync"


def failures(run: RunFolder) -> int:
    """Return how many attempts of groups the journal counts as failed."""
    journal = Journal.open(run.journal, readonly=True)
    try:
        return int(journal.query("SELECT COUNT(*) FROM events WHERE kind = 'failed'")[0][0])
    finally:
        journal.close()


@pytest.fixture(scope="module")
def undisturbed(server: CrashServer) -> RunFolder:
    run, code = server.train("without-fault", *plan(server.folder, "without-fault"), SYNC)
    assert code == 0
    return run


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("inline", marks=pytest.mark.slow),
        "local",
        pytest.param("ray", marks=pytest.mark.ray),
    ],
)
def test_a_run_survives_engines_that_die_of_errors(
    server: CrashServer, undisturbed: RunFolder, kind: str
) -> None:
    name = f"dies-{kind}"
    words = plan(server.folder, name, 8, 4)
    run, code = server.train(
        name, *words, SYNC, f"launch.kind={kind}", "launch.restart_backoff_s=0"
    )
    text = server.output()
    assert code == 0, text
    assert_sound(run)
    assert digests(run) == digests(undisturbed)
    assert failures(run) == 0
    assert f"{FAULT}; starting it again (1 of 3)" in text
    assert f"{FAULT}; starting it again (2 of 3)" in text
    assert text.count("engine-0: serves again") == 2
    assert f"{FAULT}; starting it again (2 of 3)" in (run.logs / "run.log").read_text()
    log = (run.logs / "engine-0.log").read_text()
    assert log.count("Traceback (most recent call last)") == 2
    assert log.count("in _gather") == 2
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["workers/restarts"] for line in lines][-1] == 2
    told = re.findall(r"start of (\S+): starting Python .* s in all since", told_at_start(run))
    assert sorted(told) == (["engine-0", "trainer"] if kind == "local" else [])


def told_at_start(run: RunFolder) -> str:
    """Return what logs/run.log has before the first step's notes, with the stages of each worker."""
    text = (run.logs / "run.log").read_text()
    for stage in ("loading the model", "hashing the weights"):
        assert text.count(stage) in (0, 2)
    return text


@pytest.mark.parametrize("kind", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_the_same_fault_three_times_in_a_row_stops_the_run(server: CrashServer, kind: str) -> None:
    name = f"always-{kind}"
    words = plan(server.folder, name, 8, then=1)
    many = ["launch.max_restarts=10", "launch.restart_backoff_s=0", f"launch.kind={kind}"]
    run, code = server.train(name, *words, *many, "train.groups_per_step=20")
    text = server.output()
    assert code == 1, text
    assert text.strip().splitlines()[-1] == (
        f"error: no engine is left: {FAULT}; engine-0 died of this 3 times in a row and is given up "
        f"(traceback: {run.logs / 'engine-0.log'})"
    )
    assert "Traceback" not in text
    assert (run.logs / "engine-0.log").read_text().count("in _gather") == 3
    assert failures(run) == 0
    assert len(digests(run)) < STEPS
