"""Builds every part of a run from its config and joins them.

`open_job` turns a config into objects: data, rewards, agent loops and strategies in this process,
engine and trainer where the launcher puts them. The loop (`run/loop.py`) does the training.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.config import Config, SamplingConfig, TaskDataConfig
from penstock.config.demo import context_length
from penstock.config.plugins import load
from penstock.data.identity import TOTAL_STEPS, measure
from penstock.data.sampler import PromptSource, make_sampler
from penstock.engine.protocol import InferenceEngine
from penstock.inspection.findings.live import LiveFindings
from penstock.inspection.track.console import StartDisplay
from penstock.inspection.track.logs import (
    Fanout,
    Notes,
    RolloutLog,
    RunInfo,
    TimelineLog,
    restore_metrics,
)
from penstock.reward import VerifiableReward, build_reward
from penstock.rollout import (
    AgentLoop,
    IsValidSample,
    ProduceProgress,
    Producer,
    ProduceStrategyConfig,
    ProduceTask,
    ReplayBuffer,
    default_is_valid_sample_fn,
    strategy_config,
)
from penstock.rollout.agent.build import build_agent
from penstock.rollout.agent.function import FunctionAgent, InterruptedCalls
from penstock.rollout.agent.single_turn import ask_policy
from penstock.rollout.evaluation.evaluate import (
    EvalTask,
    Evaluations,
    best_or_pending,
    choose_problems,
)
from penstock.rollout.taught import taught
from penstock.run.foundation import BatchSource, Foundation, Status, lay_foundation
from penstock.run.run_data import RunData, count_steps, duplicates, left_behind, overlaps
from penstock.run.stop_rules import StopRules, scores_used
from penstock.store.checkpoint import CheckpointStore
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from penstock.store.space import available_mib
from penstock.training.algo.method import run_settings
from penstock.training.algo.settings import keep_group
from penstock.types import Batch, Rollout, StepReport
from penstock.waits import Waits
from penstock.workers import LAUNCHERS
from penstock.workers.control import Control
from penstock.workers.inline import offline_trainer, opened_engine
from penstock.workers.supervise.supervised import SupervisionCallbacks
from penstock.workers.supervise.trainer import ColocatedTrainer, RestartingTrainer
from penstock.workers.watchdog import Watchdog, watched
from penstock.workers.workers import Workers

if TYPE_CHECKING:
    from penstock.rollout.agent.endpoint import Endpoint


@dataclass(slots=True, frozen=True, kw_only=True)
class Job:
    """What the loop drives."""

    config: Config
    folder: RunFolder
    total_steps: int
    workers: Workers
    engine: InferenceEngine | None  # the engines as one engine; None if the run generates nothing
    trainer: RestartingTrainer | ColocatedTrainer
    waits: Waits
    source: BatchSource
    status: Status
    notes: Notes
    journal: Journal
    checkpoints: CheckpointStore
    evaluations: Evaluations
    rollout_log: RolloutLog
    findings: LiveFindings
    timeline: TimelineLog
    tracker: Fanout
    facts: dict[str, str] = field(default_factory=dict)  # what the run depends on (identity.py)
    start_report: list[str] = field(default_factory=list)  # how long each worker's stages took
    stop_rules: StopRules = field(default_factory=StopRules)

    def log_step(self, batch: Batch, report: StepReport) -> None:
        """Look for findings, give metrics and some samples of a step to whoever shows them."""
        self.status.trained(batch)
        memory = available_mib()
        metrics = {**report.metrics, **self.timeline.read_metrics()}
        if memory is not None:
            metrics["memory/available_mib"] = memory
        self.findings.look(batch.step, batch, metrics)
        metrics["findings/open"] = float(len(self.findings.open))
        self.tracker.log_step(batch.step, metrics)
        self.rollout_log.write(batch)

    def confirm_weights(self, version: int, digest: str) -> None:
        """Note the newest weights of a run without an engine: demonstrations are shown to them.

        A fork's rollouts name the weights of the run that sampled them.
        """
        if not isinstance(self.source, Producer):
            return
        self.journal.record_published(version, digest)
        self.journal.record_confirmed("trainer", version, digest)
        self.source.weights_updated(version)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch all waits inside the block, up to the end of a checkpoint that is being written."""
        note = self.tracker.note
        async with watched(Watchdog(self.waits, self.config.watchdog, self.workers, note=note)):
            try:
                yield
            finally:
                await self.checkpoints.settle()


@asynccontextmanager
async def open_job(
    config: Config, folder: RunFolder, notes: Notes | None = None
) -> AsyncIterator[Job]:
    """Build the parts of a run, and close every one of them at the end, also after an error."""
    async with AsyncExitStack() as closing:
        base = lay_foundation(folder, notes or Notes(), closing)
        report: list[str] = []
        data, facts, total_steps, workers = await _load_and_launch(
            config, folder, base.events, closing, report
        )
        # told when the tracker is there
        doubts = data.chat.end_tokens.difference(data.chat.tokenizer)
        if config.model.lora.rank:
            doubts.append(await workers.trainer.adapters())
        asking = (*config.tasks.values(), *config.eval.tasks.values())
        endpoint = await serve_agents(asking, closing)
        parts = _TaskParts(
            config=config,
            data=data,
            workers=workers,
            journal=base.journal,
            endpoint=endpoint,
            closing=closing,
            note=doubts.append,
        )
        source = await _producer(parts, total_steps)
        eval_tasks = _eval_tasks(config, data, base.waits, closing, endpoint, workers.engine)
        asked = {task.name: [problem.messages for problem in task.problems] for task in eval_tasks}
        shared = await left_behind(lambda: overlaps(data.train, asked))
        job = join_parts(
            config,
            folder,
            base,
            workers,
            source,
            total_steps,
            closing,
            eval_tasks,
            facts={**facts, **shared, TOTAL_STEPS: str(total_steps)},
            start_report=report,
        )
        if workers.scale is not None:
            control = Control(folder.path / "control", {"scale": workers.scale})
            await control.start()
            closing.push_async_callback(control.close)
        filters = any(run_settings(config, task).filter_groups for task in config.tasks)
        if config.train.episodes is not None and (filters or config.produce.is_valid_sample):
            doubts.append(
                f"note: train.episodes {config.train.episodes:g} is {total_steps} steps of trained groups; "
                "refused groups are drawn in addition, so the run passes over its prompts more often"
            )
        for text in [*doubts, *duplicates(data.train)]:
            job.notes.add(text)
        job.findings.start(base.journal.last_committed_step(), job.facts)
        yield job


def join_parts(
    config: Config,
    folder: RunFolder,
    base: Foundation,
    workers: Workers,
    source: BatchSource,
    total_steps: int,
    closing: AsyncExitStack,
    eval_tasks: Sequence[EvalTask] = (),
    *,
    facts: dict[str, str],
    start_report: Sequence[str] = (),
    tracker: Fanout | None = None,
) -> Job:
    """Add what every run has: the tracker, then checkpoints, evaluations and logs.

    tracker: in the place of those that the config names.
    """
    status, note = Status(source, base.waits), base.notes.add
    findings = LiveFindings(
        folder, config, total_steps, note=note, last_failure=status.last_failure
    )
    if tracker is None:
        tracker = _tracker(config, folder, base.journal, total_steps, status, findings)
    closing.callback(tracker.close)
    base.notes.listen(tracker.note)
    timeline = TimelineLog(folder.path / "timeline", base.waits, note)
    closing.callback(timeline.close)
    rollout_log = RolloutLog(
        folder.path / "rollouts.jsonl",
        every_steps=config.track.rollouts_every_steps,
        note=note,
        system_prompts={name: task.system_prompt for name, task in config.tasks.items()},
    )
    closing.callback(rollout_log.close)
    checkpoints = CheckpointStore(
        folder.checkpoints,
        config.checkpoint,
        report=note,
        before_rename=base.journal.sync,
        after_prune=partial(_prune_payloads, base.journal, config),
        also_kept=partial(
            best_or_pending,
            folder.evaluations,
            config.checkpoint.keep_best,
            every_steps=config.eval.every_steps,
        ),
    )
    closing.push_async_callback(checkpoints.settle)
    evaluations = Evaluations(
        tasks=eval_tasks,
        folder=folder.evaluations,
        engine=workers.engine,
        waits=base.waits,
        used=scores_used(config),
        log=tracker.log_eval,
        note=note,
    )
    return Job(
        config=config,
        folder=folder,
        total_steps=total_steps,
        workers=workers,
        engine=workers.engine,
        trainer=workers.trainer,
        waits=base.waits,
        source=source,
        status=status,
        notes=base.notes,
        journal=base.journal,
        checkpoints=checkpoints,
        evaluations=evaluations,
        rollout_log=rollout_log,
        findings=findings,
        timeline=timeline,
        tracker=tracker,
        facts=facts,
        start_report=list(start_report),
        stop_rules=StopRules(config.train.stop_when, folder.evaluations, note),
    )


async def serve_agents(tasks: Iterable[TaskDataConfig], closing: AsyncExitStack) -> Endpoint | None:
    """Start the HTTP endpoint if one of the tasks has an agent that may ask it."""
    if all(task.agent == "single_turn" for task in tasks):
        return None
    from penstock.rollout.agent.endpoint import Endpoint  # lazily: most runs serve no agents

    endpoint = Endpoint()
    closing.push_async_callback(endpoint.close)
    await endpoint.start()
    return endpoint


async def _load_and_launch(
    config: Config,
    folder: RunFolder,
    events: SupervisionCallbacks,
    closing: AsyncExitStack,
    report: list[str],
) -> tuple[RunData, dict[str, str], int, Workers]:
    """Load data here and models in their workers; at the same time if the number of steps is known."""

    async def load_and_measure() -> tuple[RunData, dict[str, str]]:
        data = await RunData.read(config)
        return data, await left_behind(lambda: measure(config, data.by_key()))

    launch = load("launch.kind", config.launch.kind, LAUNCHERS)
    steps = config.train.steps
    with StartDisplay("reading the data") as display:
        loading = asyncio.create_task(load_and_measure())
        if steps is None or config.launch.kind == "inline":  # one process: imports must not race
            steps = count_steps(config, (await loading)[0].train)
        try:
            display.tell("loading the model into trainer and engines")
            workers: Workers = await launch(config, steps, folder.logs, events)
            closing.push_async_callback(workers.close)
            if workers.engine is not None:
                await workers.engine.start()
        except asyncio.CancelledError:
            display.tell("stopping")
            loading.cancel()
            await asyncio.wait([loading])
            raise
        except BaseException:
            await loading  # an error in the data says more
            raise
        display.tell("reading the data")
        data, facts = await loading
    report += display.report()
    return data, facts, steps, workers


def _prune_payloads(journal: Journal, config: Config, oldest_step: int) -> None:
    """Remove what no kept checkpoint needs for a redo, if the config says so."""
    keep = config.journal.keep_payloads
    if keep != "all":
        journal.prune_payloads(oldest_step, keep_text=keep == "text")


@asynccontextmanager
async def open_trainer(
    config: Config,
    log_folder: Path,
    total_steps: int | None = None,
    *,
    events: SupervisionCallbacks | None = None,
) -> AsyncIterator[Workers]:
    """Start the trainer of a run without an engine, to train on journalled batches.

    `total_steps`: what the run counted, if its config gives episodes; None counts its data again.
    """
    steps = config.train.steps or total_steps
    if steps is None:
        steps = count_steps(config, (await RunData.read(config)).train)
    events = events or SupervisionCallbacks(waits=Waits())
    async with offline_trainer(config, steps, log_folder, events) as workers:
        yield workers


@asynccontextmanager
async def open_evaluation(
    config: Config,
) -> AsyncIterator[tuple[InferenceEngine, list[EvalTask]]]:
    """Start an engine and load the evaluation tasks, without a trainer."""
    async with AsyncExitStack() as closing:
        data = await RunData.read(config, with_training=False)
        engine = await closing.enter_async_context(opened_engine(config))
        endpoint = await serve_agents(config.eval.tasks.values(), closing)
        yield engine, _eval_tasks(config, data, Waits(), closing, endpoint, engine)


@dataclass(slots=True, frozen=True, kw_only=True)
class _TaskParts:
    """What the training tasks of a run are built from."""

    config: Config
    data: RunData
    workers: Workers
    journal: Journal
    endpoint: Endpoint | None  # of agents
    closing: AsyncExitStack
    note: Callable[[str], None]  # what the user should know of a task


async def _producer(parts: _TaskParts, total_steps: int) -> Producer:
    config, tasks, waits = parts.config, [], parts.workers.events.waits
    buffer = ReplayBuffer(max_groups_per_task=config.produce.max_buffered_groups)
    for name in config.tasks:
        dataset, produce = parts.data.train[name], config.task_produce(name)
        sampling = _with_anneal_steps(config, name, len(dataset))
        loop, chat = await _agent_loop(parts, name, sampling), parts.data.chat
        task = make_task(
            config,
            name,
            buffer,
            prompts=dataset,
            agent_loop=await taught(config, name, loop, dataset, chat, parts.closing, waits),
            strategy=strategy_config(produce, _validity(config, name, produce.is_valid_sample)),
            num_skipped_long=dataset.num_skipped_long,
        )
        tasks.append(task)
    return make_producer(config, tasks, buffer, parts.journal, waits, total_steps)


def make_task(
    config: Config,
    name: str,
    buffer: ReplayBuffer,
    *,
    prompts: PromptSource,
    agent_loop: AgentLoop,
    strategy: ProduceStrategyConfig,
    num_skipped_long: int = 0,
) -> ProduceTask:
    """A training task of a run, or of its twin."""
    return ProduceTask(
        name=name,
        weight=config.tasks[name].weight,
        strategy=strategy.build(sync_weights_interval=config.sync.every_steps),
        agent_loop=agent_loop,
        sampler=make_sampler(config, name, prompts, buffer),
        num_skipped_long=num_skipped_long,
    )


def make_producer(
    config: Config,
    tasks: Sequence[ProduceTask],
    buffer: ReplayBuffer,
    journal: Journal,
    waits: Waits,
    last_step: int,
) -> Producer:
    """The producer of a run, or of its twin."""
    return Producer(
        tasks=tasks,
        replay_buffer=buffer,
        journal=journal,
        waits=waits,
        progress=ProduceProgress.build(list(config.tasks)),
        groups_per_step=config.train.groups_per_step,
        sync_weights_interval=config.sync.every_steps,
        last_step=last_step,
    )


async def _agent_loop(parts: _TaskParts, name: str, sampling: SamplingConfig) -> AgentLoop:
    """The agent loop of a task, with its rewards: here, or in actors of its own."""
    task, is_chat = parts.config.tasks[name], parts.data.train[name].is_chat
    workers, journal, closing = parts.workers, parts.journal, parts.closing
    if task.agent_actors and workers.start_agent is not None:
        remote = await workers.start_agent(workers, name, sampling, is_chat)
        closing.push_async_callback(remote.close)
        return remote
    engine, interrupted = cast(InferenceEngine, workers.engine), None
    if task.agent != "single_turn":
        interrupted = InterruptedCalls(calls=journal.calls(), tools=journal.tools())
    asks = partial(ask_policy, engine, parts.data.chat)
    where = {"waits": workers.events.waits, "lane": f"rewards of {name}", "ask_policy": asks}
    return open_agent(
        parts.config,
        name,
        sampling,
        parts.data,
        closing,
        engine=engine,
        reward=open_reward(task, sampling, is_chat, closing, **where),
        recorder=journal,
        endpoint=parts.endpoint,
        note=parts.note,
        interrupted=interrupted,
    )


def open_reward(
    task: TaskDataConfig,
    sampling: SamplingConfig,
    is_chat: bool,
    closing: AsyncExitStack,
    **where: Any,
) -> VerifiableReward:
    """The rewards of a task, until `closing` ends; `where` shows their waits (see `build_reward`)."""
    most = sampling.max_tokens
    reward = build_reward(task.rewards, max_tokens=most, is_chat=is_chat, **where)
    closing.push_async_callback(reward.close)
    return reward


def open_agent(
    config: Config,
    name: str,
    sampling: SamplingConfig,
    data: RunData,
    closing: AsyncExitStack,
    **parts: Any,
) -> AgentLoop:
    """The agent loop of a training task, until `closing` ends; `parts` are those of `build_agent`."""
    positions = context_length(config.model.path)
    task, where = config.tasks[name], f"tasks.{name}"
    agent_loop = build_agent(where, task, sampling, chat=data.chat, positions=positions, **parts)
    if isinstance(agent_loop, FunctionAgent):
        closing.push_async_callback(agent_loop.close)
    return agent_loop


def _with_anneal_steps(config: Config, task: str, prompts: int) -> SamplingConfig:
    """The task's sampling, with `anneal.episodes` as the steps that train so many of its prompts."""
    sampling = config.task_sampling(task)
    if not sampling.anneal.episodes:
        return sampling
    total = sum(table.weight for table in config.tasks.values())
    share = config.train.groups_per_step * config.tasks[task].weight / total
    steps = math.ceil(sampling.anneal.episodes * prompts / share) if share else 0
    anneal = sampling.anneal.model_copy(update={"steps": steps, "episodes": 0.0})
    return sampling.model_copy(update={"anneal": anneal})


def _validity(config: Config, task: str, own_rule: str) -> IsValidSample:
    """The rule for training on a finished group: the task's algorithm and the user's rule keep it."""
    settings = run_settings(config, task)
    own = load("produce.is_valid_sample", own_rule, {}) if own_rule else None
    if own is None and not settings.filter_groups:
        return default_is_valid_sample_fn

    def is_valid(rollouts: Sequence[Rollout]) -> bool | Awaitable[bool]:
        return keep_group(rollouts, settings) and (own is None or own(rollouts))

    return is_valid


def _eval_tasks(
    config: Config,
    data: RunData,
    waits: Waits,
    closing: AsyncExitStack,
    endpoint: Endpoint | None,
    engine: InferenceEngine | None,
) -> list[EvalTask]:
    settings, tasks = config.eval, []
    where: dict[str, Any] = {"waits": waits, "ask_policy": partial(ask_policy, engine, data.chat)}
    for name, task in settings.tasks.items():
        sampling = config.eval_sampling(name)
        is_chat, lane = data.evaluation[name].is_chat, f"rewards of eval {name}"
        reward = open_reward(task, sampling, is_chat, closing, lane=lane, **where)
        tasks.append(
            EvalTask(
                name=name,
                problems=choose_problems(name, data.evaluation[name], settings.max_problems),
                reward=reward,
                sampling=sampling,
                num_generations=sampling.num_generations,
                decode=data.chat.decode,
                seed=config.seed,
                agent=None
                if task.agent == "single_turn"
                else partial(
                    build_agent,
                    f"eval.tasks.{name}",
                    task,
                    sampling,
                    reward=reward,
                    chat=data.chat,
                    endpoint=endpoint,
                    positions=context_length(config.model.path),
                ),
            )
        )
    return tasks


def _tracker(
    config: Config,
    folder: RunFolder,
    journal: Journal,
    total_steps: int,
    status: Status,
    findings: LiveFindings,
) -> Fanout:
    last = journal.last_committed_step()
    if last or folder.metrics.exists():
        restore_metrics(folder.metrics, last, lambda step: journal.steps(step, step)[0].metrics)
    info = RunInfo(
        config=config,
        folder=folder.path,
        name=folder.name,
        total_steps=total_steps,
        first_step=last,
        live=status.live,
        findings=lambda: findings.open,
        batch=lambda: status.newest_batch,
        next_batch=status.next_batch,
    )
    return Fanout.from_info(info)
