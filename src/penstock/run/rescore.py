"""Other rewards for a fork: scores recorded rollouts again, without sampling.

A task whose `rewards` the fork's settings name is scored by them. A task whose `agent` they name is
played again by it: its requests are answered from the recorded tree of calls, its tools from the
recorded results. The scores are written to a file of the fork before it trains.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from penstock.config import Config, EvalConfig
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import EngineError, RewardError, UserError
from penstock.files import write_whole
from penstock.reward import VerifiableReward
from penstock.rollout.agent import AgentLoop
from penstock.rollout.agent.build import check_agent, loop_class
from penstock.rollout.agent.function import InterruptedCalls
from penstock.rollout.agent.session import KeptCalls
from penstock.run.job import open_agent, open_reward, serve_agents
from penstock.run.run_data import RunData
from penstock.store.journal import Journal
from penstock.types import Group, Rollout, Score, Status

FILE = "rescored.jsonl"
_AT_ONCE = 64  # groups


@dataclass(slots=True, frozen=True, kw_only=True)
class NewScore:
    """What the fork trains a rollout with, in place of what was recorded; a line of the fork's file."""

    rollout_id: str
    score: Score | None  # None: it could not be scored, its group is left out
    earned: tuple[tuple[int, float], ...] = ()
    error: str = ""


NewScores = dict[str, NewScore]  # by rollout
_LINE = TypeAdapter(NewScore)


def scored_again(overrides: Sequence[str]) -> dict[str, str]:
    """The tasks that a fork's settings give other rewards: by "rewards" or by their "agent"."""
    tasks: dict[str, str] = {}
    for word in overrides:
        table, _, rest = word.partition("=")[0].partition(".")
        name, _, key = rest.partition(".")
        if table == "tasks" and (key == "agent" or key.startswith("agent_options")):
            tasks[name] = "agent"
        elif table == "tasks" and key.startswith("rewards"):
            tasks.setdefault(name, "rewards")
    return tasks


async def score_groups(
    config: Config, journal: Journal, groups: Iterable[Group], tasks: dict[str, str]
) -> NewScores:
    """Score the recorded rollouts of these tasks as the fork's config says."""
    for name, how in tasks.items():
        where, task = f"tasks.{name}", config.tasks[name]
        check_agent(where, task, config.task_sampling(name))
        if how == "agent" and loop_class(where, task) is not None:
            raise UserError(
                f"{where}.agent: got {task.agent!r} for a fork, allowed: an agent whose model calls are "
                f"recorded (a function, tools, gym, command); {where}.rewards scores recorded answers"
            )
    config = config.model_copy(update={"eval": EvalConfig()})
    scores: NewScores = {}
    async with AsyncExitStack() as closing:
        data = await RunData.read(config)
        rewards: dict[str, VerifiableReward] = {}
        for name in tasks:
            sampling, is_chat = config.task_sampling(name), data.train[name].is_chat
            rewards[name] = open_reward(config.tasks[name], sampling, is_chat, closing)
        played = [name for name, how in tasks.items() if how == "agent"]
        endpoint = await serve_agents([config.tasks[name] for name in played], closing)

        async def score(group: Group) -> None:
            if group.task not in played:
                scores.update(_by_rollout(await _score(rewards[group.task], group)))
                return
            async with AsyncExitStack() as ending:
                agent = open_agent(
                    config,
                    group.task,
                    config.task_sampling(group.task),
                    data,
                    ending,
                    engine=_NoEngine(),
                    reward=rewards[group.task],
                    recorder=KeptCalls(),
                    endpoint=endpoint,
                    interrupted=InterruptedCalls(
                        calls=journal.calls(group.group_id), tools=journal.tools(group.group_id)
                    ),
                )
                scores.update(_by_rollout(await _play(agent, group)))

        for some in _chunks(group for group in groups if group.task in tasks):
            await asyncio.gather(*map(score, some))
    return scores


def _by_rollout(scores: Iterable[NewScore]) -> NewScores:
    return {score.rollout_id: score for score in scores}


def _chunks(groups: Iterable[Group]) -> Iterator[list[Group]]:
    some: list[Group] = []
    for group in groups:
        some.append(group)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


async def _score(reward: VerifiableReward, group: Group) -> list[NewScore]:
    """Score the recorded answers of a group."""
    rollouts = group.rollouts
    try:
        scores = await reward.score_group(rollouts, [group.prompt] * len(rollouts))
    except RewardError as error:
        return [NewScore(rollout_id=r.rollout_id, score=None, error=str(error)) for r in rollouts]
    return [
        NewScore(rollout_id=rollout.rollout_id, score=score)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


async def _play(agent: AgentLoop, group: Group) -> list[NewScore]:
    """Let the agent play the recorded rollouts of a group again."""
    again = [
        Rollout(
            rollout_id=rollout.rollout_id,
            prompt_ids=rollout.prompt_ids,
            seed=rollout.seed,
            prompt=group.prompt,
            issued_version=rollout.issued_version,
            extra=dict(rollout.extra),
        )
        for rollout in group.rollouts
    ]
    await agent.generate_group(again)
    return [
        NewScore(rollout_id=rollout.rollout_id, score=rollout.score, earned=rollout.earned)
        if rollout.status is Status.COMPLETED
        else NewScore(rollout_id=rollout.rollout_id, score=None, error=rollout.error)
        for rollout in again
    ]


class _NoEngine:
    """Stands for the engines of a fork."""

    async def generate(self, request: GenerationRequest) -> Generation:
        raise EngineError("the agent asks for a model call that was not recorded")

    async def abort(self, request_id: str) -> None: ...


def with_scores(group: Group, scores: NewScores) -> Group | None:
    """Give a recorded group its new scores; None if one of its rollouts could not be scored."""
    for rollout in group.rollouts:
        new = scores.get(rollout.rollout_id)
        if new is None:
            continue
        if new.score is None:
            return None
        rollout.score, rollout.earned = new.score, new.earned
    return group


def describe(scores: NewScores) -> list[str]:
    """Say how many rollouts were scored again, and why some were not: their groups are left out."""
    if not scores:
        return []
    reasons = Counter(new.error for new in scores.values() if new.score is None)
    lines = [f"{len(scores) - reasons.total()} recorded rollouts scored again"]
    for reason, number in reasons.most_common(3):
        lines.append(f"{number} rollouts could not be scored: {reason}")
    return lines


def write_scores(folder: Path, scores: NewScores) -> None:
    lines = [json.dumps(asdict(score)) + "\n" for score in scores.values()]
    write_whole(folder / FILE, "".join(lines))


def read_scores(folder: Path) -> NewScores:
    """The scores of a fork; none if it trains with those that were recorded."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    return _by_rollout(map(_LINE.validate_json, lines))
