"""Findings as a person reads them: on the panel, under the summary and in `penstock doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.types import Finding


def finding_table(findings: Iterable[Finding], *, brief: bool = False) -> Table:
    """Return one row per finding: what and since when; unless brief, evidence and advice below it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="yellow")
    table.add_column(overflow="fold")
    for finding in findings:
        since = f"  since step {finding.since}" if finding.since else ""
        table.add_row("●", Text.assemble((finding.what, "bold yellow"), (since, "dim")))
        if not brief:
            table.add_row("", Text(finding.evidence))
        table.add_row("", _remedy(finding, brief))
        if not brief:
            table.add_row("", "")
    return table


def _remedy(finding: Finding, brief: bool) -> Text | Padding:
    pasted = " ".join(map(shlex.quote, finding.change))
    if brief and pasted:
        return Text(pasted, style="cyan")
    return Text.assemble(finding.advice, ": " if pasted else "", (pasted, "bold cyan"))
