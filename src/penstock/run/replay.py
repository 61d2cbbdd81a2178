"""`penstock replay`: recompute a run from its journal, or train a fork on its rollouts.

The check recomputes every step and compares its digest with the journalled one. A fork is a run
folder of its own: it trains on the recorded groups in their order, generates nothing, and corrects for
the policy that sampled them. Its journal holds the groups with their calls, the steps, and the
publications of the versions that its rollouts name; `origin.json` says where the groups came from.

A task whose `rewards` the fork's settings name is scored by them again, without sampling. A task whose `agent`
they name is played again by it: its requests are answered from the recorded tree of calls, its tools from the
recorded results. The scores are written to a file of the fork before it trains.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from penstock.config import Config, EvalConfig
from penstock.config.source import as_override, with_overrides
from penstock.data.chat import ChatTemplate
from penstock.data.identity import absolute_paths, code_fact, scorer_facts
from penstock.engine.protocol import Generation, GenerationRequest
from penstock.errors import EngineError, RewardError, RunError, UserError
from penstock.files import count, write_whole
from penstock.inspection.track.logs import Notes
from penstock.reward import VerifiableReward
from penstock.rollout.agent import AgentLoop
from penstock.rollout.agent.build import check_agent, loop_class
from penstock.rollout.agent.function import InterruptedCalls
from penstock.rollout.agent.session import KeptCalls
from penstock.rollout.taught import TeacherServer, connected
from penstock.run.foundation import BatchSource, lay_foundation
from penstock.run.job import Job, join_parts, open_agent, open_reward, open_trainer, serve_agents
from penstock.run.recover import recompute
from penstock.run.run_data import RunData
from penstock.store import run_folder
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import FORK_OF, RESCORED, Origin, RunFolder
from penstock.training.algo.method import algorithm_class, check_algorithm, run_settings
from penstock.training.algo.settings import keep_group
from penstock.types import Batch, Group, Rollout, Score, Status, StepReport

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

        chosen = (group for group in groups if group.task in tasks)
        while some := list(itertools.islice(chosen, _AT_ONCE)):
            await asyncio.gather(*map(score, some))
    return scores


def _by_rollout(scores: Iterable[NewScore]) -> NewScores:
    return {score.rollout_id: score for score in scores}


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


def describe(scores: NewScores) -> list[str]:
    """Say how many rollouts were scored again, and why some were not: their groups are left out."""
    if not scores:
        return []
    reasons = Counter(new.error for new in scores.values() if new.score is None)
    lines = [f"{len(scores) - reasons.total()} recorded rollouts scored again"]
    for reason, number in reasons.most_common(3):
        lines.append(f"{number} rollouts could not be scored: {reason}")
    return lines


def read_scores(folder: RunFolder, expected: int | None) -> NewScores:
    """The scores of a fork, so many; none if it trains with those that were recorded."""
    path = folder.path / RESCORED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    try:
        scores = _by_rollout(map(_LINE.validate_json, lines))
    except ValueError:
        raise RunError(f"{path}: it is damaged; fork the run again") from None
    if expected is not None and len(scores) != expected:
        raise RunError(
            f"{path}: got the scores of {len(scores)} rollouts, allowed: all {expected} that the fork was made with; "
            "fork the run again"
        )
    return scores


CORRECTION = "token_truncate"  # of algorithms that have none of their own


async def check_run(
    folder: RunFolder, to_step: int | None, on_step: Callable[[StepReport, int], None]
) -> str:
    """Recompute the steps and compare digests; raise at the first difference, else say what is equal.

    Begins at the oldest checkpoint if the tokens of earlier steps were removed.
    """
    with closing(Journal.open(folder.journal, readonly=True)) as journal:
        last, pruned = _last_step(journal, to_step), journal.pruned_to()
        start = CheckpointStore(folder.checkpoints).oldest(pruned) if pruned else None
        first = 1 if start is None else start.step + 1
        if pruned and (start is None or first > last):
            raise UserError(
                f"replay: got step {last}, allowed: a step after the oldest good checkpoint "
                f"({'none' if start is None else f'step {start.step}'}), because the tokens of steps 1 "
                f"to {pruned} were removed (journal.keep_payloads)"
            )
        async for report in recompute(folder, journal, start, last, repair=False):
            on_step(report, last)
        said = f"{count(last - first + 1, 'step')} recomputed: every digest is the journalled one"
        if start is None:
            return said
        removed = (
            "their tokens, or those of steps before them, were removed (journal.keep_payloads)"
        )
        return f"{said}; steps 1 to {start.step} were not: {removed}"


def _last_step(journal: Journal, to_step: int | None) -> int:
    committed = journal.last_committed_step()
    if not committed:
        raise UserError(f"replay: got {journal.path} without a finished step, allowed: at least 1")
    if to_step is not None and not 1 <= to_step <= committed:
        raise UserError(f"--to: got {to_step}, allowed: 1 to {committed}")
    return to_step or committed


# -- forks -------------------------------------------------------------------------------------


def make_fork(
    parent: RunFolder, algorithm: str | None, overrides: Sequence[str], to_step: int | None
) -> RunFolder:
    """Make a run folder beside its parent, ready to be trained."""
    named = [f"algorithm.name={algorithm}"] if algorithm else []
    corrected = []
    if parent.config().algorithm.correction.kind in ("auto", "none"):
        # corrects for the policy that sampled
        changed = with_overrides(parent.config(), [*named, *overrides]).algorithm.name
        default = algorithm_class(changed).defaults.correction
        kind = CORRECTION if default == "none" else default
        corrected = [f"algorithm.correction.kind={kind}"]
    name = f"{parent.name}-{(algorithm or 'fork').split(':')[-1]}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    unused = next(n for n in names if not parent.path.with_name(n).exists())
    place = [as_override("run.dir", str(parent.path.parent)), as_override("run.name", unused)]
    words = [*corrected, *place, *named, *overrides]
    config = absolute_paths(with_overrides(parent.config(), words))
    if config.model != parent.config().model:
        raise UserError(
            "model: got other settings, allowed: the run's own, whose tokens are recorded"
        )
    with closing(Journal.open(parent.journal, readonly=True)) as journal:
        last = _last_step(journal, to_step)
        if pruned := journal.pruned_to():
            raise UserError(
                f"replay: a fork trains on all recorded groups, but the tokens of steps 1 to {pruned} "
                "were removed (journal.keep_payloads)"
            )
        again, scores = scored_again(overrides), NewScores()
        if again:
            groups = (group for group, _ in recorded_groups(journal, config, last))
            scores = asyncio.run(score_groups(config, journal, groups, again))
        kept = sum(keep for _, keep in recorded_groups(journal, config, last, scores))
        digest = journal.steps(last)[0].digest
    steps = kept // config.train.groups_per_step
    if not steps:
        lost = "".join(f"; {text}" for text in describe(scores)[1:])
        raise UserError(
            f"replay: got {kept} recorded groups that {config.algorithm.name} keeps, "
            f"allowed: at least train.groups_per_step = {config.train.groups_per_step}{lost}"
        )
    if any(word.startswith("train.steps=") for word in overrides) and config.train.steps:
        steps = min(steps, config.train.steps)
    settings = config.train.model_copy(update={"steps": steps, "episodes": None})
    # nothing is evaluated: each checkpoint would be kept until it is
    checkpoint = config.checkpoint.model_copy(update={"keep_best": ""})
    config = config.model_copy(update={"train": settings, "checkpoint": checkpoint})
    check_algorithm(config)
    origin = Origin(run=str(parent.path.resolve()), steps=last, digest=digest, rescored=len(scores))
    folder = run_folder.create(config, origin)
    if again:
        write_whole(
            folder.path / RESCORED, (json.dumps(asdict(score)) + "\n" for score in scores.values())
        )
    return folder


def recorded_groups(
    journal: Journal, config: Config, last: int, scores: NewScores | None = None
) -> Iterator[tuple[Group, bool]]:
    """Yield every trained group in training order, and whether this config's algorithm keeps it."""
    settings = {task: run_settings(config, task) for task in config.tasks}
    for step in range(1, last + 1):
        for group in journal.batch(step).groups:
            is_scored = True
            for rollout in group.rollouts:
                new = (scores or {}).get(rollout.rollout_id)
                if new is not None and new.score is None:
                    is_scored = False
                    break
                if new is not None:
                    rollout.score, rollout.earned = new.score, new.earned
            yield group, is_scored and keep_group(group.rollouts, settings[group.task])


@asynccontextmanager
async def open_fork(folder: RunFolder, notes: Notes | None = None) -> AsyncIterator[Job]:
    """Build the parts of a fork, new or resumed: a trainer, and batches of its parent's journal."""
    origin = folder.origin()
    assert origin is not None, "only a fork is trained from another journal"
    config = folder.config()
    assert config.train.steps is not None, "a fork is made with its number of steps"
    parent = RunFolder(Path(origin.run))
    if not parent.journal.is_file():
        raise UserError(f"fork of {origin.run}: got no journal there, allowed: the run it is of")
    async with AsyncExitStack() as stack:
        recorded = stack.enter_context(closing(Journal.open(parent.journal, readonly=True)))
        _check_parent(recorded, origin)
        base = lay_foundation(folder, notes or Notes(), stack)
        trainer = open_trainer(config, folder.logs, events=base.events)
        workers = await stack.enter_async_context(trainer)
        scores = read_scores(folder, origin.rescored)
        source = RecordedBatches(
            recorded,
            base.journal,
            config,
            origin.steps,
            stack,
            scores,
            _newly_taught(folder, parent),
        )
        facts = {**code_fact(config), **scorer_facts(config), FORK_OF: origin.run}
        steps = config.train.steps
        job = join_parts(config, folder, base, workers, source, steps, stack, facts=facts)
        job.findings.start(base.journal.last_committed_step(), job.facts)
        job.tracker.note(f"fork of {parent.path}, steps 1 to {origin.steps}; nothing is generated")
        for text in describe(scores):
            job.tracker.note(text)
        yield job


def _check_parent(recorded: Journal, origin: Origin) -> None:
    """Raise if the journal is not the one that was forked. A step that was redone on a GPU may have two digests."""
    sql = (
        "SELECT step FROM steps WHERE (step, digest) = (?1, ?2) "
        "UNION SELECT version FROM weights WHERE (version, digest) = (?1, ?2)"
    )
    if not recorded.query(sql, (origin.steps, origin.digest)):
        raise RunError(
            f"fork of {origin.run}: got another run there than the one that was forked, allowed: that one; fork again"
        )


def _newly_taught(folder: RunFolder, parent: RunFolder) -> set[str]:
    """The tasks whose teacher is behind another server than in the run of which this is a fork."""

    def servers(config: Config) -> dict[str, tuple[str, str]]:
        found = {}
        for task in filter(config.asks_server, config.tasks):
            teacher = config.teachers[config.task_algorithm(task).teacher or ""]
            found[task] = teacher.base_url, teacher.model
        return found

    return {task for task, _ in servers(folder.config()).items() - servers(parent.config()).items()}


class RecordedBatches(BatchSource):
    """Recorded groups of another run, in the order they were trained."""

    def __init__(
        self,
        recorded: Journal,
        journal: Journal,
        config: Config,
        last: int,
        closing: AsyncExitStack,
        scores: NewScores | None = None,
        newly_taught: Container[str] = (),
    ) -> None:
        """`last`: the parent's last step that is used; `scores`: in place of those recorded.

        `newly_taught`: tasks whose teacher has to be asked even if the log-probs of another one are recorded.
        """
        self._config, self._closing = config, closing
        self._newly_taught = newly_taught
        self._teachers: dict[str, TeacherServer] = {}  # of the tasks that asked theirs
        self._recorded, self._journal = recorded, journal
        self._size = config.train.groups_per_step
        self._groups = recorded_groups(recorded, config, last, scores)
        self._known: dict[str, str] = {}  # groups of an earlier part of the fork, and their state
        self._landed: dict[str, Group] = {}  # those of them that no step has taken
        self._resumed: Batch | None = None

    async def restore(self, journal: Journal) -> None:
        """Continue after the fork's last step, with the parent's weights records that are not copied yet."""
        sql = "SELECT kind, engine, version, digest FROM weight_rows ORDER BY number"
        ((copied,),) = journal.query("SELECT COUNT(*) FROM weights WHERE kind != 'redone'")
        for kind, engine, version, digest in self._recorded.query(sql)[copied:]:
            if kind == "published":
                journal.record_published(version, digest)
            else:
                journal.record_confirmed(engine, version, digest)
        pending = journal.pending_step()
        self._resumed = None if pending is None else journal.batch(pending)
        self._known = dict(journal.query("SELECT group_id, state FROM groups"))
        self._landed = {group.group_id: group for group in journal.unfinished_groups().buffered}

    async def run(self) -> None:
        """Generate nothing; wait for the end of the run."""
        await asyncio.get_running_loop().create_future()

    async def take_batch(self, step: int) -> Batch:
        """Take the next groups that the fork's algorithm keeps, and journal their draw and landing."""
        if self._resumed is not None:
            batch, self._resumed = self._resumed, None
            return batch
        groups: list[Group] = []
        while len(groups) < self._size:
            group, keep = next(self._groups)  # a fork has no more steps than its groups fill
            group = self._landed.pop(group.group_id, group)
            if await self._journal_group(group, keep):
                groups.append(group)
        await self._journal.begin_step(step, groups)
        return Batch(step=step, groups=tuple(groups))

    async def _teach(self, group: Group) -> None:
        """Ask a teacher behind a server for the log-probs that the parent has not recorded."""
        task, config = group.task, self._config
        asks = task in self._newly_taught
        lacking = [
            rollout for rollout in group.rollouts if asks or rollout.teacher_logprobs is None
        ]
        if not lacking or not config.asks_server(task):
            return
        if task not in self._teachers:
            chat = ChatTemplate.from_config(config.model)
            self._teachers[task] = await connected(
                config, task, [group.prompt], chat, self._closing
            )
        await asyncio.gather(*map(self._teachers[task].teach, lacking))

    async def _journal_group(self, group: Group, keep: bool) -> bool:
        """Bring a group into the fork's journal; return whether it is trained now."""
        state = self._known.get(group.group_id)
        if state in ("taken", "trained", "dropped"):
            return False
        if state is None:
            self._journal.drawn(group)
        # those of its agent that are not there yet
        calls = self._recorded.calls(group.group_id)
        known = {} if (state is None) or not calls else self._journal.calls(group.group_id)
        await asyncio.gather(
            *(
                self._journal.record_call(rollout, call)
                for rollout in group.rollouts
                for call in calls.get((rollout.rollout_id, rollout.seed), [])
                if call.number >= len(known.get((rollout.rollout_id, rollout.seed), []))
            )
        )
        if not keep:
            await self._journal.filtered(group)
        elif state != "buffered":
            await self._teach(group)
            await self._journal.landed(group)
        return keep
