"""Findings: what is wrong with a run, since when, how it shows, and which setting to change.

`RULES` lists every illness that Penstock knows; each rule is a pure function of what was observed of a
run, and returns a Finding or None. The panel, the summary, the report, `penstock doctor` and the metric
`findings/open` all show what `find` returns. A new illness is one function, one line here, and a made
run that has it in tests/inspection/findings.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.inspection.findings import learning, machine, pipeline, prompts
from penstock.inspection.findings.observed import Observed
from penstock.types import Finding

__all__ = ["RULES", "Observed", "find"]

Rule = Callable[[Observed], Finding | None]

RULES: tuple[Rule, ...] = (  # the worst first
    learning.equal_rewards,
    learning.refused_groups,
    learning.empty_responses,
    learning.truncated,
    pipeline.failures,
    learning.bad_gradients,
    learning.lost_updates,
    learning.length_collapse,
    learning.length_explosion,
    learning.entropy_collapse,
    learning.kl_drift,
    pipeline.mismatch,
    machine.full_disk,
    machine.full_memory,
    prompts.skipped,
    prompts.no_template,
    prompts.overlap,
    pipeline.expired,
    pipeline.too_stale,
    pipeline.slow_reward,
    pipeline.trainer_idle,
    pipeline.producer_idle,
)


def find(observed: Observed) -> list[Finding]:
    """Return what is wrong with a run now, the worst first; one finding for each remedy."""
    found: list[Finding] = []
    for rule in RULES:
        finding = _judge(rule, observed)
        if finding is None:
            continue
        if finding.change and any(set(finding.change) <= set(other.change) for other in found):
            continue  # another finding has already said so
        found.append(finding)
    return found


def _judge(rule: Rule, observed: Observed) -> Finding | None:
    try:
        return rule(observed)
    except Exception as error:  # advice must never end a run: a broken rule becomes a finding
        return Finding(
            name=f"broken_rule_{rule.__name__}",
            what=f"A check of Penstock failed: {rule.__name__}",
            since=int(observed.rows[-1]["step"]) if observed.rows else 0,
            evidence=f"{type(error).__name__}: {error}",
            advice="The run is not affected; please report it",
        )
