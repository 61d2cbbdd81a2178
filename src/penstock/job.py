"""Every part of one run, built from its config and joined. Layer 6.

`open_job` is where a config becomes objects: data, rewards, agent loops and strategies here, engine
and trainer wherever the launcher puts them. It starts nothing that trains; the loop does that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock.agent import AGENTS
from penstock.algo.settings import resolve
from penstock.checkpoint import CheckpointStore
from penstock.config import Config, SamplingConfig
from penstock.data import Dataset, load_dataset
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.data.sampler import Sampler
from penstock.demo import resolve_model_path
from penstock.engine.protocol import InferenceEngine, SamplingParams
from penstock.errors import UserError
from penstock.evaluate import EvalTask
from penstock.journal import Journal
from penstock.launch import LAUNCHERS
from penstock.launch.services import TrainerPart, Workers
from penstock.plugins import load
from penstock.produce import (
    AsyncProduceStrategyConfig,
    Producer,
    ProduceProgress,
    ProduceStrategy,
    ProduceTask,
    SyncProduceStrategyConfig,
)
from penstock.replay import ReplayBuffer
from penstock.reward import build_reward
from penstock.reward.protocol import Reward
from penstock.run_folder import RunFolder
from penstock.track.fanout import Fanout
from penstock.track.protocol import RunInfo
from penstock.track.rollout_log import RolloutLog


@dataclass(slots=True, kw_only=True)
class Job:
    """What the loop drives."""

    config: Config
    folder: RunFolder
    total_steps: int
    engine: InferenceEngine
    trainer: TrainerPart
    producer: Producer
    journal: Journal
    checkpoints: CheckpointStore
    eval_tasks: list[EvalTask]
    tracker: Fanout
    rollout_log: RolloutLog
    placement: str  # who sits where
    activity: str = "starting"  # what the loop is doing now, for the display
    rewards: list[Reward] = field(default_factory=list)


@asynccontextmanager
async def open_job(config: Config, folder: RunFolder, *, first_step: int = 0) -> AsyncIterator[Job]:
    """Build the parts, and close every one of them at the end, whatever happened."""
    ...
