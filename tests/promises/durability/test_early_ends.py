"""Runs that end before their last step, by a rule or because no prompt is left: a killed one ends after the same step.

Each draw is a function of its number; PENSTOCK_CRASH_SEED chooses others.
"""

from __future__ import annotations

import json
import random

import pytest
from rich.console import Console

from penstock.inspection.audit import audit_run
from penstock.store.run_folder import RunFolder
from stages.tiny_run import KILLED, SEED, SUMS, CrashServer, assert_sound, death, digests

DRAWS, QUICK = 12, 2
IN_ORDER = ("produce.strategy=sync", "train.steps=6", "eval.blocking=true")
EVALUATED = (f"eval.tasks={{a={{data='{SUMS}'}}}}", "eval.max_problems=4")
ENDS = {
    "a metric": ['train.stop_when=["policy_version >= 3"]'],
    "one of two rules": ['train.stop_when=["a/reward >= 2", "policy_version >= 2"]'],
    "a score": ['train.stop_when=["a/reward stalls 2"]'],
    "a finding": ['train.stop_when=["finding equal_rewards"]', "train.steps=8"],
    "solved prompts": ["tasks.train.sampler=difficulty", "tasks.train.retire_solved=1"],
}
RIGHT = "tasks.train.rewards=[{type='right.py:right'}]"  # for each response


def drawn(choice: random.Random, end: str) -> list[str]:
    """The settings of one run."""
    words = [*IN_ORDER, *EVALUATED, *ENDS[end], f"checkpoint.every_steps={choice.randint(1, 3)}"]
    words += [f"eval.every_steps={choice.randint(1, 2)}", f"checkpoint.keep={choice.randint(1, 2)}"]
    words += choice.choice(([], ["checkpoint.keep_best=a/reward"]))
    if end in ("a finding", "solved prompts"):
        words += [RIGHT, "tasks.train.data=few.jsonl"]
    return words


def evaluations(run: RunFolder) -> list[tuple[int, float]]:
    lines = map(json.loads, (run.evaluations / "summary.jsonl").read_text().splitlines())
    return [(line["step"], line["reward"]) for line in lines]


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < QUICK else [pytest.mark.slow]) for n in range(DRAWS)],
)
def test_a_killed_run_ends_after_the_same_step(server: CrashServer, number: int) -> None:
    (server.folder / "few.jsonl").write_text("\n".join(SUMS.read_text().splitlines()[:5]))
    (server.folder / "right.py").write_text("def right(response):\n    return 1.0\n")
    choice = random.Random(f"{SEED}/ends/{number}")
    words = drawn(choice, list(ENDS)[number % len(ENDS)])
    print(*words, sep="\n")  # shown on failure
    run, code = server.train(f"ends-{number}", *words)
    assert code == 0, server.output()
    expected, counts = digests(run), server.counts()
    (end,) = [line for line in server.output().splitlines() if line.startswith("ended after step")]
    assert 0 < len(expected) < 6
    place = death(choice, counts)
    print(place)
    killed, code = server.train(f"ends-{number}-killed", *words, **place)
    assert code in (KILLED, 0), server.output()  # how often a journal commits depends on the time
    if not killed.journal.exists():
        return
    assert server.run("resume", str(killed.path)) == 0, server.output()
    assert "Traceback" not in server.output()
    assert end in (killed.logs / "run.log").read_text() + server.output()
    assert digests(killed) == expected
    assert evaluations(killed) == evaluations(run)
    assert_sound(killed, steps=len(expected))
    assert audit_run(killed, console=Console(quiet=True)) == 0
