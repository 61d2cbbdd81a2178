"""Imports only go down the layers, there is no ring, and heavy packages stay in their units."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from stages import source_code
from stages.source_code import SOURCE, nodes

FLOORS = (  # a unit (a folder or file of src/penstock) imports only units of lower floors
    ("types", "errors"),
    ("files", "waits", "serving"),
    ("config",),
    ("store", "model", "convert"),
    ("weights", "data"),
    ("engine", "reward"),
    ("training", "rollout"),
    ("inspection",),
    ("workers",),
    ("run",),
    ("service",),
    ("api", "compat", "cli"),
)
LAYERS = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}


def unit_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@dataclass
class Found:
    """What the tests below ask of one file."""

    imports: set[str] = field(default_factory=set)  # every dotted name, lazily imported or not
    calls: set[str] = field(default_factory=set)  # `name` and `module.name`
    lengths: dict[str, int] = field(default_factory=dict)  # function -> lines after its first


@cache
def read(path: Path) -> Found:
    found = Found()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.imports.add(node.module or "")
            found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                found.calls.add(function.id)
            elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                found.calls.add(f"{function.value.id}.{function.attr}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno
            found.lengths[node.name] = max(length, found.lengths.get(node.name, 0))
    return found


def own_imports(path: Path) -> set[str]:
    found = {name.split(".")[1] for name in read(path).imports if name.startswith("penstock.")}
    return {name for name in found if name in LAYERS}


FILES = [path for path in source_code.FILES if path != SOURCE / "__init__.py"]


def test_imports_only_go_down() -> None:
    upward = [
        f"{path.relative_to(SOURCE)} imports {other}, which is not below it"
        for path in FILES
        for other in own_imports(path) - {unit_of(path)}
        if LAYERS[other] >= LAYERS[unit_of(path)]
    ]
    assert not upward, "\n".join(upward)


def test_every_unit_has_a_floor() -> None:
    assert {unit_of(path) for path in FILES} == set(LAYERS)


def module_of(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))


def test_no_ring_among_files() -> None:
    """Within a folder too, type-only and lazy imports counted. A folder's own table is no ring."""
    modules = {module_of(path): path for path in FILES if path.name != "__init__.py"}
    edges = {name: read(path).imports & modules.keys() for name, path in modules.items()}
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name in edges if name not in done and edges[name] <= done}
        assert ready, f"ring among {sorted(set(edges) - done)}"
        done |= ready


def test_only_the_vllm_engine_imports_vllm_and_only_workers_ray_imports_ray() -> None:
    for path in FILES:
        roots = {name.split(".")[0] for name in read(path).imports}
        if "vllm" in roots:
            assert path.relative_to(SOURCE).as_posix() == "engine/vllm/engine.py"
        if "ray" in roots:
            assert path.is_relative_to(SOURCE / "workers" / "ray"), path


def test_only_files_makes_a_console() -> None:
    """So that no text of a model, of data or of a foreign run folder controls the terminal."""
    for path in FILES:
        if unit_of(path) != "files":
            made = read(path).calls & {"Console", "typer.echo"}
            assert not made, f"{path}: use penstock.files"


def test_the_control_plane_imports_no_torch() -> None:
    modules = "types config config.source store.journal rollout rollout.agent.single_turn reward data.sampler "
    modules += "cli run.preflight run.job run.loop run.recover run.session workers.inline "
    modules += "workers.processes.local workers.pool.pool inspection.audit"
    code = "import sys\n" + "\n".join(f"import penstock.{name}" for name in modules.split())
    code += "\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_and_functions_stay_short() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 600, path  # one idea, one file
        long = [name for name, length in read(path).lengths.items() if length >= 80]
        assert not long, f"{path}: {long[0]} is too long"
