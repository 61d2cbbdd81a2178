"""Where metrics go: metrics.jsonl always, and the trackers that the config names.

`logs.py` has the protocol and the files that every run writes, `console.py` the display, `trackers.py`
those of other systems.
"""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.inspection.track.console:make_display",
    "tensorboard": "penstock.inspection.track.trackers:TensorBoardTracker",
    "wandb": "penstock.inspection.track.trackers:WandbTracker",
}
