"""Findings: what is wrong with a run, since when, how it shows, and which setting to change.

`rules.py` is the table, `observed.py` what its conditions look at. The panel, the summary, the report,
`penstock doctor` and the metric `findings/open` all show what `find` returns.
"""

from __future__ import annotations

from penstock.inspection.findings.observed import Observed
from penstock.inspection.findings.rules import RULES, find

__all__ = ["RULES", "Observed", "find"]
