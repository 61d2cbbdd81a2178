"""Where metrics go: metrics.jsonl always, and the trackers that the config names.

`logs.py` has the protocol, the files that every run writes and the trackers of other systems, `console.py` the
display.
"""

from __future__ import annotations

TRACKERS = {
    "console": "penstock.inspection.track.console:make_display",
    "tensorboard": "penstock.inspection.track.logs:TensorBoardTracker",
    "wandb": "penstock.inspection.track.logs:WandbTracker",
}
