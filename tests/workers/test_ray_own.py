"""Clusters that the tests start: of one run, with a full object store, and of producers as actors."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.compat.producers import join_group, send_state_dict
from penstock.config import ModelConfig
from penstock.config.demo import policy_path
from penstock.errors import PartFailed
from penstock.run.job import Job
from penstock.store.run_folder import RunFolder
from penstock.training.policy import load_policy
from penstock.weights.digest import digest_of
from stages.disturbed_run import config_of, digests, run
from stages.own_children import own_children
from stages.simple_producer import ARGUMENTS, FollowingProducer
from stages.tiny_run import CrashServer, assert_sound

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


OWN_CLUSTER = """
import os, subprocess, sys
from penstock.config import LaunchConfig
from penstock.workers.ray.cluster import connect, disconnect

ours = connect(LaunchConfig(kind="ray", num_producers=1))
import ray

where = ray.get_runtime_context().gcs_address
code = f"import ray; ray.init({where!r}, log_to_driver=False); print(len(ray.nodes()))"
foreign = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
for environment in (os.environ, {**os.environ, **foreign}):
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    print("nodes:", done.stdout.strip())
disconnect(ours)
"""


def test_a_cluster_of_one_run_refuses_who_has_no_token() -> None:
    """In a process of its own: a process reads Ray's mode and token once."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", OWN_CLUSTER], env=clean, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-2:] == ["nodes: 1", "nodes: "], done.stderr


def test_one_call_starts_a_cluster_does_a_whole_run_and_leaves_nothing(tmp_path: Path) -> None:
    from penstock.compat.distributed import launch_distributed

    before = own_children()
    folder = launch_distributed(
        num_producers=1,
        num_consumer_procs=1,
        num_episodes=1,
        train_batch_size=4,
        train_dataset_config={"path": "addition", "data_options": {"size": 8}},
        model_config={"path": "demo"},
        generate_config={"max_new_tokens": 8},
        grpo_config={"algo": "RLOO", "reward_fn_type": "think_answer_tags"},
        num_generations=2,
        n_behind=1,
        run_dir=str(tmp_path),
        run_name="call",
        overrides={"track": {"trackers": []}},
    )
    assert len(digests(RunFolder(folder))) == 2  # 8 prompts, 4 a step
    assert not ray.is_initialized()
    assert own_children() == before


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_run_whose_own_cluster_dies_ends_in_one_line_and_is_resumed(
    server: CrashServer, process: str
) -> None:
    """No node joins a cluster that a run has started: the run must not wait for one."""
    own_cluster = ["launch.kind=ray", "launch.restart_backoff_s=0", "checkpoint.every_steps=1"]
    kill = f"sh pkill -KILL -P $PPID -x {process}"  # of the driver's children
    faults = [("before step", 3, kill), ("before step", 3, "SIGKILL trainer")]
    run_folder, code = server.train(process, *own_cluster, then=faults)
    assert code == 1, server.output()
    assert "Traceback" not in server.output()
    if process == "raylet":
        assert "has lost its only node" in server.output().strip().splitlines()[-1]
    assert server.run("resume", str(run_folder.path), "launch.kind=inline") == 0, server.output()
    assert_sound(run_folder)


@pytest.fixture
def full_cluster() -> Iterator[None]:
    """Start a cluster with 80 MB for objects and a disk that counts as full."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    full = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0001}
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _system_config=full,
    )
    yield
    ray.shutdown()


def test_a_run_whose_object_store_is_full_ends_with_one_line(
    full_cluster: None, tmp_path: Path
) -> None:
    """Other objects fill the store and the disk before a batch is sent."""
    others: list[Any] = []

    def fill() -> None:
        for size in (2**22, 2**18, 2**15):
            with suppress(ray.exceptions.OutOfDiskError):
                while True:
                    others.append(ray.put(np.zeros(size, np.uint8)))

    async def disturb(job: Job, step: int) -> None:
        if step == 2:
            await asyncio.to_thread(fill)

    large = ["sampling.num_generations=256", "engine.max_slots=64"]
    words = ["launch.kind=ray", "produce.strategy=sync", *large]  # a batch becomes an object
    with pytest.RaisesGroup(pytest.RaisesExc(PartFailed, match="trainer: .*disk")) as raised:
        run(config_of(tmp_path, "full", *words), disturb)
    assert "\n" not in str(raised.value.exceptions[0])
    assert len(digests(RunFolder(tmp_path / "full"))) == 1  # which a resume continues


@pytest.fixture
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}  # an actor's class is found by its module
    size = {"num_cpus": 4, "object_store_memory": 2**27, "runtime_env": {"env_vars": path}}
    ray.init(address="local", **size, **quiet)
    yield
    ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_producers_as_actors_follow_the_weights_that_are_broadcast_to_them(cluster: None) -> None:
    """Two producers run over their prompts; this process acts as their trainer."""
    settings = ModelConfig(path="demo")
    model = load_policy(str(policy_path()), settings, torch.float32)
    make = ray.remote(FollowingProducer)
    fields = {**ARGUMENTS, "num_episodes": 1}  # 4 prompts each, in batches of 2
    producers = [make.remote(**{**fields, "producer_idx": number}) for number in range(2)]
    assert [done for _, _, done in ray.get([one.account.remote() for one in producers])] == [0, 0]
    where = f"tcp://127.0.0.1:{free_port()}"
    joining = [
        one.init_collective_group.remote(3, rank, "gloo", "weights", where)
        for rank, one in enumerate(producers, 1)
    ]
    group = join_group(3, 0, "gloo", "weights", where, timeout_s=60)
    assert ray.get(joining) == [None, None]
    loops = [one.loop.remote() for one in producers]
    for version in (1, 2):
        state = {name: p.detach() * (1 + version) for name, p in model.named_parameters()}
        send_state_dict(group, state)
    assert ray.get(loops) == [4, 4]
    digest = digest_of(state.items())
    assert ray.get([one.account.remote() for one in producers]) == [(2, digest, 4)] * 2
    prompt = torch.tensor([[5, 6, 7]])
    made = ray.get(producers[0].rollout.remote(prompt, torch.ones_like(prompt), gt_answer=["1"]))
    assert made["input_ids"].shape[:2] == (1, 3)
