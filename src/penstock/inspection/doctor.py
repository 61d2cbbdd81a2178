"""`penstock doctor`: print what is wrong with a run, since when, how it shows and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from penstock.inspection.findings import find
from penstock.inspection.findings.observed import read_observed
from penstock.inspection.track.console import finding_table
from penstock.store.run_folder import RunFolder


def examine(folder: RunFolder, console: Console, *, as_json: bool = False) -> int:
    """Print the findings; return 1 if there is one, else 0."""
    observed = read_observed(folder)
    found = find(observed)
    if as_json:
        console.file.write(json.dumps([asdict(finding) for finding in found]) + "\n")
    elif found:
        console.print(finding_table(found))
    else:
        console.print(f"Nothing was found in {observed.last_step} steps.", highlight=False)
    return int(bool(found))
