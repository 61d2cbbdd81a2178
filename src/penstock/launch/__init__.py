"""Where the parts live: worker processes, this process, or a Ray cluster. Layer 5.

Only this folder knows processes and Ray. A launcher is `async start(config, total_steps, log_folder)
-> Workers`; the loop cannot tell which one it got.
"""

from __future__ import annotations

LAUNCHERS = {
    "local": "penstock.launch.local:start",
    "inline": "penstock.launch.inline:start",
    "ray": "penstock.launch.ray_cluster:start",
}
