"""The launcher of a Ray cluster: engines and trainer ranks are actors, placed by the nodes' resources.

Without an address it starts a cluster of this machine alone and stops it after the run; with an address it
joins that cluster. `placement.py` decides which actor runs on which node. Weights go through shared memory,
and from node to node (`workers/pool/weights.py`).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config import Config, LaunchConfig, SamplingConfig
from penstock.errors import UserError, WorkerDied
from penstock.weights import DELTA, sync_kind
from penstock.workers.part_factories import (
    AGENT,
    DISTRIBUTOR,
    ENGINE,
    TRAINER,
    weights_of_here,
)
from penstock.workers.pool.requests import Generate
from penstock.workers.pool.weights import NodeCopies
from penstock.workers.ray.actor import ActorWorker
from penstock.workers.ray.agents import ActorAgentLoop
from penstock.workers.ray.placement import Placement, PlacementSlot, bundles
from penstock.workers.supervise.supervised import (
    Restarts,
    Supervised,
    SupervisionCallbacks,
    Worker,
    nothing,
)
from penstock.workers.supervise.trainer import as_one_worker
from penstock.workers.workers import (
    Engines,
    Workers,
    all_or_first_error,
    start_engine_workers,
    start_workers,
)

_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_TOKEN_TIMEOUT_S = 5.0
_TOKEN = (
    "the environment variables RAY_AUTH_MODE=token and RAY_AUTH_TOKEN with the cluster's token, which "
    "`ray get-auth-token` shows on its head node"
)


async def start(
    config: Config, total_steps: int, log_folder: Path, events: SupervisionCallbacks
) -> Workers:
    """Join or start the cluster, place the actors, build their parts."""
    settings = config.launch.model_copy(update={"num_producers": config.num_engines})
    config = config.model_copy(update={"launch": settings})
    num_agents = sum(task.agent_actors for task in config.tasks.values())
    async with _placed(config, num_agents, log_folder, events) as actors:
        trainer = Supervised("trainer", _spawn_trainer(actors, total_steps), settings, events)
        make_engine = partial(_make_engine, actors)
        engines = [make_engine(number) for number in range(settings.num_producers)]
        return await start_workers(
            config,
            total_steps,
            events,
            trainer,
            engines,
            make_engine=make_engine,
            clean_up=actors.release,
            copies=actors.copies,
            start_agent=partial(_start_agent, actors),
        )


async def start_engines(
    config: Config, log_folder: Path, events: SupervisionCallbacks, generate: Generate
) -> Engines:
    """Place engines that hold adapters; this process, on a node of the cluster, publishes their weights."""
    alone = config.launch.model_copy(update={"num_consumers": 0, "colocate": False})
    config = config.model_copy(update={"launch": alone})
    async with _placed(config, 0, log_folder, events) as actors:
        import ray

        engines = [_make_engine(actors, n, adapters=True) for n in range(alone.num_producers)]
        publish, free = weights_of_here(config, ray.get_runtime_context().get_node_id())

        def clean_up() -> None:
            free()
            actors.release()

        return await start_engine_workers(
            config, events, engines, publish, generate, clean_up=clean_up, copies=actors.copies
        )


@asynccontextmanager
async def _placed(
    config: Config, num_agents: int, log_folder: Path, events: SupervisionCallbacks
) -> AsyncIterator[_Actors]:
    """Join or start the cluster and reserve places; what is not started inside gives them back."""
    kind, ours = sync_kind(config), connect(config.launch)
    placement = Placement(config.launch, ours, events.note, num_agents=num_agents)
    actors = _Actors(config, log_folder, placement, kind, events, ours)
    try:
        await placement.reserve()
        log_folder.mkdir(parents=True, exist_ok=True)
        yield actors
    except BaseException:  # a failed or stopped start: nothing stays reserved
        actors.release()
        raise


def connect(settings: LaunchConfig) -> bool:
    """Connect to Ray; return whether this call has started the cluster, which must then be stopped."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the run reports them itself
    if not settings.address and "ray" not in sys.modules:
        # Ray's ports are open to the network: who has no token is refused. A process reads mode and
        # token once; where Ray was imported before, what that process has stays.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    if ray.is_initialized():
        return False
    if os.environ.get("RAY_AUTH_MODE") != "token" and _asks_for_token(settings.address):
        raise UserError(
            f"launch.address: got {settings.address!r}, a cluster that asks for a token, allowed: {_TOKEN}"
        )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    stops = signal.getsignal(signal.SIGTERM)
    try:
        if settings.address:
            ray.init(address=settings.address, **quiet)
        else:
            needs = [need for part in bundles(settings) for need in part]
            asked = sum(need.resources["CPU"] for need in needs)
            cores = max(os.cpu_count() or 1, -int(-asked // 1))  # Ray only counts CPUs
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = settings.address or "this machine"
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if settings.address:
            line += f"; if it asks for a token: {_TOKEN}"
        raise UserError(
            f"launch.address: got {where!r}, allowed: a Ray cluster that answers: {line}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stops)  # Ray's own would end the process at once
    return not settings.address


def _asks_for_token(address: str) -> bool:
    """Whether a cluster at HOST:PORT refuses a call without a token; False where gRPC is not installed.

    Ray itself would try for a long time, and then say only that it could not connect.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or importlib.util.find_spec("grpc") is None:
        return False
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=_TOKEN_TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def disconnect(ours: bool) -> None:
    if ours:
        import ray

        ray.shutdown()


async def _start_agent(
    actors: _Actors, workers: Workers, task: str, sampling: SamplingConfig, is_chat: bool
) -> ActorAgentLoop:
    """Start the actors of a task's agent loop; each is restarted like an engine when it dies."""
    assert workers.engine is not None, "a cluster has engines"
    events, config = actors.events, actors.config
    loop = ActorAgentLoop(workers.engine, events.waits, events.note)

    async def spawn(name: str) -> Worker:
        worker = await actors.create(name, 1, actors.placement.agent_options())
        await actors.build(worker, AGENT, config, task, sampling, is_chat)
        loop.serve(worker)
        return worker

    try:
        for number in range(config.tasks[task].agent_actors):
            name = f"agent-{task}-{number}"
            actor = Supervised(name, partial(spawn, name), config.launch, events)
            actor.restart_with(Restarts(prepare=nothing))  # a loop has no state
            workers.supervised[name] = actor
            loop.add(actor)
        await all_or_first_error(*(actor.start() for actor in loop.actors))
    except BaseException:  # a failed or stopped start: no actor may outlive it
        await loop.close()
        raise
    return loop


@dataclass(slots=True)
class _Actors:
    """Creates the actors of a run, in their placement slots, and builds their parts."""

    config: Config
    log_folder: Path
    placement: Placement
    sync: str
    events: SupervisionCallbacks
    ours: bool  # the cluster ends with the run
    copies: NodeCopies = field(init=False)

    def __post_init__(self) -> None:
        spawn = self._spawn_distributor
        self.copies = NodeCopies(spawn, self.config.launch, self.events)

    def release(self) -> None:
        """Give back the places, and end a cluster of this run."""
        self.placement.release()
        disconnect(self.ours)

    async def create(self, name: str, threads: int, options: dict[str, Any]) -> ActorWorker:
        timeout_s, log = self.config.launch.start_timeout_s, self.log_folder / f"{name}.log"
        return await ActorWorker.create(name, log, threads, timeout_s, **options)

    async def place(self, name: str, threads: int, slot: PlacementSlot) -> ActorWorker:
        return await self.placement.start_actor(name, slot, partial(self.create, name, threads))

    async def build(self, worker: ActorWorker, factory: str, *args: Any) -> ActorWorker:
        timeout_s = self.config.launch.start_timeout_s
        try:
            await worker.build(factory, *args, timeout_s=timeout_s)
        except WorkerDied:
            raise
        except BaseException:  # a part that fails or is stopped: its actor must not outlive it
            await worker.close()
            raise
        return worker

    async def _spawn_distributor(self, name: str, node: str, folder: str) -> Worker:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        worker = await self.create(name, 1, {"num_cpus": 0, "scheduling_strategy": where})
        how = (folder, node, worker.address, self.sync == DELTA)
        return await self.build(worker, DISTRIBUTOR, *how)


def _make_engine(actors: _Actors, number: int, *, adapters: bool = False) -> Supervised:
    name, placement = f"engine-{number}", actors.placement
    slot = placement.take(name, number)

    free = partial(placement.free, slot, name)

    async def spawn() -> Worker:
        try:
            threads = actors.config.of_engine(number).engine.threads
            worker = await actors.place(name, threads, slot)
            actors.copies.place_engine(number, worker.node)
            await actors.build(worker, ENGINE, actors.config, number, None, adapters)
        except BaseException:  # a failed or stopped start: its slot is for the next engine
            if not slot.has_served:
                free()
            raise
        slot.has_served = True
        return worker

    slot.worker = Supervised(name, spawn, actors.config.launch, actors.events, when_closed=free)
    return slot.worker


def _spawn_trainer(actors: _Actors, total_steps: int) -> Callable[[], Awaitable[Worker]]:
    config, world = actors.config, actors.config.launch.num_consumers
    names = ["trainer"] if world == 1 else [f"trainer-{rank}" for rank in range(world)]
    folders: dict[str, str] = {}  # node -> folder of weights, which a restarted trainer uses again

    async def spawn() -> Worker:
        slots = actors.placement.consumers
        await actors.placement.find_nodes(names, slots)
        ranks = await all_or_first_error(
            *(
                actors.place(name, config.train.threads, slot)
                for name, slot in zip(names, slots, strict=True)
            )
        )
        meeting, node = (ranks[0].address, ranks[0].free_port), ranks[0].node
        link = (actors.sync, folders.get(node, ""))
        await all_or_first_error(
            *(
                actors.build(worker, TRAINER, config, total_steps, *link, rank, meeting, node)
                for rank, worker in enumerate(ranks)
            )
        )
        for slot in slots:
            slot.has_served = True
        folders[node] = await ranks[0].call("weights_folder")
        return as_one_worker(ranks, config.train.parallel)

    return spawn
