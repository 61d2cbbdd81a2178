"""Producing groups: when to launch them, what becomes of each, and which batch a step gets.

The producer, its strategies, the replay buffer and the progress counts. May import the journal and
data; it knows no engine and no trainer, weights are a version number here.
"""

from __future__ import annotations

from penstock.produce.context import (
    IsValidSample,
    ProduceBatchStatus,
    ProduceContext,
    ShouldContinue,
)
from penstock.produce.display import task_lines
from penstock.produce.failures import FailurePolicy
from penstock.produce.lane import ProduceTask
from penstock.produce.pending import InFlight, PendingSet
from penstock.produce.producer import Producer
from penstock.produce.progress import ProduceProgress
from penstock.produce.shares import TaskShares
from penstock.produce.snapshot import ProducerSnapshot, TaskSnapshot, Wait
from penstock.produce.strategy import (
    AsyncProduceStrategy,
    AsyncProduceStrategyConfig,
    ProduceStrategy,
    SyncProduceStrategy,
    SyncProduceStrategyConfig,
    accept_all,
    calculate_stale_threshold,
    strategy_config,
    until_batch_is_full,
)

__all__ = [
    "AsyncProduceStrategy",
    "AsyncProduceStrategyConfig",
    "FailurePolicy",
    "InFlight",
    "IsValidSample",
    "PendingSet",
    "ProduceBatchStatus",
    "ProduceContext",
    "ProduceProgress",
    "ProduceStrategy",
    "ProduceTask",
    "Producer",
    "ProducerSnapshot",
    "ShouldContinue",
    "SyncProduceStrategy",
    "SyncProduceStrategyConfig",
    "TaskShares",
    "TaskSnapshot",
    "Wait",
    "accept_all",
    "calculate_stale_threshold",
    "strategy_config",
    "task_lines",
    "until_batch_is_full",
]
