"""Where metrics go: metrics.jsonl always, and the trackers that the config names.

A tracker shows metrics; its faults never stop a run.
"""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.track.console:ConsoleTracker",
    "tensorboard": "penstock.track.tensorboard:TensorBoardTracker",
    "wandb": "penstock.track.wandb:WandbTracker",
}
