"""The world of one schedule: its config, its machine, its faults, and everything that was seen wrong."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config
from penstock.config.source import validate
from penstock.engine.protocol import GenerationRequest
from penstock.errors import PenstockError
from penstock.inspection.audit import _era_bounds
from penstock.store.run_folder import Era
from penstock.types import Batch, Prompt
from simulation.agents import AGENT
from simulation.disk import Disk
from simulation.event_loop import SimLoop
from simulation.faults import FILE_KINDS, Fault, draw_faults, draw_file_faults
from simulation.parts import SharedMemory, stale_rollouts
from simulation.processes import Meeting, SimProcess

TASKS = ("train", "other")
_TASK: dict[str, Any] = {"data": "none", "rewards": [{"type": "simulation.parts:SimReward"}]}
USER = "the user"  # the name of a task that waits for the driver from outside


class Prompts(list[Prompt]):
    """A dataset."""

    is_chat = True

    num_skipped_long = 0

    def messages(self) -> list[Any]:
        return []


PROMPTS = Prompts(
    Prompt(
        prompt_id=f"sums:{number}",
        messages=({"role": "user", "content": str(number)},),
        token_ids=np.arange(number + 1, number + 4),
    )
    for number in range(64)
)


class Living:
    """The processes that live, by name."""

    def __init__(self) -> None:
        self._count = 0
        self._by_name: dict[str, SimProcess] = {}

    def add(self, process: SimProcess) -> int:
        self._by_name[process.name] = process
        self._count += 1
        return self._count

    def get(self, name: str) -> SimProcess | None:
        return self._by_name.get(name)

    def all(self) -> list[SimProcess]:
        return list(self._by_name.values())

    def remove(self, process: SimProcess) -> None:
        if self._by_name.get(process.name) is process:
            del self._by_name[process.name]


class World:
    """One machine and its one run."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        settings: dict[str, Any] | None = None,
        faults: list[Fault] | None = None,
        repeats_bits: bool | None = None,
        gpu_memory: bool | None = None,
    ) -> None:
        """What is given takes the place of what the seed would draw; settings by dotted key."""
        self.seed, self.folder = seed, folder
        self.random = random.Random(seed)
        on_update = random.Random(-1 - seed).choice(("keep", "keep", "abort", "wait"))
        given = {"sync.on_update": on_update, **(settings or {})}
        self.config = draw_config(self.random, seed, given)
        self.bounds = _era_bounds(Era(self.config, None))
        self.repeats_bits = random.Random(f"bits of {seed}").random() < 0.8
        if repeats_bits is not None:
            self.repeats_bits = repeats_bits
        self.gpu_memory = _chance("memory", seed) < 0.3
        if gpu_memory is not None:
            self.gpu_memory = gpu_memory
        self.slow_loads = _chance("loads", seed) < 0.3
        self._loads = random.Random(f"seconds of loads of {seed}")
        workers = [f"engine-{n}" for n in range(self.config.launch.num_producers)]
        ranks = self.config.launch.num_consumers
        workers += ["trainer"] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)]
        drawn = draw_faults(self.random, workers, horizon=280 * (self.config.train.steps or 1))
        drawn += draw_file_faults(random.Random(f"files of {seed}"), self.config.train.steps or 1)
        self.faults = drawn if faults is None else faults
        self.violations: list[str] = []
        self.has_lost_records = False
        self.happened: list[str] = []
        self.life = 0
        self.loop: SimLoop
        self.disk = Disk()
        self._steps: dict[str, int] = {}  # group -> the step that trained it, by any trainer
        self.updates: set[tuple[int, str, str]] = set()  # step, digests before and after it
        self.effects: Counter[tuple[str, int, str]] = Counter()  # of tools: rollout, seed, call
        self._lengths = self.random.choice(((2, 6), (1, 30)))
        self.begin_life()

    def settings(self) -> str:
        """Return what was drawn for this run, in one line."""
        config = self.config
        return (
            f"{config.produce.strategy}, max_staleness {config.produce.max_staleness}, "
            f"{config.train.steps} steps, weights every {config.sync.every_steps} "
            f"({config.sync.on_update}), "
            f"checkpoints every {config.checkpoint.every_steps}, engines "
            f"{config.launch.num_producers} ({config.engine.update}), ranks "
            f"{config.launch.num_consumers}{', colocated' if config.launch.colocate else ''}, "
            f"{len(config.tasks)} task{'s' if len(config.tasks) > 1 else ''}, "
            f"{sum(task.agent == AGENT for task in config.tasks.values())} with an agent, "
            f"payloads kept: {config.journal.keep_payloads}"
            f"{', groups refused' if config.produce.is_valid_sample else ''}"
            f"{', rewards fail' if _chance('rewards', self.seed) < 0.2 else ''}"
            f"{'' if self.repeats_bits else ', bits do not repeat'}"
            f"{', weights in GPU memory' if self.gpu_memory else ''}"
            f"{', slow loads' if self.slow_loads else ''}; "
            f"drawn: {'; '.join(map(str, self.faults)) or 'no fault'}"
        )

    def seconds_to_load(self) -> float:
        """Draw how long an engine takes to load weights; a step takes about a second."""
        return self._loads.choice((0.2, 0.2, 2.0, 10.0)) if self.slow_loads else 0.2

    def begin_life(self) -> None:
        """Begin a life of the driver: its workers died with the driver before."""
        self.processes = Living()
        self.memory = SharedMemory(dies_with_writer=self.gpu_memory)
        self.meetings: dict[Any, Meeting] = {}
        self._gpu: set[str] = set()
        self._passed: Counter[tuple[str, str, str]] = Counter()
        self.excuses: list[str] = []  # faults that may end this life with an error
        self.is_training = False
        self._on_signal: Any = None
        self.scale: Any = None
        self._signals = 0
        self.disk.full, self.disk.slowness = "", 1.0
        ours = [fault for fault in self.faults if fault.life == self.life]
        self._at_ticks = [fault for fault in ours if fault.tick]
        self._at_calls: dict[tuple[str, str, str], list[Fault]] = {}
        for fault in ours:
            if fault.method:
                key = (fault.target, fault.method, fault.phase)
                self._at_calls.setdefault(key, []).append(fault)

    # ---- what the parts ask

    def delay(self, most_s: float) -> float:
        return self.loop.delay(most_s)

    def length_of(self, request: GenerationRequest) -> int:
        least, most = self._lengths
        return least + request.seed % (most - least)

    def handle_signal(self, number: int, handler: Any) -> None:
        self._on_signal = handler if number == 2 else self._on_signal

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def hold_gpu(self, name: str) -> None:
        if self.config.launch.colocate:
            self._gpu = {one for one in self._gpu if self.processes.get(one) is not None}
            self._gpu.add(name)
            sides = {one.split("-")[0] for one in self._gpu}
            if len(sides) > 1:
                self.violated(f"the GPU is held by {sorted(self._gpu)}")

    def leave_gpu(self, name: str) -> None:
        self._gpu.discard(name)

    def trained(self, batch: Batch, before: str, digest: str) -> None:
        """Keep the trainer's own record of an update, and compare it with those before."""
        for group in batch.groups:
            step = self._steps.setdefault(group.group_id, batch.step)
            if step != batch.step:
                self.violated(f"{group.group_id}: trained in step {step} and step {batch.step}")
        self.violations += stale_rollouts(batch, self.bounds.allowed)
        self.updates.add((batch.step, before, digest))

    def acted(self, rollout_id: str, seed: int, call_id: str) -> None:
        """Keep the effect of an agent's tool: it outlives the driver."""
        self.effects[rollout_id, seed, call_id] += 1

    # ---- faults

    def at_tick(self, tick: int) -> float:
        """Let the faults of this tick strike; return the tick of the next one."""
        for fault in [fault for fault in self._at_ticks if fault.tick <= tick]:
            self._at_ticks.remove(fault)
            self._strike(fault)
        return min((fault.tick for fault in self._at_ticks), default=math.inf)

    def at_call(self, process: SimProcess, method: str, phase: str) -> None:
        key = (process.name, method, phase)
        if key in self._at_calls:
            self._passed[key] += 1
            for fault in self._at_calls[key]:
                if fault.passing == self._passed[key]:
                    self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self.happened.append(f"{self.loop.time():.3f} {fault}")
        follows = self.faults.index(fault) + 1
        if follows < len(self.faults) and self.faults[follows].after_s is not None:
            self.loop.call_later(
                self.faults[follows].after_s or 0.0, self._strike, self.faults[follows]
            )
        stops = self.config.watchdog.action == "stop" and fault.kind in ("stall", "lose")
        if not self.is_training or stops or fault.kind in ("full", "stop", *FILE_KINDS):
            self.excuses.append(str(fault))
        if fault.kind == "restart":
            self.loop.is_killed = True
        elif fault.kind == "stop":
            if self._on_signal is not None and self._signals < 2:  # the third kills the process
                self._signals += 1
                self._on_signal(2, None)
        elif fault.kind == "scale":
            self.loop.create_task(self._scale(), name=USER)
        elif fault.kind == "full":
            self.disk.full = fault.target
            self.loop.call_later(fault.seconds or 1.0, self._has_room)
        elif fault.kind == "slow disk":
            self.disk.slowness = 200.0
        elif fault.kind in FILE_KINDS:
            share = _chance("what is left", self.seed)
            self.disk.strike(fault.kind, self.folder / "journal.db", share)
            if fault.kind == "truncate":
                self.loop.is_killed = self.has_lost_records = True
                self._steps.clear()  # what the journal has forgotten may be done again
        elif (process := self.processes.get(fault.target)) is not None:
            self._strike_process(fault, process)

    async def _scale(self) -> None:
        """Ask for another number of engines, as `penstock scale` does."""
        if self.scale is not None:
            with contextlib.suppress(PenstockError):  # the user's answer
                await self.scale(self.random.randrange(1, 4))

    def _has_room(self) -> None:
        self.disk.full = ""

    def _strike_process(self, fault: Fault, process: SimProcess) -> None:
        if fault.kind == "kill":
            process.die()
        elif fault.kind == "stall":
            process.stall(fault.seconds)
        elif fault.kind == "slow":
            process.pace = 20.0
        elif fault.kind == "lose":
            process.loses += 1


def draw_config(chance: random.Random, seed: int, settings: dict[str, Any]) -> Config:
    """Draw the settings of a small run; those that are given stay."""
    asynchronous = chance.random() < 0.7
    staleness = chance.randrange(3) if asynchronous else 0
    every = chance.choice((1, 1, 2))
    ranks = chance.choice((1, 1, 1, 2))
    several = random.Random(f"tasks of {seed}").random() < 0.2
    tree: dict[str, Any] = {
        "seed": 1,
        "tasks": _tasks(seed, 2 if several else 1),
        "journal": {"keep_payloads": _kept_payloads(seed)},
        "sampling": {"num_generations": 2, "max_tokens": 40},
        "engine": {"max_slots": 4, "update": chance.choice(("together", "together", "rolling"))},
        "produce": {
            "strategy": "async" if asynchronous else "sync",
            "max_staleness": staleness,
            "enable_partial_rollout": asynchronous and chance.random() < 0.3,
            "over_sample_threshold": chance.choice((0.0, 0.5)) if asynchronous else 0.0,
            "is_valid_sample": "simulation.parts:refuse_some"
            if _chance("rule", seed) < 0.2
            else "",
        },
        "train": {"steps": chance.choice((3, 4)), "groups_per_step": 2},
        "sync": {"every_steps": every, "kind": "shared_memory"},
        "checkpoint": {"every_steps": chance.choice((0, 1, 2))},
        "eval": _evaluation(chance),
        "track": {"trackers": []},
        "watchdog": {"action": chance.choice(("restart", "restart", "restart", "stop"))},
        "launch": {
            "num_producers": chance.choice((1, 2, 2, 3)),
            "num_consumers": ranks,
            "colocate": chance.random() < 0.25,
            "restart_backoff_s": chance.choice((0.0, 1.0)),
        },
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return validate(tree)


def _tasks(seed: int, number: int) -> dict[str, Any]:
    """Draw which of the tasks have an agent."""
    chance = random.Random(f"agents of {seed}")
    fails = _chance("rewards", seed) < 0.2
    task = {**_TASK, "rewards": [{"type": "simulation.parts:BusyReward"}]} if fails else _TASK
    return {
        name: {**task, "agent": AGENT} if chance.random() < 0.25 else task
        for name in TASKS[:number]
    }


def _chance(what: str, seed: int) -> float:
    return random.Random(f"{what} of {seed}").random()


def _kept_payloads(seed: int) -> str:
    return random.Random(f"payloads of {seed}").choice(("all", "all", "all", "text", "none"))


def _evaluation(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.7:
        return {"tasks": {}, "at_start": False}
    return {
        "tasks": {"held": _TASK},
        "max_problems": 3,
        "every_steps": chance.choice((1, 2)),
        "at_start": chance.random() < 0.5,
        "blocking": chance.random() < 0.3,
    }
