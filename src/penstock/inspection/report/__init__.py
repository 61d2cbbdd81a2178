"""`penstock report`: one HTML file, without a server or a network, for one or more runs.

`data.py` reads a run folder into a plain record, `figures.py` computes its key figures, `page.py` puts the
records into a page, and the scripts in `assets/` draw it in the browser.
"""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UserError
from penstock.files import write_whole
from penstock.inspection.report.data import read_run
from penstock.inspection.report.page import render
from penstock.store.run_folder import RunFolder

__all__ = ["write_report"]


def write_report(folders: list[RunFolder], out: Path | None = None) -> Path:
    """Write the report of these runs, by default into the first run's folder; return its path."""
    if not folders:
        raise UserError("report: got no run, allowed: one run folder or more")
    path = out or folders[0].path / "report.html"
    if path.is_dir():
        raise UserError(f"report: got the folder {path}, allowed: the name of an HTML file")
    page = render([read_run(folder) for folder in folders])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page.encode("utf-8", "replace").decode())
    except OSError as error:
        raise UserError(
            f"report: cannot write {path}: {error.strerror}, allowed: a file that can be written"
        ) from None
    return path
