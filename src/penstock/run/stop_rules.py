"""`train.stop_when`: rules that end a run before its last step.

    heldout/accuracy >= 0.95     a held-out score, or a metric of the newest step, has reached a value
    heldout/accuracy stalls 3    no new best in three evaluations
    finding equal_rewards        the run has this finding (docs/report.md lists their names)

A run that a rule has ended is whole: its model is saved, and a resume with other rules continues it.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from penstock.config import Config
from penstock.errors import UserError
from penstock.inspection.findings import RULES
from penstock.inspection.track.logs import Finding
from penstock.rollout.evaluation.evaluate import read_scores

_RULE = re.compile(
    r"finding (?P<finding>\w+)"
    r"|(?P<stalled>\S+) stalls (?P<times>[1-9]\d*)"
    r"|(?P<reached>\S+?)\s*(?P<bound>>=|<=)\s*(?P<limit>-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
)


class StopRules:
    """The rules of a run, and where its evaluations are."""

    def __init__(
        self,
        rules: Sequence[str] = (),
        evaluations: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """evaluations: the folder with the run's evaluations. note: takes a line for the user."""
        self._rules, self._evaluations, self._note = tuple(rules), evaluations, note
        self._has_seen_metrics = False

    def met(self, metrics: Mapping[str, float], findings: Sequence[Finding]) -> str:
        """The first rule that holds after a step with these metrics and findings; empty: the run goes on."""
        if not self._rules or self._evaluations is None:
            return ""
        scores = read_scores(self._evaluations)
        if metrics and not self._has_seen_metrics:
            self._has_seen_metrics = True
            self._tell_unknown({*metrics, *scores})
        for text in self._rules:
            rule = _parse(text)
            name = rule["stalled"] or rule["reached"] or ""
            history = list(scores.get(name, {}).values())
            if rule["finding"]:
                holds = any(finding.name == rule["finding"] for finding in findings)
            elif rule["stalled"]:
                newer = len(history) - 1 - history.index(max(history)) if history else 0
                holds = newer >= int(rule["times"])
            else:
                value, limit = history[-1] if history else metrics.get(name), float(rule["limit"])
                reaches = operator.ge if rule["bound"] == ">=" else operator.le
                holds = value is not None and reaches(value, limit)
            if holds:
                return text
        return ""

    def _tell_unknown(self, known: Set[str]) -> None:
        """Say which rules wait for a metric that the first step does not have: it may be misspelt."""
        for rule in self._rules:
            name = _parse(rule)["reached"]
            if name and name not in known and not name.endswith(("/accuracy", "/reward")):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self._note(f"warning: train.stop_when {rule!r}: no step has {name} so far{hint}")


def _parse(rule: str) -> re.Match[str]:
    if match := _RULE.fullmatch(rule):
        return match
    raise UserError(
        f"train.stop_when: got {rule!r}, allowed: 'SCORE >= NUMBER', 'SCORE <= NUMBER', "
        "'SCORE stalls N' or 'finding NAME'"
    )


def scores_used(config: Config) -> set[str]:
    """The held-out scores that checkpoint.keep_best and train.stop_when name, such as heldout/accuracy."""
    rules = map(_parse, config.train.stop_when)
    names = {rule["stalled"] or rule["reached"] for rule in rules if not rule["finding"]}
    return {config.checkpoint.keep_best, *names}


def check_scores(config: Config) -> None:
    """Raise a UserError for a score in checkpoint.keep_best or train.stop_when that the run does not have."""
    allowed = [f"{task}/{m}" for task in config.eval.tasks for m in ("accuracy", "reward")]
    names = ", ".join(allowed) or "none, because eval.tasks is empty"
    if (best := config.checkpoint.keep_best) and best not in allowed:
        raise UserError(f"checkpoint.keep_best: got {best!r}, allowed: {names}")
    known = {rule.name for rule in RULES}
    for text in config.train.stop_when:
        rule = _parse(text)
        finding, score = rule["finding"], rule["stalled"] or rule["reached"] or ""
        if finding and finding not in known:
            raise UserError(
                f"train.stop_when: got {text!r}, allowed findings: {', '.join(sorted(known))}"
            )
        of_task = score.partition("/")[0] in config.eval.tasks or score.endswith("/accuracy")
        if (rule["stalled"] or of_task) and score not in allowed:
            raise UserError(f"train.stop_when: got {text!r}, allowed scores: {names}")
