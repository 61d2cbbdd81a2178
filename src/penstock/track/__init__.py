"""Where figures go: a JSONL file always, and the trackers that the config names. Layer 1."""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.track.console:ConsoleTracker",
    "tensorboard": "penstock.track.tensorboard:TensorBoardTracker",
    "wandb": "penstock.track.wandb:WandbTracker",
}
