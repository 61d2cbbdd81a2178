"""`train.stop_when`: rules that end a run before its last step.

    heldout/accuracy >= 0.95     a held-out score, or a metric of the newest step, has reached a value
    heldout/accuracy stalls 3    no new best in three evaluations
    finding equal_rewards        the run has this finding (docs/report.md lists their names)

A run that a rule has ended is whole: its model is saved, and a resume with other rules continues it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from penstock.config import Config
from penstock.errors import UserError
from penstock.inspection.findings import RULES
from penstock.inspection.track.logs import Finding
from penstock.rollout.evaluation.evaluate import read_scores

_REACHED = re.compile(r"(\S+?)\s*(>=|<=)\s*(-?[\d.]+(?:e-?\d+)?)")
_STALLS = re.compile(r"(\S+) stalls ([1-9]\d*)")
_FINDING = re.compile(r"finding (\w+)")


class StopRules:
    """The rules of a run, and where its evaluations are."""

    def __init__(self, rules: Sequence[str] = (), evaluations: Path | None = None) -> None:
        """evaluations: the folder with the run's evaluations."""
        self._rules, self._evaluations = tuple(rules), evaluations

    def met(self, metrics: Mapping[str, float], findings: Sequence[Finding]) -> str:
        """The first rule that holds after a step with these metrics and findings; empty: the run goes on."""
        if not self._rules or self._evaluations is None:
            return ""
        scores = read_scores(self._evaluations)
        names = {finding.name for finding in findings}
        return next((rule for rule in self._rules if _holds(rule, scores, metrics, names)), "")


def _holds(
    rule: str,
    scores: Mapping[str, Mapping[int, float]],
    metrics: Mapping[str, float],
    findings: Set[str],
) -> bool:
    if match := _FINDING.fullmatch(rule):
        return match[1] in findings
    if match := _STALLS.fullmatch(rule):
        values = list(scores.get(match[1], {}).values())
        return bool(values) and len(values) - 1 - values.index(max(values)) >= int(match[2])
    match = _REACHED.fullmatch(rule)
    assert match is not None, rule
    history = list(scores.get(match[1], {}).values())
    value = history[-1] if history else metrics.get(match[1])
    limit = float(match[3])
    return value is not None and (value >= limit if match[2] == ">=" else value <= limit)


def check_scores(config: Config) -> None:
    """Raise a UserError for a score in checkpoint.keep_best or train.stop_when that the run does not have."""
    allowed = [f"{task}/{m}" for task in config.eval.tasks for m in ("accuracy", "reward")]
    names = ", ".join(allowed) or "none, because eval.tasks is empty"
    if (best := config.checkpoint.keep_best) and best not in allowed:
        raise UserError(f"checkpoint.keep_best: got {best!r}, allowed: {names}")
    known = {rule.name for rule in RULES}
    for rule in config.train.stop_when:
        if match := _FINDING.fullmatch(rule):
            if match[1] not in known:
                raise UserError(
                    f"train.stop_when: got {rule!r}, allowed findings: {', '.join(sorted(known))}"
                )
        elif match := _STALLS.fullmatch(rule):
            if match[1] not in allowed:
                raise UserError(f"train.stop_when: got {rule!r}, allowed scores: {names}")
        elif not (match := _REACHED.fullmatch(rule)):
            raise UserError(
                f"train.stop_when: got {rule!r}, allowed: 'SCORE >= NUMBER', 'SCORE <= NUMBER', "
                "'SCORE stalls N' or 'finding NAME'"
            )
        elif match[1] not in allowed and (
            match[1].partition("/")[0] in config.eval.tasks or match[1].endswith("/accuracy")
        ):
            raise UserError(f"train.stop_when: got {rule!r}, allowed scores: {names}")
