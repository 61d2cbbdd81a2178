"""The audit: a good run balances, and every kind of broken journal is found."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from penstock.config import SamplingConfig
from penstock.config.doubts import doubts
from penstock.data.sampler import Sampler
from penstock.inspection.audit import Audit, EraBounds, audit_journal, audit_run, take_audit
from penstock.rollout import AsyncProduceStrategyConfig, ProduceProgress, Producer, ProduceTask
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.progress import ReplayBuffer
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal import Journal
from penstock.store.journal.codec import CHECKED, expression
from penstock.store.journal.schema import open_database
from penstock.store.run_folder import RunFolder
from penstock.types import Batch, StepReport
from stages.fake_engine import FakeEngine
from stages.rewards import CountingReward
from stages.rollouts import finish_rollout, make_prompts


def make_run(path: Path, steps: int = 5) -> Path:
    """Make a run of async steps with refusals, failures, and groups left in the buffer."""

    async def main() -> None:
        journal = Journal.open(path / "journal.db", threaded=False)
        buffer = ReplayBuffer()
        engine = FakeEngine(
            length=lambda r: 2 + r.seed % 7,
            fail=lambda r: "broken" if r.request_id.startswith("train:5.") else "",
        )
        producer = Producer(
            tasks=[
                ProduceTask(
                    name="train",
                    weight=1.0,
                    strategy=AsyncProduceStrategyConfig(
                        max_staleness=1,
                        is_valid_sample_fn=lambda rollouts: rollouts[0].rollout_id != "train:3.0",
                    ).build(),
                    agent_loop=SingleTurn(
                        engine=engine,
                        reward=CountingReward(),
                        sampling=SamplingConfig(),
                        decode=str,
                    ),
                    sampler=Sampler(
                        make_prompts(9),
                        task_name="train",
                        prompt_repeat_k=2,
                        seed=0,
                        replay_buffer=buffer,
                    ),
                )
            ],
            replay_buffer=buffer,
            journal=journal,
            progress=ProduceProgress.build(["train"]),
            groups_per_step=4,
        )
        journal.record_identity({"tasks.train.data": json.dumps({"prompts": 9})})
        journal.record_published(0, "digest-0")
        journal.record_confirmed("engine", 0, "digest-0")
        running = asyncio.create_task(producer.run())
        for step in range(1, steps + 1):
            batch = await producer.take_batch(step)
            await asyncio.sleep(0.1)
            await journal.commit_step(report_of(batch))
            journal.record_published(step, f"digest-{step}")
            journal.record_confirmed("engine", step, await engine.update_weights(step))
            producer.weights_updated(step)
        running.cancel()
        await asyncio.wait([running])
        journal.close()

    clock = VirtualClock()
    clock.run(main())
    clock.close()
    (path / "config.toml").write_text("[produce]\nmax_staleness = 1\n")
    return path


def report_of(batch: Batch) -> StepReport:
    """Return the report of a trainer that read the batch."""
    step = batch.step
    return StepReport(
        step=step, policy_version=step, digest=f"digest-{step}", trained=batch.fingerprints()
    )


def look(path: Path, allowed: int = 1) -> Audit:
    journal = Journal.open(path / "journal.db", readonly=True)
    found = audit_journal(journal, [EraBounds(None, {"train": allowed}, {"train": 10})])
    journal.close()
    return found


def change(path: Path, statements: str, *, sealed: bool = False) -> None:
    """Tamper with a journal; `sealed` updates the checksums, as a faulty writer would."""
    database = open_database(path / "journal.db")
    for statement in statements.split(";"):
        assert database.execute(statement).rowcount > 0
    for table in CHECKED if sealed else ():
        database.execute(f"UPDATE {table} SET row_check = {expression(table)}")
    database.close()


def test_a_good_run_balances(tmp_path: Path) -> None:
    found = look(make_run(tmp_path))
    assert found.faults == []
    task = found.tasks["train"]
    assert task.trained == 20
    assert task.dropped == {"failed": 1, "filtered": 1}
    assert task.drawn == 20 + 2 + task.buffered + task.in_flight
    assert found.max_staleness_trained == 1
    assert task.length_drawn is not None


def test_json_has_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path)
    assert audit_run(RunFolder(tmp_path), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["balanced"] is True
    assert found["dropped"] == {"failed": 1, "filtered": 1}
    assert (found["trained"], found["max_staleness_allowed"]) == (20, 1)
    accounted = found["trained"] + found["buffered"] + found["in_flight"] + 2
    assert found["drawn"] == accounted


def test_the_table_says_that_it_balances(tmp_path: Path) -> None:
    make_run(tmp_path)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    assert audit_run(RunFolder(tmp_path), console=console) == 0
    text = console.export_text()
    assert "balanced" in text
    assert "failed 1, filtered 1" in text


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("DELETE FROM group_rows WHERE group_id = 'train:3'", "does not balance"),
        ("UPDATE group_rows SET drop_reason = NULL WHERE place = 'dropped'", "without a reason"),
        ("UPDATE group_rows SET status = 'aborted' WHERE step = 2", "is not completed"),
        ("UPDATE group_rows SET landed_at = NULL WHERE step = 2", "never landed"),
        ("DELETE FROM rollout_rows WHERE group_id = 'train:0'", "it has 0 rollouts with 0 tokens"),
        (
            "UPDATE step_rows SET group_ids = (SELECT group_ids FROM step_rows WHERE step = 1) WHERE step = 2",
            "trained 2 times",
        ),
        (
            "UPDATE group_rows SET position = 9 - position WHERE step = 3",
            "differs from what its groups record",
        ),
        ("DELETE FROM step_rows WHERE step = 2", "step 2: missing"),
        ("UPDATE weight_rows SET digest = 'torn' WHERE version = 3", "weights 3: "),
        ("UPDATE rollout_rows SET oldest_version = -3 WHERE group_id = 'train:0'", "of staleness"),
        (
            "UPDATE group_rows SET reward = reward + 0.5 WHERE group_id = 'train:0'",
            "group train:0: its reward is ",
        ),
        # one rollout of a trained group is gone
        ("DELETE FROM rollout_rows WHERE rollout_id = 'train:0.1'", "but 2 with "),
        (
            "DELETE FROM rollout_rows WHERE rollout_id = 'train:0.1'; UPDATE group_rows SET num_rollouts"
            " = 1, num_tokens = (SELECT num_tokens FROM rollout_rows WHERE rollout_id = 'train:0.0')"
            " WHERE group_id = 'train:0'",
            "group train:0: the journal's rollouts are not those that the trainer trained in step 1",
        ),
        # a buffered group has no rollouts
        (
            "DELETE FROM rollout_rows WHERE group_id ="
            " (SELECT group_id FROM group_rows WHERE place = 'buffered' LIMIT 1)",
            "it has 0 rollouts with 0 tokens, but 2 with",
        ),
        # a committed step has no batch
        (
            "UPDATE step_rows SET group_ids = NULL WHERE step = 5; UPDATE group_rows SET place = 'dropped',"
            " drop_reason = 'failed', step = NULL WHERE step = 5",
            "step 5: it was committed without a batch",
        ),
        # half a batch is dropped
        (
            "UPDATE group_rows SET place = 'dropped', drop_reason = 'failed', step = NULL, position = NULL"
            " WHERE step = 5 AND position >= 2; UPDATE step_rows SET group_ids ="
            " (SELECT json_group_array(group_id) FROM (SELECT group_id FROM group_rows WHERE step = 5"
            " ORDER BY position)) WHERE step = 5",
            "step 5: the trainer trained train:",
        ),
        # the same, with the trainer's record adjusted
        (
            "UPDATE group_rows SET place = 'dropped', drop_reason = 'failed', step = NULL, position = NULL"
            " WHERE step = 4 AND position >= 2; UPDATE step_rows SET trained ="
            " json_array(trained -> 0, trained -> 1), group_ids ="
            " json_array(group_ids ->> 0, group_ids ->> 1) WHERE step = 4",
            "step 4: its record, or the one before it, is not what was committed",
        ),
        # one prompt stands under every cursor
        (
            "UPDATE group_rows SET prompt_id = 'data:0'",
            "task train: cursors 0 and 1 draw different prompts, both got data:0",
        ),
        # the prompt of a later epoch is another
        (
            "UPDATE group_rows SET prompt_id = 'data:10' WHERE cursor = 9",
            "draw one prompt, got data:",
        ),
        # the events of a trained group are deleted
        (
            "DELETE FROM event_rows WHERE group_id = 'train:0'",
            "group train:0: was taken, but its landing",
        ),
        ("DELETE FROM event_rows WHERE group_id = 'train:0'", " events of groups are missing"),
        (
            "DELETE FROM event_rows WHERE number > 10",
            "events were there when it was committed, now 10",
        ),
        (
            "DELETE FROM weight_rows WHERE version = 2 AND kind = 'confirmed'",
            "1 of 12 records of weights",
        ),
        ("DELETE FROM group_rows WHERE group_id = 'train:0'", "train:0: its draw is missing"),
    ],
)
def test_every_damage_is_found(tmp_path: Path, damage: str, fault: str) -> None:
    make_run(tmp_path)
    change(tmp_path, damage, sealed=True)
    found = look(tmp_path)
    assert any(fault in line for line in found.faults), found.faults
    assert audit_run(RunFolder(tmp_path), console=Console(quiet=True)) == 1


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("in_flight", "group train:3: in flight since step 1, for 16 steps of task"),
        (
            "buffered",
            "group train:3: waiting to be generated again since step 1, for 16 steps of task",
        ),
    ],
)
def test_a_group_that_waits_for_ever_is_found(tmp_path: Path, place: str, fault: str) -> None:
    """Group train:3 was refused in the first step; the forger puts it back."""
    make_run(tmp_path, steps=16)
    assert look(tmp_path).faults == []
    change(
        tmp_path,
        f"UPDATE group_rows SET place = '{place}', status = 'aborted', drop_reason = NULL"
        " WHERE group_id = 'train:3'",
        sealed=True,
    )
    assert f"{fault} train, allowed: 10" in look(tmp_path).faults[0]
    assert audit_run(RunFolder(tmp_path), console=Console(quiet=True)) == 1


def test_a_clock_that_is_put_back_is_no_fault(tmp_path: Path) -> None:
    """The clock was an hour fast until step 3: groups that were drawn since then look younger."""
    make_run(tmp_path, steps=16)
    change(
        tmp_path,
        "UPDATE group_rows SET place = 'in_flight', status = 'init', drop_reason = NULL"
        " WHERE group_id = (SELECT MAX(group_id) FROM group_rows WHERE cursor ="
        " (SELECT MAX(cursor) FROM group_rows)); UPDATE step_rows SET committed_at = committed_at + 3600,"
        " begun_at = begun_at + 3600 WHERE step > 3",
        sealed=True,
    )
    faults = look(tmp_path).faults
    assert not any("in flight since" in line for line in faults), faults


def test_a_buffered_group_that_should_have_expired_is_found(tmp_path: Path) -> None:
    make_run(tmp_path, steps=8)
    change(
        tmp_path,
        "UPDATE group_rows SET place = 'buffered', status = 'completed', drop_reason = NULL"
        " WHERE group_id = 'train:3'",
        sealed=True,
    )
    assert (
        "group train:3: buffered for step 8 with tokens of version 0, allowed: at most 1 updates behind"
        in look(tmp_path).faults
    )


class LiveJournal(Journal):
    """The journal of a run that trains another step whenever a query was answered."""

    def __init__(self, path: Path) -> None:
        self.writing = Journal.open(path, threaded=False)
        self.sampler = Sampler(make_prompts(9), task_name="train", prompt_repeat_k=2, seed=0)
        self.step = self.writing.last_committed_step()
        self.cursor = self.writing.cursors()["train"]
        super().__init__(path, readonly=True)

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        found = super().query(sql, parameters)
        asyncio.run(self._train_on())
        return found

    async def _train_on(self) -> None:
        self.step += 1
        group = self.sampler.group_at(self.cursor)
        self.cursor += 1
        for rollout in group.rollouts:
            finish_rollout(rollout, version=self.step - 1)
        self.writing.drawn(group)
        await self.writing.landed(group)
        await self.writing.begin_step(self.step, [group])
        await self.writing.commit_step(report_of(Batch(step=self.step, groups=(group,))))
        self.writing.record_published(self.step, f"digest-{self.step}")
        self.writing.record_confirmed("engine", self.step, f"digest-{self.step}")


def test_a_live_run_is_seen_at_one_moment(tmp_path: Path) -> None:
    make_run(tmp_path)
    journal = LiveJournal(tmp_path / "journal.db")
    found = audit_journal(journal, [EraBounds(None, {"train": 1}, {"train": 10})])
    assert journal.step > 10
    assert found.faults == []
    assert found.committed_steps == 5
    journal.close()
    journal.writing.close()


def test_steps_without_a_record_by_the_trainer_are_told(tmp_path: Path) -> None:
    make_run(tmp_path)
    change(tmp_path, "UPDATE step_rows SET trained = NULL, chain = NULL", sealed=True)
    found = look(tmp_path)
    assert found.balanced
    assert found.warnings[0].startswith("5 of steps 1 to 5 have no record by the trainer")


def test_a_device_whose_bits_do_not_repeat_is_named(tmp_path: Path) -> None:
    make_run(tmp_path)
    facts = {"device": "NVIDIA H200", "libraries": {}, "doubt": "kernels add in varying order"}
    journal = Journal.open(tmp_path / "journal.db", threaded=False)
    journal.record_identity({"arithmetic": json.dumps(facts)})
    journal.close()
    found = look(tmp_path)
    assert found.balanced
    assert found.warnings[0] == (
        "the steps' bits may not repeat on NVIDIA H200: kernels add in varying order"
    )


def test_a_run_on_a_cpu_is_recorded_as_one_whose_bits_repeat(quiet: RunFolder) -> None:
    journal = Journal.open(quiet.journal, readonly=True)
    (arithmetic,) = journal.arithmetic_since(1)
    journal.close()
    assert (arithmetic.device, arithmetic.doubt) == ("cpu", "")
    assert arithmetic.libraries["torch"]
    assert take_audit(quiet).warnings == []


def test_engines_of_others_are_named_in_the_audit_and_at_the_start(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "config.toml").write_text('[engine]\nname = "openai"\n')
    line = "engine openai: the same run again may sample other responses"
    assert any(line in warning for warning in take_audit(RunFolder(tmp_path)).warnings)
    assert any(line in doubt for doubt in doubts(RunFolder(tmp_path).config()))


def test_a_bound_that_was_not_kept_is_found(tmp_path: Path) -> None:
    found = look(make_run(tmp_path), allowed=0)
    assert found.faults[0] == "task train: step 2 trained a sample of staleness 1, allowed: 0"


def test_each_step_is_held_to_the_bound_of_its_own_time(tmp_path: Path) -> None:
    """Steps 2 to 5 are of staleness 1; a batch may have been taken just before the settings changed."""
    make_run(tmp_path)
    (tmp_path / "configs").mkdir()

    def faults(first_bound: int, until: int, then: int) -> list[str]:
        for old in (tmp_path / "configs").iterdir():
            old.unlink()
        text = "[produce]\nmax_staleness = {}\n"
        (tmp_path / "configs" / f"until-step-{until}.toml").write_text(text.format(first_bound))
        (tmp_path / "config.toml").write_text(text.format(then))
        console = Console(record=True, width=120, file=io.StringIO())
        audit_run(RunFolder(tmp_path), console=console)
        return [line for line in console.export_text().splitlines() if "FAULT" in line]

    assert faults(1, 4, 0) == []
    assert [line.split()[3:5] for line in faults(1, 2, 0)] == [["step", "4"], ["step", "5"]]
    assert [line.split()[3:5] for line in faults(0, 2, 1)] == [["step", "2"]]


def test_a_bias_in_length_is_a_warning(tmp_path: Path) -> None:
    make_run(tmp_path)
    change(tmp_path, "UPDATE event_rows SET num_tokens = num_tokens * 4", sealed=True)
    found = look(tmp_path)
    assert found.balanced
    found.tasks["train"].trained = 60
    from penstock.inspection.audit import _bias

    assert "shorter" in next(_bias("train", found.tasks["train"]))
