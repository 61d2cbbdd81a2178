"""The notebooks of examples/ are executed in a real kernel, whose event loop runs while a cell does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def execute(name: str, folder: Path, *asked: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Execute a notebook in an empty folder; return its outputs, and what expressions are after it."""
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or not cell.outputs, "a notebook is kept without outputs"
    written = len(notebook.cells)
    loop = "import asyncio, json; assert asyncio.get_running_loop().is_running()"
    for code in (loop, *(f"print(json.dumps({expression}))" for expression in asked)):
        notebook.cells.append(nbformat.v4.new_code_cell(code))
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [o for cell in notebook.cells[:written] for o in cell.get("outputs", ())]
    return outputs, [json.loads(cell.outputs[0].text) for cell in notebook.cells[written + 1 :]]


def texts(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_a_first_run(tmp_path: Path) -> None:
    outputs, (steps, report) = execute(
        "first_run",
        tmp_path,
        "[row['step'] for row in run.metrics]",
        "(run.path / 'report.html').is_file()",
    )
    assert steps == [1, 2, 3, 4]
    assert report
    assert "first-model" in printed(outputs)
    plots = [text for text in texts(outputs, "text/html") if "<svg" in text]
    assert "step 3 of 3" in plots[0]  # the newest state of the plot in the cell that trained
    assert "step 4 of 4" in plots[-1]  # that of the resumed run
    assert "The model after step 4" in (tmp_path / "first-model" / "README.md").read_text()


def test_own_data(tmp_path: Path) -> None:
    outputs, _ = execute("own_data", tmp_path)
    said = "sums.csv line 2: columns.level: got 'difficulty', allowed: a field of the record"
    assert said in printed(outputs)
    values = texts(outputs, "text/plain")
    assert "[1.0, 0.1]" in values
    assert values[-1].count("'lenient'") == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_is_executed_here(path: Path) -> None:
    assert f'"{path.stem}"' in Path(__file__).read_text()
