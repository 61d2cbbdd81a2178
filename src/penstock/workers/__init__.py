"""Where the parts of a run live: worker processes, this process, or a Ray cluster.

A launcher is `async start(config, total_steps, log_folder, events) -> Workers`, one line in `LAUNCHERS`; beside it
stands `start_engines` for a program that trains by itself, in `ENGINE_LAUNCHERS`. Only
this folder knows processes (`processes/`) and Ray (`ray/`); the loop does not know which launcher
is in use.
"""

from __future__ import annotations

LAUNCHERS = {
    "local": "penstock.workers.processes.local:start",
    "inline": "penstock.workers.inline:start",
    "ray": "penstock.workers.ray.cluster:start",
}
ENGINE_LAUNCHERS = {kind: f"{start}_engines" for kind, start in LAUNCHERS.items()}
