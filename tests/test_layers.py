"""Imports only go down the layers, there is no ring, and the heavy or optional stays where it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"

LAYERS = {
    "types": 0,
    "config": 0,
    "config_source": 0,
    "digest": 0,
    "edges": 0,
    "errors": 0,
    "plugins": 0,
    "config_changes": 1,
    "data": 1,
    "demo": 1,
    "engine": 1,
    "reward": 1,
    "sandbox": 1,
    "algo": 1,
    "track": 1,
    "journal": 1,
    "watchdog": 1,
    "timeline_log": 1,
    "agent": 2,
    "replay": 2,
    "produce": 3,
    "train": 3,
    "sync": 4,
    "checkpoint": 4,
    "evaluate": 4,
    "run_folder": 4,
    "evaluations": 5,
    "launch": 5,
    "preflight": 6,
    "job": 6,
    "attest": 6,
    "run": 7,
    "recover": 7,
    "replay_run": 7,
    "audit": 7,
    "report": 7,
    "rollouts": 7,
    "summary": 7,
    "timeline": 7,
    "score": 7,
    "generate": 7,
    "session": 8,
    "distributed": 9,
    "cli": 9,
}
# The few arrows within a layer, each in one direction only; within a folder files may use each other.
SAME_LAYER = {
    ("config_source", "config"),
    ("config_source", "errors"),
    ("plugins", "errors"),
    ("replay_run", "recover"),
    ("reward", "sandbox"),
    ("data", "demo"),
    ("engine", "demo"),
    ("summary", "report"),
    ("report", "rollouts"),
}


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    found = {name.split(".")[1] for name in imports(path) if name.startswith("penstock.")}
    return {name for name in found if name in LAYERS}


FILES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py" or p.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_go_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LAYERS, f"{unit} has no layer: give it one here and in docs/architecture.md"
    for other in own_imports(path) - {unit}:
        allowed = LAYERS[other] < LAYERS[unit] or (unit, other) in SAME_LAYER
        assert allowed, f"{unit} (layer {LAYERS[unit]}) imports {other} (layer {LAYERS[other]})"


def test_every_exception_is_used() -> None:
    sideways = {
        (unit_of(path), other)
        for path in FILES
        for other in own_imports(path)
        if other != unit_of(path) and LAYERS[other] == LAYERS[unit_of(path)]
    }
    assert sideways == SAME_LAYER


def test_no_ring() -> None:
    edges = {unit: set() for unit in LAYERS}
    for path in FILES:
        edges[unit_of(path)] |= own_imports(path) - {unit_of(path)}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {unit for unit in edges if unit not in done and edges[unit] <= done}
        assert ready, f"ring among {sorted(set(edges) - done)}"
        done |= ready


def module_of(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))


def test_no_ring_among_files() -> None:
    """Within a folder too, type-only and lazy imports counted. A folder's own table is no ring."""
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    edges = {name: set(imports(path)) & modules.keys() for name, path in modules.items()}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name in edges if name not in done and edges[name] <= done}
        assert ready, f"ring among {sorted(set(edges) - done)}"
        done |= ready


def test_only_the_vllm_engine_imports_vllm_and_only_launch_imports_ray() -> None:
    for path in FILES:
        roots = {name.split(".")[0] for name in imports(path)}
        if "vllm" in roots:
            assert path.name == "vllm_engine.py"
        if "ray" in roots:
            assert unit_of(path) in ("launch", "sync")


def test_the_control_plane_imports_no_torch() -> None:
    modules = "types config config_source journal replay produce agent agent.single_turn reward data data.sampler preflight cli"
    code = "import sys\n" + "\n".join(f"import penstock.{name}" for name in modules.split())
    code += "\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"
