"""Producing groups: when to launch a group, what happens to it, and which groups a step trains.

The producer, its strategies, the replay buffer and the progress counts. May import the journal and
data; knows no engine and no trainer, and weights only by their version number.
"""

from __future__ import annotations

from penstock.data.sampler import Sampler
from penstock.rollout.agent_loop import AgentLoop
from penstock.rollout.group_runner import IsValidSample, ProduceContext
from penstock.rollout.producer import Producer, ProduceTask
from penstock.rollout.progress import (
    ProduceProgress,
    ProducerSnapshot,
    ReplayBuffer,
    TaskShares,
    TaskSnapshot,
)
from penstock.rollout.strategy import (
    STRATEGIES,
    AsyncProduceStrategy,
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceStrategy,
    ProduceStrategyConfig,
    ShouldContinue,
    SyncProduceStrategy,
    SyncProduceStrategyConfig,
    calculate_stale_threshold,
    default_is_valid_sample_fn,
    default_should_continue_fn,
    strategy_config,
)

__all__ = [
    "STRATEGIES",
    "AgentLoop",
    "AsyncProduceStrategy",
    "AsyncProduceStrategyConfig",
    "IsValidSample",
    "ProduceBatchStatus",
    "ProduceContext",
    "ProduceProgress",
    "ProduceStrategy",
    "ProduceStrategyConfig",
    "ProduceTask",
    "Producer",
    "ProducerSnapshot",
    "ReplayBuffer",
    "Sampler",
    "ShouldContinue",
    "SyncProduceStrategy",
    "SyncProduceStrategyConfig",
    "TaskShares",
    "TaskSnapshot",
    "calculate_stale_threshold",
    "default_is_valid_sample_fn",
    "default_should_continue_fn",
    "strategy_config",
]
