"""Run a config on virtual time: the real loop, producer, strategies, buffer, pool and dispatch.

Of more groups than `MANY_GROUPS` only the first steps are run; the second half of them stands for the others.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from penstock.config import Config, SamplingConfig
from penstock.engine.protocol import InferenceEngine
from penstock.errors import UserError
from penstock.inspection.track.logs import Fanout, JsonlTracker, Notes
from penstock.rollout import IsValidSample, Producer, ProduceTask, ReplayBuffer, strategy_config
from penstock.rollout.agent.single_turn import SingleTurn
from penstock.rollout.evaluation.evaluate import EvalTask
from penstock.run.foundation import Foundation
from penstock.run.job import join_parts, make_producer, make_task
from penstock.run.loop import Loop
from penstock.run.twin.engine import (
    DriverTime,
    ModelledEngine,
    ModelledJournal,
    ModelledReward,
    ModelledTrainer,
    Recorded,
    place_of,
)
from penstock.run.twin.profile import Profile, kind_name
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.run_folder import RunFolder
from penstock.training.algo.method import run_settings
from penstock.training.algo.settings import keep_group
from penstock.types import Prompt, Rollout
from penstock.waits import Waits, loop_time
from penstock.workers.inline import ThreadWorker
from penstock.workers.supervise.supervised import Supervised, SupervisionCallbacks
from penstock.workers.workers import Workers, start_workers

MANY_GROUPS, LEAST_STEPS = 20_000, 6
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
        """What `steps` updates take of all GPUs, at one GPU for an engine or rank."""
        return (self.engines + self.ranks) * self.seconds_per_step * steps / 3600


def simulate(
    config: Config, profile: Profile, *, steps: int | None = None, most: int | None = None
) -> Result:
    """What would happen in `steps` updates (None: those of the config).

    most: run no more updates than these. The others are like the second half of those that were run, so that
    a short trial does not count its start as a long run would not.
    """
    steps = steps or config.train.steps
    if not steps:
        raise UserError("train.steps: got nothing, allowed: train.steps or --steps in a simulation")
    for name in config.tasks:  # a look executes no code, and no strategy can stand for a user's
        strategy = config.task_produce(name).strategy
        if strategy not in ("async", "sync"):
            raise UserError(
                f"produce.strategy: got {strategy!r} in a simulation, allowed: async or sync; "
                "a simulation executes no code of a user"
            )
    few = max(LEAST_STEPS, MANY_GROUPS // config.train.groups_per_step)
    clock, thresholds = VirtualClock(), gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        return clock.run(_run(config, profile, min(steps, few, most or steps), steps))
    finally:
        clock.close()
        gc.set_threshold(*thresholds)


async def _run(config: Config, profile: Profile, steps: int, all_steps: int) -> Result:
    """steps: those that are run. all_steps: those that the producer works for."""
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(TemporaryDirectory(prefix="penstock-"))
        twin = _Twin(config, profile)
        await twin.run(RunFolder(Path(folder)), steps, all_steps, closing)
    # The later ones are as about half of these: whole rounds of the steps that one version of the weights may
    # generate for, because the trainer often waits once a round.
    bounds = [config.task_produce(name).max_staleness for name in config.tasks]
    a_round = (max(bounds) + 1) * config.sync.every_steps
    half = steps - steps // 2
    steady = half // a_round * a_round or half
    done, before = twin.measured[steps], twin.measured.get(steps - steady, {})
    times = (all_steps - steps) / steady  # that the steady steps are repeated
    total = {key: n + times * (n - before.get(key, 0.0)) for key, n in done.items()}
    seconds, engines = max(total["seconds"], 1e-9), config.launch.num_producers
    slots = sum(engine.rows.model.slots for engine in twin.engines)
    result = Result(
        engines=engines,
        ranks=config.launch.num_consumers,
        steps=all_steps,
        seconds=seconds,
        tokens=round(total["tokens"]),
        trainer_idle=max(0.0, 1 - total["trainer"] / seconds),
        engine_idle=max(0.0, 1 - total["engines"] / engines / seconds),
        slots_used=total["rows"] / seconds / slots,
        driver_busy=total["driver"] / seconds,
        groups=round(total["groups"]),
        staleness=dict(sorted(_counts("behind", total).items())),
        drops=_counts("drop", total),
    )
    if twin.left_over:
        result.drops["left over"] = twin.left_over
    result.notes = _notes(config, profile, result)
    return result


def _counts(kind: str, total: dict[Any, float]) -> dict[Any, int]:
    return {key[1]: round(n) for key, n in total.items() if key[0] == kind and n}


def _notes(config: Config, profile: Profile, result: Result) -> list[str]:
    notes = []
    if result.driver_busy > DRIVER_IS_FULL:
        rate = result.groups / result.seconds
        notes.append(
            f"one driver does not suffice: its event loop is {result.driver_busy:.0%} busy at "
            f"{rate:,.0f} groups a second; split the run by task, or make groups larger"
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


class _Twin:
    """One simulated run: modelled engines, trainer, rewards and journal; every other part is a run's."""

    def __init__(self, config: Config, profile: Profile) -> None:
        track = config.track.model_copy(update={"rollouts_every_steps": 0})  # keeps no samples
        # modelled answers are never judged: no rule ends the run, and what is saved is that of a reward
        train = config.train.model_copy(update={"stop_when": []})
        best = config.checkpoint.keep_best.replace("/accuracy", "/reward")
        checkpoint = config.checkpoint.model_copy(update={"keep_best": best})
        changed = {"track": track, "train": train, "checkpoint": checkpoint}
        self._config, self._profile = config.model_copy(update=changed), profile
        self._recorded = {name: Recorded(config, profile, name) for name in config.tasks}
        self._driver = DriverTime(profile)
        self._trainer = ModelledTrainer(profile, config.launch.num_consumers)
        self._journal = ModelledJournal(profile, self._measure)
        self._source: Producer
        self._started_at = loop_time()
        self.engines = [
            ModelledEngine(profile.decode_of(config, number), self._length, sync_s=profile.sync_s)
            for number in range(config.launch.num_producers)
        ]
        self.measured: dict[int, dict[Any, float]] = {}  # what had happened by then, by step
        self.left_over = 0  # groups that were generated and not needed

    async def run(
        self, folder: RunFolder, steps: int, all_steps: int, closing: AsyncExitStack
    ) -> None:
        """Train `steps` updates; the producer works for `all_steps`."""
        config, journal = self._config, cast(Any, self._journal)
        notes = Notes(lambda text: None)
        events = SupervisionCallbacks(waits=Waits(), note=notes.add)
        # other waits than those of the workers: no timeline is written
        base = Foundation(notes=notes, waits=Waits(), journal=journal, events=events)
        workers = await self._launch(events, steps)
        closing.push_async_callback(workers.close)
        buffer = ReplayBuffer(max_groups_per_task=config.produce.max_buffered_groups)
        tasks = [self._task(name, workers, buffer) for name in config.tasks]
        self._source = make_producer(config, tasks, buffer, journal, events.waits, all_steps)
        job = join_parts(
            config,
            folder,
            base,
            workers,
            self._source,
            steps,
            closing,
            self._eval_tasks(),
            facts={},
            tracker=Fanout({"console": JsonlTracker(folder.metrics)}),  # tells nobody
        )
        self._started_at = loop_time()
        await Loop(job).run()
        self.left_over = sum(task.buffered for task in self._source.snapshot().tasks)

    def _measure(self, step: int) -> None:
        for engine in self.engines:
            engine.rows.advance(loop_time())
        drops: Counter[str] = Counter()
        for task in self._source.snapshot().tasks:
            drops.update({f"refused ({reason})": n for reason, n in task.dropped.items()})
            drops.update({name: task.counters.get(name, 0) for name in ("expired", "aborted")})
        self.measured[step] = {
            "seconds": loop_time() - self._started_at,
            "tokens": self._journal.tokens,
            "groups": self._journal.groups,
            "trainer": self._trainer.busy_s,
            "engines": sum(engine.rows.busy_s for engine in self.engines),
            "rows": sum(engine.rows.row_s for engine in self.engines),
            "driver": self._driver.busy_s,
            **{("behind", n): count for n, count in self._journal.staleness.items()},
            **{("drop", reason): count for reason, count in drops.items()},
        }

    def _length(self, request_id: str) -> int:
        """The tokens of a response; those of an evaluation are as in training."""
        task, cursor, number = place_of(request_id)
        any_task = next(iter(self._recorded.values()))
        return self._recorded.get(task, any_task).group(cursor).lengths[number]

    async def _launch(self, events: SupervisionCallbacks, steps: int) -> Workers:
        """Start the modelled parts, as a launcher starts real ones."""
        config = self._config

        def supervised(name: str, part: Any) -> Supervised:
            spawn = partial(ThreadWorker.start, name, lambda: part)
            return Supervised(name, spawn, config.launch, events)

        engines = [supervised(f"engine-{n}", engine) for n, engine in enumerate(self.engines)]
        trainer = supervised("trainer", self._trainer)
        asked = config.engine.model_copy(update={"max_slots": 0})  # ask each engine
        asking = config.model_copy(update={"engine": asked})
        workers = await start_workers(asking, steps, events, trainer, engines)
        assert workers.engine is not None
        await workers.engine.start()
        return workers

    def _reward(self, task: str) -> ModelledReward:
        return ModelledReward(self._recorded[task], self._profile.reward_s, self._driver)

    def _eval_tasks(self) -> list[EvalTask]:
        """Evaluations of as many responses as in the profile, with the rewards of a task of training."""
        config = self._config
        return [
            EvalTask(
                name=name,
                problems=_prompts(size),
                reward=self._reward(next(iter(config.tasks))),
                sampling=SamplingConfig(max_tokens=config.sampling.max_tokens),
                num_generations=1,
                decode=lambda ids: "",
                seed=0,
            )
            for name, size in self._profile.evaluations.items()
            if size and name in config.eval.tasks
        ]

    def _task(self, name: str, workers: Workers, buffer: ReplayBuffer) -> ProduceTask:
        config = self._config
        produce = config.task_produce(name).model_copy(update={"should_continue": ""})
        return make_task(
            config,
            name,
            buffer,
            prompts=_prompts(len(self._profile.groups)),
            agent_loop=SingleTurn(
                engine=cast(InferenceEngine, workers.engine),
                reward=self._reward(name),
                sampling=config.task_sampling(name),
                decode=lambda ids: "",
            ),
            strategy=strategy_config(produce, _validity(config, name, self._recorded[name])),
        )


def _prompts(count: int) -> list[Prompt]:
    """Prompts of one token: what is made of them is in the profile."""
    return [
        Prompt(prompt_id=str(n), messages=(), token_ids=np.array([n], np.int32))
        for n in range(count)
    ]


def _validity(config: Config, task: str, recorded: Recorded) -> IsValidSample:
    """The rule of a run, with what was recorded in the place of a user's code."""
    is_own = ":" in config.task_algorithm(task).name
    settings = None if is_own else run_settings(config, task)
    by_record = settings is None or bool(config.task_produce(task).is_valid_sample)

    def is_valid(rollouts: Sequence[Rollout]) -> bool:
        seen = recorded.group(place_of(rollouts[0].rollout_id)[1])
        if by_record and seen.refused:
            return False
        return settings is None or not settings.filter_groups or keep_group(rollouts, settings)

    return is_valid
