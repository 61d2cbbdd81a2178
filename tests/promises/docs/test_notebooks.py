"""The notebooks of examples/ are executed in a real kernel, whose event loop runs while a cell does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from stages.tiny_run import CrashServer

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
ASKED = {  # expressions whose values after a notebook are compared below
    "first_run": ["[row['step'] for row in run.metrics]", "(run.path / 'report.html').is_file()"],
    "own_data": [],
}
BEFORE = """
%reset -f
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from stages.warm_workers import install
install(Path({nursery!r}))
os.chdir({folder!r})
"""
AFTER = "import asyncio, json; assert asyncio.get_running_loop().is_running()"


@dataclass(slots=True)
class Executed:
    """A notebook that was executed in an empty folder."""

    folder: Path
    outputs: list[dict[str, Any]]
    values: list[Any]  # of the expressions in ASKED

    def texts(self, kind: str) -> list[str]:
        return [output["data"][kind] for output in self.outputs if kind in output.get("data", {})]

    @property
    def printed(self) -> str:
        return "".join(output.get("text", "") for output in self.outputs)


@pytest.fixture(scope="module")
def executed(server: CrashServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Executed]:
    """Execute all notebooks in one kernel, each in a folder and with names of its own."""
    root, whole, cells = tmp_path_factory.mktemp("notebooks"), nbformat.v4.new_notebook(), {}
    for name, asked in ASKED.items():
        (root / name).mkdir()
        path = [entry for entry in sys.path if entry]
        before = BEFORE.format(path=path, nursery=str(server.nursery), folder=str(root / name))
        written = nbformat.read(ROOT / "examples/notebooks" / f"{name}.ipynb", as_version=4).cells
        for cell in written:
            assert cell.cell_type != "code" or not cell.outputs, (
                "a notebook is kept without outputs"
            )
        asking = [f"print(json.dumps({expression}))" for expression in asked]
        ours = [nbformat.v4.new_code_cell(code) for code in (before, AFTER, *asking)]
        whole.cells += [ours[0], *written, *ours[1:]]
        cells[name] = (written, ours[2:])
    NotebookClient(whole, timeout=280, resources={"metadata": {"path": str(root)}}).execute()
    return {
        name: Executed(
            root / name,
            [output for cell in written for output in cell.get("outputs", ())],
            [json.loads(cell.outputs[0].text) for cell in answers],
        )
        for name, (written, answers) in cells.items()
    }


@pytest.mark.slow
def test_a_first_run(executed: dict[str, Executed]) -> None:
    notebook = executed["first_run"]
    steps, report = notebook.values
    assert steps == [1, 2, 3, 4]
    assert report
    assert "first-model" in notebook.printed
    plots = [text for text in notebook.texts("text/html") if "<svg" in text]
    assert "step 3 of 3" in plots[0]  # the newest state of the plot in the cell that trained
    assert "step 4 of 4" in plots[-1]  # that of the resumed run
    card = notebook.folder / "first-model" / "README.md"
    assert "The model after step 4" in card.read_text()


@pytest.mark.slow
def test_own_data(executed: dict[str, Executed]) -> None:
    notebook = executed["own_data"]
    said = "sums.csv line 2: columns.level: got 'difficulty', allowed: a field of the record"
    assert said in notebook.printed
    values = notebook.texts("text/plain")
    assert "[1.0, 0.1]" in values
    assert values[-1].count("'lenient'") == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_is_executed_here(path: Path) -> None:
    assert path.stem in ASKED
