"""Every kind of wait is made to hang once, in the real part that opens it, and the watchdog names
it.

The kinds come from the code: the first test fails if a kind has no hang here.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import LaunchConfig, SamplingConfig
from penstock.data.sampler import Sampler
from penstock.engine.protocol import EngineStats
from penstock.rollout import AsyncProduceStrategyConfig, ProduceProgress, Producer, ProduceTask
from penstock.rollout.evaluation.evaluate import EvalTask, Evaluations
from penstock.rollout.progress import ReplayBuffer
from penstock.store.journal import Journal
from penstock.types import Batch, StepReport, WeightHandle
from penstock.waits import WaitInOrder, WaitKind
from penstock.workers.pool.pool import EnginePool
from penstock.workers.pool.weights import NodeCopies
from penstock.workers.supervise.supervised import CALLS, SupervisionCallbacks
from penstock.workers.supervise.trainer import RestartingTrainer
from stages.fake_engine import FakeEngine
from stages.rewards import CountingReward
from stages.rollouts import make_prompt
from stages.source_code import FILES, nodes
from stages.watching import (
    STALL_S,
    Called,
    Silent,
    SilentReward,
    SilentWorker,
    WatchdogStage,
    agent,
    one_rollout,
)

HANDLE = WeightHandle(version=2, digest="digest-2", kind="none")
NOTHING = EngineStats(
    policy_version=0, digest="", running=0, waiting=0, tokens_generated=0, busy_s=0.0
)
Hang = Callable[[WatchdogStage], Awaitable[Any]]
HANGS: dict[WaitKind, tuple[Hang, str]] = {}


def hangs(kind: WaitKind, named: str) -> Callable[[Hang], Hang]:
    def keep(hang: Hang) -> Hang:
        HANGS[kind] = (hang, named)
        return hang

    return keep


@hangs(WaitKind.GENERATE, "engine-0 has not answered generate for 60 s; the waiter waits")
async def an_engine(stage: WatchdogStage) -> None:
    await agent(stage, Silent(), CountingReward()).generate_group([one_rollout()])


@hangs(WaitKind.REWARD, "rewards of sums has not answered reward (sums:0.0) for 60 s")
async def a_reward(stage: WatchdogStage) -> None:
    await agent(stage, FakeEngine(), SilentReward()).generate_group([one_rollout()])


def a_producer(stage: WatchdogStage, journal: Any, agent_loop: Any) -> Producer:
    buffer = ReplayBuffer()
    sampler = Sampler(
        [make_prompt()], task_name="sums", prompt_repeat_k=1, seed=0, replay_buffer=buffer
    )
    task = ProduceTask(
        name="sums",
        weight=1.0,
        strategy=AsyncProduceStrategyConfig().build(sync_weights_interval=1),
        agent_loop=agent_loop,
        sampler=sampler,
    )
    return Producer(
        tasks=[task],
        replay_buffer=buffer,
        journal=journal,
        progress=ProduceProgress.build(["sums"]),
        groups_per_step=1,
        waits=stage.waits,
    )


class DeafWriter:
    """Takes records, and never gets one to the disk."""

    def submit(self, record: Any) -> None: ...

    def durable(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class DeafJournal(Journal):
    def __init__(self, stage: WatchdogStage, writer: DeafWriter | None = None) -> None:
        self._waits = stage.waits
        self._landings = WaitInOrder(stage.waits, "journal", WaitKind.SEND, responder="journal")
        self._writer = writer or DeafWriter()  # type: ignore[assignment]
        self._submit = self._writer.submit  # type: ignore[union-attr]
        self._durable = self._writer.durable  # type: ignore[union-attr]


@hangs(WaitKind.SEND, "journal has not answered send (sums:0) for 60 s")
async def a_group_that_cannot_land(stage: WatchdogStage) -> None:
    agent_loop = agent(stage, FakeEngine(), CountingReward())
    await a_producer(stage, DeafJournal(stage), agent_loop).run()


@hangs(WaitKind.WAIT, "nothing has moved for 60 s: produce sums waits for wait (")
async def a_producer_without_new_weights(stage: WatchdogStage) -> None:
    class Memory(DeafWriter):
        def durable(self) -> asyncio.Future[None]:
            done = super().durable()
            done.set_result(None)
            return done

    journal = DeafJournal(stage, Memory())
    agent_loop = agent(stage, FakeEngine(), CountingReward())
    await a_producer(stage, journal, agent_loop).run()


@hangs(WaitKind.JOURNAL, "journal has not answered journal (step 3) for 60 s")
async def a_step_that_cannot_be_written_down(stage: WatchdogStage) -> None:
    report = StepReport(step=3, policy_version=3, digest="d")
    await DeafJournal(stage).commit_step(report)


def with_trainer(method: str, *args: Any) -> Hang:
    async def hang(stage: WatchdogStage) -> None:
        trainer = RestartingTrainer(await stage.silent("trainer"))
        await getattr(trainer, method)(*args)

    return hang


for kind, method, arguments in (
    (WaitKind.TRAIN, "train", [Batch(step=1, groups=())]),
    (WaitKind.PUBLISH, "publish", []),
    (WaitKind.CHECKPOINT, "snapshot", ["folder"]),
    (WaitKind.WRITE_CHECKPOINT, "write_snapshot", []),
    (WaitKind.LOAD, "load", ["folder"]),
    (WaitKind.ASK, "identity", []),
):
    HANGS[kind] = (with_trainer(method, *arguments), f"trainer has not answered {kind} for 60 s")


@hangs(WaitKind.COLLECTIVE, "distributor-1 has not answered collective for 60 s")
async def a_node_that_receives_nothing(stage: WatchdogStage) -> None:
    async def spawn(name: str, node: str, folder: str) -> SilentWorker:
        return SilentWorker(name, endpoint=None)

    events = SupervisionCallbacks(waits=stage.waits, note=lambda text: None)
    copies = NodeCopies(spawn, LaunchConfig(), events)
    copies.place_engine(0, "there")
    await copies.copy_for(0, replace(HANDLE, location={"node": "here"}))


@hangs(WaitKind.SYNC, "engine-0 has not answered sync for 60 s")
async def weights_that_never_arrive(stage: WatchdogStage) -> None:
    engines = EnginePool([await stage.silent("engine-0", stats=NOTHING)], stage.events)
    await engines.update_weights(2, HANDLE)


def with_engine(method: str) -> Hang:
    async def hang(stage: WatchdogStage) -> None:
        engines = EnginePool([await stage.silent("engine-0", stats=NOTHING)], stage.events)
        await getattr(engines, method)()

    return hang


for kind in (WaitKind.PAUSE, WaitKind.SLEEP, WaitKind.WAKE):
    HANGS[kind] = (with_engine(str(kind)), f"engine-0 has not answered {kind} for 60 s")


@hangs(WaitKind.EVAL, "nothing has moved for 60 s: eval waits for eval (sums after step 4)")
async def an_evaluation(stage: WatchdogStage) -> None:
    task = EvalTask(
        name="sums",
        problems=[make_prompt()],
        reward=SilentReward(),
        sampling=SamplingConfig(),
        num_generations=1,
        decode=lambda ids: "text",
        seed=0,
    )
    evaluations = Evaluations(
        tasks=[task],
        folder=Path("nowhere"),
        engine=FakeEngine(),
        waits=stage.waits,
        log=lambda *args: None,
        note=lambda text: None,
    )
    await evaluations._one(task, 4)


@hangs(WaitKind.RESTART, "nothing has moved for 60 s: driver waits for restart (engine-0)")
async def a_worker_that_does_not_come_back(stage: WatchdogStage) -> None:
    engine = await stage.silent("engine-0")
    engine._settled.clear()
    await engine.ready()


def test_every_kind_of_wait_has_a_hang() -> None:
    assert set(HANGS) == set(WaitKind)


@pytest.mark.parametrize("kind", WaitKind)
def test_a_hang_is_named(kind: WaitKind) -> None:
    stage = WatchdogStage("report")
    hang, named = HANGS[kind]
    stage.run(hang(stage), seconds=1.5 * STALL_S)
    assert len(stage.notes) == 1
    assert stage.notes[0].startswith(f"stuck: {named}")


@pytest.mark.parametrize("method", CALLS)
def test_every_call_of_a_part_is_named(method: str) -> None:
    stage = WatchdogStage()
    line = stage.run(getattr(Called("trainer", Silent(), stage.waits), method)())
    assert line.startswith(f"stuck: trainer has not answered {CALLS[method]} for 60 s")


@pytest.mark.slow
def test_no_wait_is_opened_under_a_name_of_its_own() -> None:
    """The second argument of every `waits.wait` is a kind, or a name that the type checker holds to one."""
    used: set[str] = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and _opens_a_wait(node.func):
                kind = node.args[1]
                if isinstance(kind, ast.Name):
                    continue
                assert isinstance(kind, ast.Attribute), f"{path}: {ast.unparse(node)}"
                assert isinstance(kind.value, ast.Name)
                assert kind.value.id == "WaitKind"
                used.add(WaitKind[kind.attr])
    assert used | set(CALLS.values()) == set(WaitKind)


def _opens_a_wait(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "wait"
        and ast.unparse(function.value).endswith("waits")
    )
