"""Every move says from where: a record that contradicts the journal is a fault when it is written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.data.sampler import Sampler
from penstock.errors import JournalDamaged, RunError
from penstock.store.journal import Journal
from penstock.types import Batch, Group, Status, StepReport
from stages.rollouts import finish_rollout, make_prompts

SAMPLER = Sampler(make_prompts(9), task_name="t", prompt_repeat_k=2, seed=0)


def finished(cursor: int) -> Group:
    group = SAMPLER.group_at(cursor)
    for rollout in group.rollouts:
        finish_rollout(rollout)
    return group


def report(batch: Batch, version: int | None = None) -> StepReport:
    step = batch.step
    trained = batch.fingerprints()
    return StepReport(step=step, policy_version=version or step, digest=f"d{step}", trained=trained)


class Story:
    """A journal in which step 1 is committed, and a group waits in every place."""

    def __init__(self, path: Path) -> None:
        self.path = path / "journal.db"
        self.journal = Journal.open(self.path, threaded=False)
        self.trained, self.buffered, self.aborted, self.in_flight, self.dropped, self.new = map(
            finished, range(6)
        )
        self.batch = Batch(step=1, groups=(self.trained,))

    async def begin(self) -> None:
        journal = self.journal
        self.aborted.rollouts[0].status = Status.ABORTED
        for group in (self.trained, self.buffered, self.aborted, self.in_flight, self.dropped):
            journal.drawn(group)
        for group in (self.trained, self.buffered, self.aborted):
            await journal.landed(group)
        journal.dropped(self.dropped, "failed")
        await journal.begin_step(1, [self.trained])
        await journal.commit_step(report(self.batch))

    async def move(self, name: str, place: str) -> None:
        """Make the move `name` with the group that is at `place`."""
        group: Group = getattr(self, place)
        made = getattr(self.journal, name)(group, *self._words(name))
        if made is not None:
            await made
        await self.journal.flush()

    @staticmethod
    def _words(name: str) -> tuple[str, ...]:
        return ("why",) if name in ("retried", "dropped") else ()

    async def take(self, group: Group) -> None:
        await self.journal.begin_step(2, [group])

    def outcome(self, action: Callable[[], Awaitable[None]]) -> str:
        async def run() -> None:
            await self.begin()
            await action()

        try:
            asyncio.run(run())
        except RunError as error:
            return str(error)
        finally:
            self.journal._reader.close()
        return "fine"


LEGAL = {
    "landed": {"in_flight"},
    "failed": {"in_flight"},
    "filtered": {"in_flight"},
    "retried": {"in_flight", "buffered"},
    "expired": {"in_flight", "buffered"},
    "dropped": {"in_flight", "buffered"},
}
FOUND = {
    "new": "a group that was never drawn",
    "in_flight": "in_flight",
    "buffered": "buffered",
    "trained": "taken",
    "dropped": "dropped",
}


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("place", FOUND)
def test_a_move_from_another_place_is_a_fault_that_names_both(
    tmp_path: Path, name: str, place: str
) -> None:
    story = Story(tmp_path)
    said = story.outcome(lambda: story.move(name, place))
    if place in LEGAL[name]:
        assert said == "fine"
        return
    group_id = getattr(story, place).group_id
    assert said.startswith(f"journal: group {group_id} is ")
    allowed = sorted(LEGAL[name]) if name != "retried" else ["in_flight", "buffered"]
    assert f"got {FOUND[place]}, allowed: " in said
    assert all(place in said.split("allowed: ")[1] for place in allowed)


@pytest.mark.parametrize("place", [*FOUND, "aborted"])
def test_a_step_takes_only_what_is_whole_completed_and_buffered(tmp_path: Path, place: str) -> None:
    story = Story(tmp_path)
    said = story.outcome(lambda: story.take(getattr(story, place)))
    group_id = getattr(story, place).group_id
    expected = f"journal: group {group_id} is taken: got {FOUND.get(place)}, allowed: buffered"
    if place == "aborted":
        expected = f"journal: step 2 takes {group_id}, allowed: completed groups"
    assert said.startswith("fine" if place == "buffered" else expected)


def test_a_step_does_not_take_a_group_that_lacks_a_rollout(tmp_path: Path) -> None:
    story = Story(tmp_path)

    async def lose_a_rollout_and_take() -> None:
        with sqlite3.connect(story.path) as database:
            database.execute("DELETE FROM rollout_rows WHERE rollout_id = 't:1.1'")
        await story.take(story.buffered)

    said = story.outcome(lose_a_rollout_and_take)
    assert "step 2 takes t:1, allowed: completed groups with all of their rollouts" in said


@pytest.mark.parametrize(
    ("group", "read"),
    [("t:0", lambda journal: journal.batch(1)), ("t:1", Journal.unfinished_groups)],
)
def test_a_group_that_lacks_a_rollout_is_not_read_for_training(
    tmp_path: Path, group: str, read: Callable[[Journal], object]
) -> None:
    """Neither the batch of a redone step nor a buffered group of a resumed run loses one in silence."""
    story = Story(tmp_path)
    assert story.outcome(_nothing) == "fine"
    with sqlite3.connect(story.path) as database:
        database.execute("DELETE FROM rollout_rows WHERE rollout_id = ?", (f"{group}.1",))
    with closing(Journal.open(story.path, readonly=True)) as journal:
        with pytest.raises(JournalDamaged, match=f"group {group} has 1 rollouts .* but 2 with"):
            read(journal)


def test_a_fault_among_many_landings_names_the_one_group(tmp_path: Path) -> None:
    story = Story(tmp_path)

    async def land_many() -> None:
        others = [finished(cursor) for cursor in (6, 7, 8)]
        for group in others:
            story.journal.drawn(group)
        await asyncio.gather(
            story.journal.landed(others[0]),
            story.journal.landed(story.trained),
            story.journal.landed(others[1]),
        )

    assert "group t:0 is landed: got taken" in story.outcome(land_many)


async def _nothing() -> None: ...


def steps(story: Story, *actions: str) -> str:
    """Begin and commit as told, after step 1."""
    second = Batch(step=2, groups=(story.buffered,))
    calls: dict[str, Callable[[], Awaitable[None]]] = {
        "begin 1": lambda: story.journal.begin_step(1, second.groups),
        "begin 2": lambda: story.journal.begin_step(2, second.groups),
        "begin 2 empty": lambda: story.journal.begin_step(2, []),
        "begin 3": lambda: story.journal.begin_step(3, second.groups),
        "commit 1": lambda: story.journal.commit_step(report(story.batch)),
        "commit 2": lambda: story.journal.commit_step(report(second)),
        "commit 2 as 3": lambda: story.journal.commit_step(report(second, version=3)),
        "commit 2 of others": lambda: story.journal.commit_step(
            replace(report(second), trained=story.batch.fingerprints())
        ),
        "redo 1": lambda: story.journal.redo_step(report(story.batch)),
        "redo 2": lambda: story.journal.redo_step(report(second)),
    }

    async def play() -> None:
        for action in actions:
            await calls[action]()

    return story.outcome(play)


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (["begin 2", "commit 2"], "fine"),
        (["redo 1"], "fine"),
        (["begin 1"], "step 1 begins, but the last step is 1, which is committed"),
        (["begin 2 empty"], "step 2 begins without a group"),
        (["begin 3"], "step 3 begins, but the last step is 1, which is committed"),
        (["begin 2", "begin 3"], "step 3 begins, but the last step is 2, which is not committed"),
        (["commit 2"], "step 2 is committed, but it was never begun"),
        (["commit 1"], "step 1 is committed, but it is committed already"),
        (["begin 2", "commit 2 as 3"], "step 2 is committed with weights of version 3"),
        (["begin 2", "commit 2 of others"], "the trainer trained t:0, allowed: its batch t:1"),
        (["redo 2"], "step 2 is redone, but it was never committed"),
        (["begin 2", "redo 2"], "step 2 is redone, but it was never committed"),
    ],
)
def test_steps_come_one_after_another_each_with_its_batch_and_version(
    tmp_path: Path, actions: list[str], said: str
) -> None:
    assert said in steps(Story(tmp_path), *actions)
