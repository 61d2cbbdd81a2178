"""Where metrics go: metrics.jsonl always, and the trackers that the config names.

A tracker shows metrics; its faults never stop a run, nor do those of the files beside metrics.jsonl
(`rollout_log.py`, `timeline_log.py`).
"""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.inspection.track.notebook:make_display",
    "tensorboard": "penstock.inspection.track.tensorboard:TensorBoardTracker",
    "wandb": "penstock.inspection.track.wandb:WandbTracker",
}
