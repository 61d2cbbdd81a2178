"""Rules about the machine: the disk and the memory that a run will need."""

from __future__ import annotations

from penstock.inspection.findings.observed import Observed, mean
from penstock.types import Finding

_LOOK_BACK = 60  # steps over which the loss of memory is measured


def full_disk(o: Observed) -> Finding | None:
    if o.disk is None or not o.disk.is_short:
        return None
    keep = o.config.checkpoint.keep
    return Finding(
        name="full_disk",
        what="The disk will soon be full, and the run will stop (what was journalled is never lost)",
        since=o.last_step,
        evidence=f"{o.disk}",
        advice="Make room" + (", or keep fewer checkpoints" if keep > 1 else ""),
        change=("checkpoint.keep=1",) if keep > 1 else (),
    )


def full_memory(o: Observed) -> Finding | None:
    """Free memory of the machine shrinks steadily and would not last to the end of the run."""
    free = o.newest("memory/available_mib", _LOOK_BACK)
    left = (o.total_steps or 0) - o.last_step
    if len(free) < _LOOK_BACK or left <= 0:
        return None
    third = _LOOK_BACK // 3
    first, middle, last = free[:third], free[third:-third], free[-third:]
    if not (min(first) > max(last) and mean(first) > mean(middle) > mean(last)):
        return None
    each = (mean(first) - mean(last)) / (2 * third)  # MiB a step
    lasts = free[-1] / each
    if lasts >= left:
        return None
    return Finding(
        name="full_memory",
        what="The machine's memory will not last to the end of the run",
        since=int(o.rows[-_LOOK_BACK]["step"]),
        evidence=f"{free[-1]:,.0f} MiB are available and every step takes {each:,.1f} MiB more: "
        f"enough for {lasts:,.0f} of the {left} steps that are left",
        advice="Look for what grows (a reward that keeps its results?); stop and resume frees the memory",
    )
