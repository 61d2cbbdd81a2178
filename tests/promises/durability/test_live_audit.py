"""Audits of a run that is under way: each sees one moment of it, and none raises a false alarm."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.run.job import Job
from stages.disturbed_run import config_of, run
from stages.tiny_run import SMALL_POLICY

AUDITS = 100
AUDIT = f"""
import sys
from pathlib import Path
from penstock.inspection.audit import take_audit
from penstock.store.run_folder import RunFolder

folder, steps = RunFolder(Path(sys.argv[1])), set()
for number in range({AUDITS}):
    audit = take_audit(folder, deep=number % 5 == 0)
    steps.add(audit.committed_steps)
    assert not audit.faults, (number, audit.faults)
    print(len(steps), flush=True)
"""


class AuditsAreDone(Exception):
    """Ends the run: every audit has answered."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_audits_beside_a_busy_run_raise_no_false_alarm(tmp_path: Path) -> None:
    """Every fifth audit also reads the checkpoints, which the run replaces meanwhile."""
    auditors: list[subprocess.Popen[str]] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def audit(folder: Path) -> None:
        command = [sys.executable, "-c", AUDIT, str(folder)]
        auditors.append(subprocess.Popen(command, **pipes))

    answers: list[str] = []

    async def disturb(job: Job, step: int) -> None:
        """A step for each answer: the next audit runs beside the next step, and the journal stays short."""
        if step == 3:
            audit(job.folder.path)
        if auditors:
            assert auditors[0].stdout is not None
            answers.append(await asyncio.to_thread(auditors[0].stdout.readline))
            if len(answers) == AUDITS or not answers[-1].strip().isdigit():
                raise AuditsAreDone

    busy = ["train.steps=100000", "produce.max_staleness=1", "checkpoint.every_steps=2"]
    config = config_of(tmp_path, "busy", f"model.path={SMALL_POLICY}", *busy)
    with pytest.raises(ExceptionGroup) as ended:
        run(config, disturb)
    assert ended.group_contains(AuditsAreDone)
    rest = auditors[0].communicate()[0]
    assert auditors[0].returncode == 0, [*answers[-1:], rest]
    assert int(answers[-1]) > 50  # moments of the run that the audits saw
