"""The settings of a run: one typed tree, read from a TOML file and `key=value` overrides.

`tree.py`, `producing.py` and `launching.py` declare every key, `source.py` reads files and overrides,
`changes.py` decides which keys a resumed run may change. A new key goes into its table and is read
where it acts. Nothing here builds a part or imports torch.
"""

from __future__ import annotations

from penstock.config.launching import LaunchConfig, RayOptions
from penstock.config.producing import AnnealConfig, ProduceConfig, ProduceSettings, SamplingConfig
from penstock.config.section import Section
from penstock.config.tree import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    CorrectionConfig,
    EngineConfig,
    EvalConfig,
    EvalTaskConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PtxConfig,
    RewardConfig,
    RunConfig,
    SyncConfig,
    TaskConfig,
    TaskDataConfig,
    TrackConfig,
    TrainConfig,
    WatchdogConfig,
)

__all__ = [
    "AlgorithmConfig",
    "AnnealConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalTaskConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ParallelConfig",
    "ProduceConfig",
    "ProduceSettings",
    "PtxConfig",
    "RayOptions",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SyncConfig",
    "TaskConfig",
    "TaskDataConfig",
    "TrackConfig",
    "TrainConfig",
    "WatchdogConfig",
]
