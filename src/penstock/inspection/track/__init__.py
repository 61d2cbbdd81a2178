"""Where metrics go: metrics.jsonl always, and the trackers that the config names.

`trackers.py` has the protocol, `logs.py` the files that every run writes, `console.py` the display.
"""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.inspection.track.console:make_display",
    "tensorboard": "penstock.inspection.track.trackers:TensorBoardTracker",
    "wandb": "penstock.inspection.track.trackers:WandbTracker",
}
