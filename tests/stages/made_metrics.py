"""Metrics of made runs: healthy ones, and each illness laid over a healthy one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.source import load_config
from penstock.inspection.findings import Observed
from penstock.inspection.findings.observed import looked_at_settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "learning"
MACHINE = {"machine": json.dumps({"cpus": 2, "gpus": 0})}

Curve = Callable[[int, int], float]  # (step, number of steps) -> value


def healthy_rows(steps: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Return the metrics of a run that learns, with the noise of a real one."""
    noise = np.random.default_rng(seed).normal
    rows = []
    for step in range(1, steps + 1):
        skill = 0.3 + 0.65 / (1 + math.exp(5 - 10 * step / steps))
        rows.append(
            {
                "step": step,
                "reward/mean": skill + noise(0, 0.02),
                "reward/std": 0.4 - 0.3 * skill,
                "accuracy/mean": skill,
                "format/mean": 0.8 + 0.2 * skill,
                "response_length/mean": 10 + 10 * skill + noise(0, 0.5),
                "truncated/share": 0.05,
                "empty/share": 0.0,
                "groups/zero_variance": 0.2 + 0.7 * skill**4,
                "entropy/mean": 0.2 * math.exp(-3 * skill),
                "mismatch/kl": abs(noise(0, 1e-3)),
                "importance/ess": 0.997,
                "staleness/mean": 1.0,
                "staleness/max": 1.0,
                "grad_norm": 0.5 + abs(noise(0, 0.3)),
                "updates/skipped": 0.0,
                "update/arrived": 1.0,
                "time/step_s": 1.0,
                "time/consumer_wait_s": abs(noise(0.05, 0.05)),
                "time/producer_wait_s": abs(noise(0.3, 0.1)),
                "time/reward_s": 0.01,
                "produced/groups": 32.0,
                "produced/reward": skill,
                "groups/failed": 0.0,
                "groups/expired": 0.0,
                "memory/available_mib": 50_000 + noise(0, 500),
            }
        )
    return rows


def with_curves(curves: Mapping[str, Curve | float | None], steps: int = 60) -> list[dict]:
    """Return a healthy run with these metrics instead of its own; None takes a metric away."""
    rows = healthy_rows(steps)
    for row in rows:
        for name, curve in curves.items():
            if curve is None:
                row.pop(name, None)
            else:
                row[name] = curve(row["step"], steps) if callable(curve) else curve
    return rows


def observe(
    rows: Sequence[Mapping[str, Any]],
    *overrides: str,
    facts: Mapping[str, str] = MACHINE,
    **more: Any,
) -> Observed:
    """Return what the rules look at, for a run of the demo's config with `overrides`."""
    config = load_config(None, list(overrides)).config
    settings = looked_at_settings(config)
    return Observed(run="runs/x", config=config, settings=settings, rows=rows, facts=facts, **more)


def sums_rows(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a recorded run of examples/sums; groups of 16 have equal rewards by chance."""
    rows, seconds = [], 0.0
    for line in map(json.loads, path.read_text().splitlines()):
        if "reward" not in line:
            continue
        reward = line["reward"]
        rows.append(
            {
                "step": line["step"],
                "reward/mean": reward,
                "reward/std": math.sqrt(reward * (1 - reward)),
                "response_length/mean": line["length"],
                "groups/zero_variance": reward**16 + (1 - reward) ** 16,
                "update/arrived": line.get("arrived"),
                "grad_norm": line.get("grad_norm", 0.5),
                "time/step_s": line["seconds"] - seconds,
            }
        )
        seconds = line["seconds"]
    return rows
