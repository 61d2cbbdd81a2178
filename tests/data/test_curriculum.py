"""The difficulty sampler: what it draws, and that a resumed run draws the same."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import TaskConfig
from penstock.data.sampler import DifficultySampler
from penstock.errors import PromptsRetired
from penstock.store.journal import Journal
from penstock.types import Group, Status, StepReport
from stages.rollouts import finish_rollout, make_prompts

GROUPS = 3  # of one step
Rate = Callable[[Group], float]


class Run:
    """A run of a sampler and a journal alone: every drawn group gets the reward that `rate` says."""

    def __init__(self, path: Path, rate: Rate, *, size: int = 12, retire_solved: int = 0) -> None:
        self.journal = Journal.open(path / "journal.db", threaded=False)
        self._rate, self._size, self._retire_solved = rate, size, retire_solved
        self.step = 0
        self.sampler = self._new_sampler()
        self.open: list[Group] = []  # drawn for the next step

    def _new_sampler(self) -> DifficultySampler:
        return DifficultySampler(
            make_prompts(self._size),
            task_name="t",
            prompt_repeat_k=2,
            seed=1,
            apart=GROUPS,
            retire_solved=self._retire_solved,
        )

    def draw(self) -> None:
        group = self.sampler.sample("t")
        self.journal.drawn(group)
        self.open.append(group)

    def resume(self) -> None:
        """Forget the sampler; a new one reads the journal."""
        self.sampler = self._new_sampler()
        self.sampler.learn(self.journal, self.step)
        self.sampler.restore(self.journal, self.journal.cursors().get("t", 0))

    def end_step(self, order: random.Random) -> None:
        """Land the groups of the step in any order, refuse some of them, and commit the step."""
        asyncio.run(self._end_step(order))
        self.sampler.learn(self.journal, self.step)

    async def _end_step(self, order: random.Random) -> None:
        groups, self.open = self.open, []
        for group in order.sample(groups, len(groups)):
            for rollout in group.rollouts:
                finish_rollout(rollout, version=self.step, reward=self._rate(group))
            if group.cursor % 4 == 3:
                group.move_to(Status.FILTERED)
                await self.journal.filtered(group)
            else:
                await self.journal.landed(group)
        self.step += 1
        trained = [group for group in groups if group.status is Status.COMPLETED]
        await self.journal.begin_step(self.step, trained)
        await self.journal.commit_step(
            StepReport(step=self.step, policy_version=self.step, digest=f"d{self.step}")
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(GROUPS):
                self.draw()
            self.end_step(random.Random(0))

    def prompts(self) -> list[str]:
        return [
            row[0] for row in self.journal.query("SELECT prompt_id FROM groups ORDER BY cursor")
        ]


def uneven(group: Group) -> float:
    """A third of the prompts is solved, a third hopeless, a third in between."""
    return (0.0, 0.5, 1.0)[int(group.prompt.prompt_id.partition(":")[2]) % 3]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(kills=st.sets(st.integers(0, 23), max_size=6), order=st.integers(0, 99))
def test_kills_and_the_order_of_landing_change_no_draw(kills: set[int], order: int) -> None:
    drawn = []
    for killed_after, seed in ((frozenset[int](), 0), (kills, order)):
        with tempfile.TemporaryDirectory() as folder:
            run, landings = Run(Path(folder), uneven), random.Random(seed)
            for number in range(24):
                run.draw()
                if number in killed_after:
                    run.resume()
                if number % GROUPS == GROUPS - 1:
                    run.end_step(landings)
            drawn.append(run.prompts())
            run.journal.close()
    assert drawn[0] == drawn[1]


def test_prompts_between_solved_and_hopeless_are_drawn_most_and_the_others_still(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, uneven, size=30)
    run.train(steps=100)
    kinds = Counter(int(prompt.partition(":")[2]) % 3 for prompt in run.prompts()[60:])
    assert kinds[1] > 2 * kinds[0]
    assert kinds[1] > 2 * kinds[2]
    assert min(kinds.values()) > 10
    counts = run.sampler.counts()
    assert counts == {"prompts": 30, "solved": 10, "hopeless": 10, "useful": 10, "retired": 0}


def test_a_prompt_is_not_drawn_twice_in_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path, uneven, size=7)
    run.train(steps=20)
    drawn = run.prompts()
    assert all(len(set(drawn[at : at + GROUPS])) == GROUPS for at in range(0, 60, GROUPS))


def test_solved_prompts_retire_until_none_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path, lambda group: 1.0, size=4, retire_solved=2)
    with pytest.raises(PromptsRetired, match=r"task t: all 4 prompts are solved \(retire_solved"):
        run.train(steps=20)
    assert max(Counter(run.prompts()).values()) < 2 + GROUPS
    assert run.sampler.counts()["retired"] == 4
    run.resume()
    assert run.sampler.why_exhausted


def test_a_draw_of_many_prompts_compares_some_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path, uneven, size=5000)
    for _ in range(8):
        run.draw()
    assert len(set(run.prompts())) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"retire_solved": 2}, "got retire_solved 2 with sampler 'shuffle'"),
        ({"sampler": "difficulty", "agent": "demonstration"}, "have no pass rate"),
        ({"sampler": "hard"}, "'shuffle' or 'difficulty'"),
    ],
)
def test_wrong_settings_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskConfig(**fields)
