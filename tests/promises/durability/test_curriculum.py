"""A run that chooses its prompts by their pass rates: a killed one draws the same, a solved one ends."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.tiny_run import KILLED, SEED, SUMS, CrashServer, assert_went_on, death, digests

CHOOSES = ("produce.strategy=sync", "tasks.train.sampler=difficulty", "tasks.train.data=few.jsonl")


def drawn(run: RunFolder) -> list[str]:
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        return [row[0] for row in journal.query("SELECT prompt_id FROM groups ORDER BY cursor")]


@pytest.fixture(scope="module")
def undisturbed(server: CrashServer) -> tuple[list[str], list[str], dict[str, int]]:
    """Digests, prompts, and how often the run passes each boundary."""
    (server.folder / "few.jsonl").write_text("\n".join(SUMS.read_text().splitlines()[:5]))
    run, code = server.train("chooses", *CHOOSES)
    assert code == 0, server.output()
    return digests(run), drawn(run), server.counts()


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_a_killed_run_draws_the_same_prompts(
    server: CrashServer, undisturbed: tuple[list[str], list[str], dict[str, int]], number: int
) -> None:
    expected, prompts, counts = undisturbed
    place = death(random.Random(1000 * SEED + number), counts)
    run, code = server.train(f"chooses-{number}", *CHOOSES, **place)
    assert code in (KILLED, 0), server.output()  # how often a journal commits depends on the time
    if run.journal.exists():
        assert server.run("resume", str(run.path)) == 0, server.output()
        assert_went_on(server, run, expected)
        assert drawn(run) == prompts


def test_a_run_whose_prompts_are_all_solved_ends_with_one_line(server: CrashServer) -> None:
    (server.folder / "right.py").write_text("def right(response):\n    return 1.0\n")
    run, code = server.train(
        "solved",
        *CHOOSES,
        "tasks.train.rewards=[{type='right.py:right'}]",
        "tasks.train.retire_solved=1",
        "train.steps=50",
    )
    assert code == 0, server.output()
    line = "task train: all 5 prompts are solved (retire_solved = 1)"
    assert f"ended after step {len(digests(run))}: {line}" in server.output()
    assert len(digests(run)) < 5
    assert server.run("audit", str(run.path)) == 0, server.output()
