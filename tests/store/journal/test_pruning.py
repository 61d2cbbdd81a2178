"""Tokens behind the oldest kept checkpoint can be removed; a resume reads only what it needs."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.data.sampler import Sampler
from penstock.errors import RunError
from penstock.inspection.audit import EraBounds, audit_journal
from penstock.store.journal import Journal
from penstock.types import Batch, Group, ModelCall, Score, Status, StepReport, VersionSegment
from stages.rollouts import make_prompts

STEPS, KEPT_FROM, TOKENS = 12, 9, 2000
SAMPLER = Sampler(make_prompts(100), task_name="t", prompt_repeat_k=2, seed=0)


def finished(cursor: int, version: int) -> Group:
    group = SAMPLER.group_at(cursor)
    for rollout in group.rollouts:
        rng = np.random.default_rng(rollout.seed)
        segments = [VersionSegment(version, TOKENS)]
        rollout.append(rng.integers(1, 30_000, TOKENS), -rng.random(TOKENS), segments)
        rollout.text, rollout.finish_reason, rollout.score = f"text {cursor}", "stop", Score(1.0)
        rollout.loss_mask[:3] = False
        rollout.move_to(Status.COMPLETED)
    return group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a journal of some steps; each drops a group, and a group is left in the buffer."""

    async def main() -> None:
        with closing(Journal.open(tmp_path / "journal.db", threaded=False)) as journal:
            journal.record_published(0, "d0")
            journal.record_confirmed("engine", 0, "d0")
            for step in range(1, STEPS + 1):
                groups = [finished(2 * step - 2, step - 1), finished(2 * step - 1, step - 1)]
                for group in groups:
                    journal.drawn(group)
                await journal.landed(groups[0])
                groups[1].move_to(Status.FILTERED)
                await journal.filtered(groups[1])
                batch = Batch(step=step, groups=(groups[0],))
                await journal.begin_step(step, batch.groups)
                report = StepReport(
                    step=step, policy_version=step, digest=f"d{step}", trained=batch.fingerprints()
                )
                await journal.commit_step(report)
                journal.record_published(step, f"d{step}")
                journal.record_confirmed("engine", step, f"d{step}")
            left = finished(2 * STEPS, STEPS)
            journal.drawn(left)
            await journal.landed(left)

    asyncio.run(main())
    return tmp_path / "journal.db"


def prune(path: Path, *, keep_text: bool) -> None:
    with closing(Journal.open(path, threaded=False)) as journal:
        journal.prune_payloads(KEPT_FROM - 1, keep_text=keep_text)


@pytest.mark.parametrize("keep_text", [True, False])
def test_the_calls_of_an_agent_stay_intact_when_their_tokens_are_removed(
    path: Path, keep_text: bool
) -> None:
    """A pruned call's checksum was computed over an empty payload, and compared with one over NULL."""
    rollout = SAMPLER.group_at(0).rollouts[0]
    call = ModelCall(
        number=0,
        parent=None,
        context_ids=np.array([1, 2], dtype=np.int32),
        token_ids=np.array([3], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        segments=(VersionSegment(0, 1),),
        finish_reason="stop",
        messages=({"role": "user", "content": "question"},),
        answer={"role": "assistant", "content": "answer"},
    )

    async def main() -> None:
        with closing(Journal.open(path, threaded=False)) as journal:
            await journal.record_call(rollout, call)
            await journal.begin_tool(rollout, "c1", "act")
            await journal.end_tool(rollout, "c1", "done", "result")

    asyncio.run(main())
    prune(path, keep_text=keep_text)
    with closing(Journal.open(path, readonly=True)) as journal:
        assert journal.query("SELECT COUNT(*) FROM call_rows WHERE length(data)") == [(0,)]
        assert journal.damaged() == []


def bytes_of_payloads(path: Path) -> int:
    with sqlite3.connect(path) as database:
        return database.execute("SELECT SUM(length(data)) FROM rollout_rows").fetchone()[0]


@pytest.mark.parametrize("keep_text", [True, False])
def test_what_no_redo_needs_is_removed_and_the_rest_stays(path: Path, keep_text: bool) -> None:
    before = bytes_of_payloads(path)
    prune(path, keep_text=keep_text)
    assert bytes_of_payloads(path) < 0.4 * before  # steps 9 to 12 of 12 are whole, and the buffer
    with closing(Journal.open(path, readonly=True)) as journal:
        assert journal.pruned_to() == KEPT_FROM - 1
        for step in range(KEPT_FROM, STEPS + 1):
            (group,) = journal.batch(step).groups
            assert group.fingerprint() == finished(2 * step - 2, step - 1).fingerprint()
        assert len(journal.unfinished_groups().buffered) == 1
        removed = journal.group("t:0")
        assert removed.rollouts[0].text == ("text 0" if keep_text else "")
        assert (removed.rollouts[0].reward, removed.num_response_tokens) == (1.0, 2 * TOKENS)
        assert not removed.rollouts[0].loss_mask.any()
        with pytest.raises(RunError, match="the tokens of step 3 were removed"):
            journal.batch(3)


def test_the_audit_balances_and_says_what_it_cannot_compare(path: Path) -> None:
    prune(path, keep_text=True)
    prune(path, keep_text=True)  # a second time changes nothing
    with closing(Journal.open(path, readonly=True)) as journal:
        found = audit_journal(journal, [EraBounds(None, {"t": 0}, {"t": 6})])
    assert found.faults == []
    assert [line.split(",")[0] for line in found.warnings] == [
        "steps 1 to 8: their tokens were removed (journal.keep_payloads)"
    ]


def test_a_damaged_payload_is_not_pruned_but_named(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE rollout_rows SET text = 'other' WHERE rollout_id = 't:0.1'")
    prune(path, keep_text=True)
    with closing(Journal.open(path, readonly=True)) as journal:
        assert journal.damaged() == ["rollout t:0.1"]


def test_a_pruned_payload_is_still_checked(path: Path) -> None:
    prune(path, keep_text=True)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE rollout_rows SET text = 'other' WHERE rollout_id = 't:0.1'")
    with closing(Journal.open(path, readonly=True)) as journal:
        assert journal.damaged() == ["rollout t:0.1"]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resume_reads_only_the_payloads_that_it_needs(path: Path) -> None:
    """It redoes the last step and takes over one buffered group: 2 of the 25 groups."""
    whole = path.stat().st_size
    before = bytes_read()
    with closing(Journal.open(path, readonly=True)) as journal:
        journal.check_for_resume()
    with closing(Journal.open(path, threaded=False)) as journal:
        assert journal.last_committed_step() == STEPS
        assert len(journal.batch(STEPS).groups) == 1
        assert len(journal.unfinished_groups().buffered) == 1
        journal.counts(), journal.drops(), journal.taken(), journal.cursors(), journal.steps()
    assert bytes_read() - before < 0.4 * whole
