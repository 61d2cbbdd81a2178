"""Run a config on virtual time: the real loop, producer, strategies, buffer, pool and dispatch.

Two coarser grains make large runs cheap: more engines than `MOST_ENGINES` are equal packs of engines,
each one engine with as many slots, and from `MANY_GROUPS` on a group is one request with a row for each
response. The same strategies, buffer and dispatcher decide.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from penstock.config import Config, LaunchConfig
from penstock.data.sampler import Sampler
from penstock.engine.protocol import SamplingParams
from penstock.errors import UserError
from penstock.rollout import (
    IsValidSample,
    ProduceProgress,
    Producer,
    ProduceTask,
    ReplayBuffer,
    strategy_config,
)
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.evaluation.evaluate import EvalTask
from penstock.run.job import Job
from penstock.run.loop import Loop
from penstock.run.twin.parts import (
    DriverTime,
    Recorded,
    Samples,
    VirtualCheckpoints,
    VirtualEngine,
    VirtualEvaluations,
    VirtualJournal,
    VirtualReward,
    VirtualTrainer,
    VirtualWorker,
    place_of,
)
from penstock.run.twin.profile import Profile, kind_name
from penstock.run.twin.virtual_time import VirtualClock
from penstock.training.algo.method import run_settings
from penstock.training.algo.settings import keep_group
from penstock.types import Batch, Group, Prompt, Rollout, StepReport
from penstock.waits import Waits, loop_time
from penstock.workers.assemble import assemble, colocated_publishes
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.supervise.worker import Worker
from penstock.workers.workers import Workers

MOST_ENGINES = 64
MANY_GROUPS = 20_000
DRIVER_IS_FULL = 0.9  # of its core
_COLLECT_AFTER = 1_000_000  # new objects; by default Python looks for garbage every few groups


@dataclass(slots=True, kw_only=True)
class Result:
    """What a run of the twin did. Shares and rates are of `seconds`, from the first draw to the last update."""

    engines: int
    ranks: int
    steps: int
    seconds: float
    tokens: int  # response tokens that were trained
    trainer_idle: float
    engine_idle: float  # of an engine, on average
    slots_used: float  # share of all slots that decode
    driver_busy: float
    groups: int  # that were trained
    staleness: dict[int, int] = field(default_factory=dict)  # updates behind -> groups
    drops: dict[str, int] = field(default_factory=dict)  # untrained work, by reason
    wall_s: float = 0.0  # what the simulation took
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def mean_staleness(self) -> float:
        total = sum(self.staleness.values())
        return sum(behind * count for behind, count in self.staleness.items()) / max(1, total)

    def gpu_hours(self, steps: int) -> float:
        """Return what `steps` updates take of all GPUs, at one GPU for an engine or rank."""
        return (self.engines + self.ranks) * self.seconds_per_step * steps / 3600


@dataclass(slots=True, kw_only=True)
class _TwinJob(Job):
    """A job whose steps are counted instead of logged."""

    tokens_of: Callable[[Group], int]
    measure: Callable[[], np.ndarray] = lambda: np.zeros(0)
    measured: dict[int, np.ndarray] = field(default_factory=dict)  # step -> after it
    trained: int = 0
    groups: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    ended_at: float = 0.0

    def log_step(self, batch: Batch, report: StepReport) -> None:
        self.groups += len(batch.groups)
        self.ended_at = loop_time()
        for group in batch.groups:
            self.trained += self.tokens_of(group)
            self.staleness[group.staleness(batch.step)] += 1
        self.measured[batch.step] = self.measure()


class _Prompts:
    """As many prompts as the profile has groups, of one token each: their lengths are in the profile."""

    def __init__(self, count: int) -> None:
        self._prompts = [
            Prompt(prompt_id=str(n), messages=(), token_ids=np.array([n], np.int32))
            for n in range(count)
        ]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def simulate(
    config: Config,
    profile: Profile,
    *,
    steps: int | None = None,
    standing_for: int = 0,
    whole_groups: bool | None = None,
) -> Result:
    """Run `steps` updates (None: those of the config) on virtual time; return what would have happened.

    standing_for: return the figures of so many updates, if that is more: the others are like the second half
    of those that were run, so that a short trial does not count its start as a long run would not.
    whole_groups: a group is one request; None: if there are many groups.
    """
    steps = steps or config.train.steps
    if not steps:
        raise UserError("train.steps: got nothing, allowed: train.steps or --steps in a simulation")
    check_executes_nothing(config)
    clock, began, thresholds = VirtualClock(), time.perf_counter(), gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        if whole_groups is None:
            whole_groups = steps * config.train.groups_per_step > MANY_GROUPS
        result = clock.run(_run(config, profile, steps, max(steps, standing_for), whole_groups))
    finally:
        clock.close()
        gc.set_threshold(*thresholds)
    result.wall_s = time.perf_counter() - began
    return result


def check_executes_nothing(config: Config) -> None:
    """Refuse a strategy that is a user's code: a look executes nothing, and no other can stand for it."""
    for name in config.tasks:
        strategy = config.task_produce(name).strategy
        if strategy not in ("async", "sync"):
            raise UserError(
                f"produce.strategy: got {strategy!r} in a simulation, allowed: async or sync; "
                "a simulation executes no code of a user"
            )


def packs(launch: LaunchConfig) -> list[tuple[int, int]]:
    """Return the packs of engines: the number of its first engine, and how many equal ones it has."""
    size = math.ceil(launch.num_producers / MOST_ENGINES)
    counts = [kind.count for kind in launch.producer_kinds]
    found, first = [], 0
    for count in (*counts, launch.num_producers - sum(counts)):
        found += [(first + n, min(size, count - n)) for n in range(0, count, size)]
        first += count
    return found


async def _run(
    config: Config, profile: Profile, steps: int, all_steps: int, whole_groups: bool
) -> Result:
    async with AsyncExitStack() as closing:
        job, engines, trainer, driver = await _build(
            config, profile, (steps, all_steps), whole_groups, closing
        )
        started = loop_time()

        def measure() -> np.ndarray:
            for engine in engines:
                engine.rows.advance(loop_time())
            busy = sum(engine.rows.busy_s * engine.engines for engine in engines)
            rows = sum(engine.rows.row_s for engine in engines)
            did = (trainer.busy_s, busy, rows, driver.busy_s)
            return np.array([job.ended_at - started, job.trained, job.groups, *did])

        job.measure = measure
        await Loop(cast(Job, job)).run()
        steady = _steady_steps(config, steps)
        run, before = job.measured[steps], job.measured.get(steps - steady, np.zeros(7))
        all_of_it = run + (all_steps - steps) / steady * (run - before)
        seconds, tokens, groups, trained, busy, rows, driven = all_of_it
        seconds = max(float(seconds), 1e-9)
        slots = sum(engine.rows.slots for engine in engines)
        producer = cast(Producer, job.source)
        result = Result(
            engines=config.launch.num_producers,
            ranks=config.launch.num_consumers,
            steps=all_steps,
            seconds=seconds,
            tokens=round(tokens),
            trainer_idle=max(0.0, 1 - float(trained) / seconds),
            engine_idle=max(0.0, 1 - float(busy) / config.launch.num_producers / seconds),
            slots_used=float(rows) / seconds / slots,
            driver_busy=float(driven) / seconds,
            groups=round(groups),
            staleness=dict(sorted(job.staleness.items())),
            drops=_drops(producer),
        )
    result.notes = _notes(config, profile, result)
    return result


def _drops(producer: Producer) -> dict[str, int]:
    """Return the groups that were generated in vain: refused, expired, aborted, left over at the end."""
    counts: Counter[str] = Counter()
    for task in producer.snapshot().tasks:
        counts.update({f"refused ({reason})": n for reason, n in task.dropped.items()})
        counts.update({name: task.counters.get(name, 0) for name in ("expired", "aborted")})
        counts["left over"] += task.buffered
    return {name: count for name, count in counts.items() if count}


def _notes(config: Config, profile: Profile, result: Result) -> list[str]:
    notes = []
    if result.driver_busy > DRIVER_IS_FULL:
        rate = result.groups / result.seconds
        notes.append(
            f"one driver does not suffice: its event loop is {result.driver_busy:.0%} busy at "
            f"{rate:,.0f} groups a second; split the run by task, or make groups larger"
        )
    packed = packs(config.launch)
    if len(packed) < config.launch.num_producers:
        size = max(engines for _, engines in packed)
        notes.append(
            f"{config.launch.num_producers} engines are modelled as {len(packed)} packs of {size}"
        )
    notes += [
        f"engines of launch.producer_kinds[{place}] are taken to be as fast as the others: the profile has none "
        "of that kind; --kind-speed tells their speed"
        for place, kind in enumerate(config.launch.producer_kinds)
        if kind_name(kind) not in profile.kinds
    ]
    missing = sorted(config.eval.tasks.keys() - profile.evaluations.keys())
    if missing:
        notes.append(f"evaluations of {', '.join(missing)} are not modelled: the profile has none")
    return notes


def _steady_steps(config: Config, steps: int) -> int:
    """Return how many of the last steps stand for the later ones.

    About half of them: whole rounds of the steps that one version of the weights may generate for, because
    the trainer often waits once a round.
    """
    bounds = [config.task_produce(name).max_staleness for name in config.tasks]
    a_round = (max(bounds) + 1) * config.sync.every_steps
    half = steps - steps // 2
    return half // a_round * a_round or half


async def _build(
    config: Config,
    profile: Profile,
    updates: tuple[int, int],
    whole_groups: bool,
    closing: AsyncExitStack,
) -> tuple[_TwinJob, list[VirtualEngine], VirtualTrainer, DriverTime]:
    """updates: those that are run, and those that the producer works for."""
    steps, all_steps = updates
    callbacks = SupervisionCallbacks(waits=Waits(), note=lambda line: None)
    recorded = {name: _recorded(config, profile, name) for name in config.tasks}
    driver = DriverTime(profile.driver_s_per_group, profile.driver_s_per_response)
    engines = _engines(config, profile, recorded, whole_groups)

    def tokens_of(group: Group) -> int:
        if not whole_groups:
            return group.num_response_tokens
        return recorded[group.task].tokens(group.cursor)

    trainer = VirtualTrainer(profile, config.launch.num_consumers, tokens_of)

    def supervised(name: str, part: Any) -> Supervised:
        async def spawn() -> Worker:
            return VirtualWorker(name, part)

        return Supervised(name, spawn, config.launch, callbacks)

    workers = [supervised(f"engine-{n}", engine) for n, engine in enumerate(engines)]
    train_worker = supervised("trainer", trainer)
    for one in (*workers, train_worker):
        await one.start()

    async def nothing() -> None: ...

    made = assemble(
        "virtual",
        train_worker,
        workers,
        nothing,
        callbacks,
        "virtual",
        publishes=colocated_publishes(config, steps),
        settings=config.engine.model_copy(update={"max_slots": 0}),  # ask each engine
        may_leave=config.may_leave_engines(),
    )
    closing.push_async_callback(made.close)
    assert made.engine is not None
    await made.engine.start()
    journal = cast(Any, VirtualJournal(profile))
    job = _TwinJob(
        config=config,
        folder=cast(Any, None),
        total_steps=steps,
        workers=made,
        source=_producer(
            config, profile, recorded, made.engine, journal, driver, all_steps, whole_groups
        ),
        journal=journal,
        checkpoints=cast(Any, VirtualCheckpoints(config.checkpoint)),
        evaluations=_evaluations(config, profile, made, callbacks),
        rollout_log=cast(Any, None),
        findings=cast(Any, None),
        timeline=cast(Any, None),
        tracker=cast(Any, None),
        tokens_of=tokens_of,
    )
    return job, engines, trainer, driver


def _engines(
    config: Config, profile: Profile, recorded: dict[str, Recorded], whole_groups: bool
) -> list[VirtualEngine]:
    packed = packs(config.launch)
    any_task = next(iter(recorded.values()))

    def lengths(request_id: str) -> Sequence[int]:
        task, cursor, number = place_of(request_id)
        own = recorded.get(task) or any_task  # of an evaluation: as in training
        seen = own.group(cursor).lengths
        whole = whole_groups and task in recorded
        return seen[: own.size] if whole else seen[number : number + 1]

    rows = min(one.mean_rows() for one in recorded.values()) if whole_groups else 1.0
    return [
        VirtualEngine(
            profile.decode_of(config, first),
            lengths,
            engines=size,
            rows_of_request=rows,
            sync=Samples(profile.sync_s, number, len(packed)),
        )
        for number, (first, size) in enumerate(packed)
    ]


def _evaluations(
    config: Config, profile: Profile, workers: Workers, callbacks: SupervisionCallbacks
) -> VirtualEvaluations:
    sizes = {name: size for name, size in profile.evaluations.items() if name in config.eval.tasks}
    return VirtualEvaluations(
        tasks=[cast(EvalTask, SimpleNamespace(name=name)) for name in sizes],
        folder=Path(os.devnull, "eval"),  # nothing was evaluated before
        engine=workers.engine,
        waits=callbacks.waits,
        log=lambda step, metrics: None,
        note=lambda text: None,
        set_aside=workers.set_aside,
        sizes=sizes,
        sampling=SamplingParams(max_tokens=config.sampling.max_tokens),
    )


def _recorded(config: Config, profile: Profile, task: str) -> Recorded:
    own = [group for group in profile.groups if group.task == task]
    sampling = config.task_sampling(task)
    return Recorded(
        own or profile.groups, size=sampling.num_generations, longest=sampling.max_tokens
    )


def _producer(
    config: Config,
    profile: Profile,
    all_recorded: dict[str, Recorded],
    engine: Any,
    journal: Any,
    driver: DriverTime,
    steps: int,
    whole_groups: bool,
) -> Producer:
    buffer = ReplayBuffer(max_groups_per_task=config.produce.max_buffered_groups)
    tasks = []
    for name, task in config.tasks.items():
        sampling, recorded = config.task_sampling(name), all_recorded[name]
        produce = config.task_produce(name).model_copy(update={"should_continue": ""})
        tasks.append(
            ProduceTask(
                name=name,
                weight=task.weight,
                strategy=strategy_config(produce, _validity(config, name, recorded)).build(
                    sync_weights_interval=config.sync.every_steps
                ),
                agent_loop=SingleTurn(
                    engine=engine,
                    reward=VirtualReward(recorded, Samples(profile.reward_s), driver),
                    sampling=sampling,
                    decode=lambda ids: "",
                ),
                sampler=Sampler(
                    _Prompts(len(profile.groups)),
                    task_name=name,
                    prompt_repeat_k=1 if whole_groups else sampling.num_generations,
                    seed=config.seed,
                    replay_buffer=buffer,
                ),
            )
        )
    return Producer(
        tasks=tasks,
        replay_buffer=buffer,
        journal=journal,
        waits=Waits(),
        progress=ProduceProgress.build(list(config.tasks)),
        groups_per_step=config.train.groups_per_step,
        sync_weights_interval=config.sync.every_steps,
        last_step=steps,
    )


def _validity(config: Config, task: str, recorded: Recorded) -> IsValidSample:
    """Return the rule of a run, with what was recorded in the place of a user's code."""
    settings = None if ":" in config.algorithm.name else run_settings(config)
    by_record = settings is None or bool(config.task_produce(task).is_valid_sample)

    def is_valid(rollouts: Sequence[Rollout]) -> bool:
        seen = recorded.group(place_of(rollouts[0].rollout_id)[1])
        if by_record and seen.refused:
            return False
        if settings is None or not settings.filter_groups:
            return True
        if len(rollouts) == recorded.size:
            return keep_group(rollouts, settings)
        return len(set(seen.rewards[: recorded.size])) > 1  # a whole group as one rollout

    return is_valid
