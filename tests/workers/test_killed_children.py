"""Processes of rewards and agents that are killed during a run cost no group and change no weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from penstock.reward import math_answer
from penstock.rollout.agent.function import INSIDE
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from stages.chat_policy import TEMPLATE, save_chat_policy
from stages.disturbed_run import assert_balanced, config_of, digests, run

pytestmark = pytest.mark.usefixtures("warm_workers")

COMPARED = """
import itertools
from penstock.reward.math_answer import MathPool
from penstock.reward.protocol import Reward
from penstock.types import Score
from stages.rewards import odd_reward

class Compared(Reward):
    def __init__(self, **options):
        self._pool, self._numbers = MathPool(2, 60.0), itertools.count()

    async def score(self, rollout, prompt):
        number = next(self._numbers)  # no comparison is known already
        comparison = await self._pool.compare(f"x+{number}", f"{number}+x")
        if not comparison.equal:
            raise RuntimeError(comparison.note)
        return Score(odd_reward(rollout, prompt))

    async def close(self):
        await self._pool.close()
"""
AGENT = """
def rollout(task, model):
    said = model.chat(task.messages)
    call = {"id": "count", "function": {"name": "count", "arguments": {"text": said["content"]}}}
    return float(model.tool(call, count)) % 3

def count(text):
    return len(text)
"""


def kill_children(words: str) -> int:
    """Kill the processes that this one started with these words in their command; return how many."""
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
        if parent == os.getpid() and words in command:
            os.kill(int(process.name), signal.SIGKILL)
            killed += 1
    return killed


@pytest.mark.slow
def test_killed_processes_of_a_reward_leave_no_trace_in_the_weights(
    quiet: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "compared.py").write_text(COMPARED)
    killed: list[int] = []

    async def disturb(job: Job, step: int) -> None:
        if step:
            killed.append(kill_children(math_answer.__name__))

    rewards = f"tasks.train.rewards=[{{type='{tmp_path / 'compared.py'}:Compared'}}]"
    folder, _ = run(config_of(tmp_path, "rewards", "produce.strategy=sync", rewards), disturb)
    assert sum(killed) > 0
    assert digests(folder) == digests(quiet)
    assert_balanced(folder)


@pytest.mark.slow
def test_killed_processes_of_agents_cost_no_group(tmp_path: Path) -> None:
    save_chat_policy(tmp_path / "policy", TEMPLATE)
    (tmp_path / "agent.py").write_text(AGENT)
    killed: list[int] = []

    async def disturb(job: Job, step: int) -> None:
        if step:
            killed.append(kill_children(str(INSIDE)))

    config = config_of(
        tmp_path,
        "agents",
        f"model.path={tmp_path / 'policy'}",
        f"tasks.train.agent={tmp_path / 'agent.py'}:rollout",
        "tasks.train.agent_options={processes=3, timeout_s=60}",
        "tasks.train.max_prompt_tokens=300",
        "sampling.max_tokens=60",
        f"sampling.stop={json.dumps(list('abcdefghijklmnopqrst'))}",
        "produce.max_tries=9",
        "sync.on_update=abort",
    )
    folder, _ = run(config, disturb)
    assert sum(killed) > 0
    assert_balanced(folder)
