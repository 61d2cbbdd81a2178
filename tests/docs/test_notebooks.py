"""The notebooks of examples/ are executed, cell by cell, as a kernel does: in a thread that runs an event loop."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for IPython; what its cells show, in order."""
    shown: list[str] = []

    def show(page: str, display_id: bool) -> types.SimpleNamespace:
        shown.append(page)
        return types.SimpleNamespace(update=shown.append)

    shell, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.HTML, display.display = str, show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


async def run_cells(notebook: dict[str, Any], names: dict[str, Any]) -> list[Any]:
    """Execute the code cells; return the value of each cell's last expression."""
    values = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "a notebook is kept without outputs"
            *statements, last = ast.parse("".join(cell["source"])).body
            is_value = isinstance(last, ast.Expr)
            body = statements if is_value else [*statements, last]
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            value = (
                eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                if is_value
                else None
            )  # type: ignore[attr-defined]
            values.append(value)
    return values


def execute(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[Any], str]:
    notebook = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    values = asyncio.run(run_cells(notebook, {"__name__": "__main__"}))
    return values, capsys.readouterr().out


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_first_run(capsys: pytest.CaptureFixture[str], kernel: list[str]) -> None:
    values, out = execute("first_run", capsys)
    _, run, _, steps, _ = values
    assert len(run.metrics) == 4
    assert steps == [1, 2, 3, 4]
    assert "first-model" in out
    assert any("step 3 of 3" in page for page in kernel)
    assert "step 4 of 4" in kernel[-1]  # the plot of the resumed run
    assert (run.path / "report.html").is_file()
    assert "The model after step 4" in Path("first-model/README.md").read_text()


def test_own_data(capsys: pytest.CaptureFixture[str], kernel: list[str]) -> None:
    values, out = execute("own_data", capsys)
    assert "sums.csv line 2: columns.level: got 'difficulty', allowed: a field of the record" in out
    *_, rewards, parts = values
    assert rewards == [1.0, 0.1]
    assert len(parts) == 4
    assert all(part.keys() == {"lenient"} for part in parts)


def test_every_notebook_is_executed_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_data"]
