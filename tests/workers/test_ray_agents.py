"""An agent loop of the user's own in Ray actors: `penstock train` with `tasks.NAME.agent_actors`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.run.job import Job
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.command_runs import train
from stages.disturbed_run import assert_balanced, config_of, digests, kill, run
from stages.judging_engine import JUDGING_ENGINE
from stages.ray_nodes import Nodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
LOOP = '''
import os
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout import AgentLoop


class Mine(AgentLoop):
    """Lets the plain loop answer, and says in which process it did."""

    def __init__(self, **parts):
        self._plain = SingleTurn(**parts)

    async def generate(self, rollout, *, enable_partial_rollout=False):
        rollout = await self._plain.generate(rollout)
        rollout.extra["pid"] = os.getpid()
        return rollout
'''


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    nodes = Nodes(4)
    yield nodes
    nodes.close()


@pytest.fixture
def agent(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(LOOP)
    return f"tasks.train.agent={file}:Mine"


def processes(folder: RunFolder) -> set[int]:
    """Return the processes that the trained rollouts were made in."""
    journal = Journal.open(folder.journal, readonly=True)
    try:
        steps = range(1, len(journal.steps()) + 1)
        return {one.extra["pid"] for step in steps for one in journal.batch(step).rollouts}
    finally:
        journal.close()


def test_two_actors_make_the_rollouts_of_a_run(cluster: Nodes, agent: str, tmp_path: Path) -> None:
    """They give the bits that a loop in the driver gives."""
    here = train(tmp_path, "here", agent, "produce.strategy=sync")
    words = ["launch.kind=ray", "launch.num_producers=1", "tasks.train.agent_actors=2"]
    there = train(tmp_path, "there", agent, "produce.strategy=sync", *words)
    assert (here.code, there.code) == (0, 0), there.told
    assert processes(here.folder) == {os.getpid()}
    made_by = processes(there.folder)
    assert len(made_by) == 2
    assert os.getpid() not in made_by
    assert digests(there.folder) == digests(here.folder)


def test_an_actor_that_dies_is_started_again(cluster: Nodes, agent: str, tmp_path: Path) -> None:
    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            kill(job, "agent-train-0")

    words = ["launch.kind=ray", "launch.num_producers=1", "tasks.train.agent_actors=1"]
    folder, notes = run(config_of(tmp_path, "killed", agent, *words), disturb)
    assert_balanced(folder)
    assert len(processes(folder)) == 2
    text = "\n".join(notes)
    assert "agent-train-0: the actor ended unexpectedly" in text
    assert "agent-train-0: serves again" in text


def test_a_loop_that_cannot_be_made_is_one_line(cluster: Nodes, agent: str, tmp_path: Path) -> None:
    words = ["launch.kind=ray", "tasks.train.agent_actors=1", "tasks.train.agent_options={no=1}"]
    done = train(tmp_path, "wrong", agent, *words)
    assert done.code == 1
    assert "agent-train-0: TypeError: " in done.told
    assert "unexpected keyword argument 'no'" in done.told


def test_rewards_in_an_actor_can_ask_the_policy(cluster: Nodes, tmp_path: Path) -> None:
    """A judge that is the policy itself, whose requests go the way of the agent's own."""
    options = "model='policy', rubric='Longer is better.', mode='rank', max_tokens=16"
    judged = train(
        tmp_path,
        "judged",
        f"engine.name={JUDGING_ENGINE}",
        f"tasks.train.rewards=[{{type='judge', options={{{options}}}}}]",
        "train.steps=1",
        "produce.max_tries=1",
        "launch.kind=ray",
        "launch.num_producers=1",
        "tasks.train.agent_actors=1",
    )
    assert judged.code == 0, judged.told
    with judged.journal() as journal:
        rollouts = journal.batch(1).rollouts
    assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
    assert all("I counted." in rollout.score.note for rollout in rollouts if rollout.score)
