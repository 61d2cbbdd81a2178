"""Journals of every schema version that was ever released are read, audited and continued.

Each file of `fixtures/` was written by the version it is named after: three steps of a run that was
killed while it trained the fourth, with a group refused, one given up, one tried again after it
expired, one buffered and one in flight.
"""

from __future__ import annotations

import asyncio
import gzip
from contextlib import closing
from pathlib import Path

import pytest

from penstock.config import SamplingConfig
from penstock.data.sampler import Sampler
from penstock.inspection.audit import Audit, EraBounds, audit_journal
from penstock.rollout import AsyncProduceStrategyConfig, ProduceProgress, Producer, ProduceTask
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.replay_buffer import ReplayBuffer
from penstock.store.journal import Journal
from penstock.store.journal.schema import SCHEMA_VERSION
from penstock.types import StepReport
from stages.fake_engine import FakeEngine
from stages.producing import on_virtual_time
from stages.rewards import CountingReward
from stages.rollouts import make_prompts

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = range(1, SCHEMA_VERSION + 1)


@pytest.fixture(params=VERSIONS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    packed = FIXTURES / f"schema-{request.param}.db.gz"
    (tmp_path / "journal.db").write_bytes(gzip.decompress(packed.read_bytes()))
    return tmp_path / "journal.db"


def audit(path: Path) -> Audit:
    with closing(Journal.open(path, readonly=True)) as journal:
        journal.check_file()
        journal.check_for_resume()
        return audit_journal(journal, [EraBounds(None, {"train": 1})])


def version_of(path: Path) -> int:
    with closing(Journal.open(path, readonly=True)) as journal:
        return journal.query("PRAGMA user_version")[0][0]


def test_it_is_read_and_audited_without_a_change(path: Path) -> None:
    before = path.read_bytes()
    found = audit(path)
    assert found.faults == []
    task = found.tasks["train"]
    assert (task.drawn, task.trained, task.buffered, task.in_flight) == (13, 7, 3, 1)
    assert task.dropped == {"filtered": 1, "failed": 1}
    with closing(Journal.open(path, readonly=True)) as journal:
        assert [report.digest for report in journal.steps()] == ["digest-1", "digest-2", "digest-3"]
        assert [len(journal.batch(step).groups) for step in (1, 2, 3, 4)] == [2, 2, 3, 2]
        assert journal.read_identity().keys() <= {"made by"}
    assert path.read_bytes() == before


def test_its_run_continues_and_the_audit_balances(path: Path) -> None:
    """The batch of step 4 is trained, then a batch with the buffered group and the one in flight."""

    async def main() -> None:
        buffer, engine = ReplayBuffer(), FakeEngine(length=lambda request: 3)
        agent = SingleTurn(
            engine=engine, reward=CountingReward(), sampling=SamplingConfig(), decode=str
        )
        sampler = Sampler(
            make_prompts(9), task_name="train", prompt_repeat_k=2, seed=0, replay_buffer=buffer
        )
        task = ProduceTask(
            name="train",
            weight=1.0,
            strategy=AsyncProduceStrategyConfig(max_staleness=1).build(),
            agent_loop=agent,
            sampler=sampler,
        )
        journal = Journal.open(path, threaded=False)
        producer = Producer(
            tasks=[task],
            replay_buffer=buffer,
            journal=journal,
            progress=ProduceProgress.build(["train"]),
            groups_per_step=2,
            first_version=3,
        )
        await engine.update_weights(3)
        await producer.restore(journal)
        producing = asyncio.create_task(producer.run())
        for step in (4, 5):
            batch = await producer.take_batch(step)
            digest = f"digest-{step}"
            await journal.commit_step(StepReport(step=step, policy_version=step, digest=digest))
            journal.record_published(step, digest)
            journal.record_confirmed("engine", step, await engine.update_weights(step))
            producer.weights_updated(step)
        assert [group.group_id for group in batch.groups] == ["train:11", "train:12"]
        producing.cancel()
        await asyncio.wait([producing])
        journal.close()

    on_virtual_time(main)
    assert version_of(path) == SCHEMA_VERSION
    found = audit(path)
    assert found.faults == []
    assert (found.committed_steps, found.tasks["train"].trained) == (5, 11)


def test_a_fixture_of_every_version_is_committed() -> None:
    assert {file.name for file in FIXTURES.iterdir()} == {f"schema-{n}.db.gz" for n in VERSIONS}
