"""The settings of a run: one typed tree, read from a TOML file and `key=value` overrides.

`sections.py` declares every key, `tree.py` the whole, `source.py` reads files and overrides, `mistakes.py`
words what is wrong, `changes.py` decides which keys a resumed run may change. A new key goes into its table
and is read where it acts. Nothing here builds a part or imports torch.
"""

from __future__ import annotations

from penstock.config.launch import LaunchConfig, ProducerKindConfig, RayOptions
from penstock.config.sections import (
    AlgorithmConfig,
    AnnealConfig,
    CheckpointConfig,
    EvalConfig,
    EvalTaskConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    ProduceConfig,
    ProduceSettings,
    PtxConfig,
    RewardConfig,
    SamplingConfig,
    Section,
    TaskConfig,
    TaskDataConfig,
    TeacherConfig,
    TrainConfig,
    WatchdogConfig,
)
from penstock.config.tree import Config

__all__ = [
    "AlgorithmConfig",
    "AnnealConfig",
    "CheckpointConfig",
    "Config",
    "EvalConfig",
    "EvalTaskConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProduceConfig",
    "ProduceSettings",
    "ProducerKindConfig",
    "PtxConfig",
    "RayOptions",
    "RewardConfig",
    "SamplingConfig",
    "Section",
    "TaskConfig",
    "TaskDataConfig",
    "TeacherConfig",
    "TrainConfig",
    "WatchdogConfig",
]
