"""The process that runs one test: takes on its limits, then runs untrusted code. Inside the sandbox.

Four jobs: `program` (stdin to stdout), `call` (one function call), `solution` (serves its functions to
tests in another sandbox) and `tests` (runs assert-style tests against such a solution). Its
report is a claim by the code it ran, never a verdict; only `tests`, which runs no untrusted code,
reports verdicts.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib
import io
import json
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from penstock.sandbox.inside import codec, kernel, remote, seccomp
from penstock.sandbox.inside.wire import Pipe

REPORT, LINK = 3, 4  # descriptors of the report pipe and of the link to the other sandbox
PASS, WRONG, ERROR = 1, 0, -1


def run(job: dict[str, Any], limits: dict[str, Any]) -> None:
    """Run the job and end the process; never returns."""
    try:
        _limit(limits)
        code = _JOBS[job["job"]](job)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # the edge of the process
        _report({"error": "runtime", "text": _trace(error)})
        code = 1
    os._exit(_finish(code))


def _limit(limits: dict[str, Any]) -> None:
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
        ("RLIMIT_NPROC", limits["tasks"]),
        ("RLIMIT_AS", limits["memory_bytes"]),
    ):
        if value is not None:
            _lower(getattr(resource, name), value)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if limits["seccomp"]:
        assert kernel.ARCH is not None
        program = seccomp.build_filter(
            kernel.ARCH,
            os.getpid(),
            scratch=limits["scratch"],
            threads=limits["tasks"] is not None,
            processes=limits["processes"],
        )
        kernel.set_seccomp_filter(program)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _report(message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(REPORT, data) :]


def _trace(error: BaseException) -> str:
    try:
        lines = traceback.format_exception_only(type(error), error)
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<solution>"
        ]
        where = f" (line {frames[-1].lineno})" if frames else ""
        return "".join(lines).strip()[-500:] + where
    except BaseException:  # a hostile exception's own code
        return type(error).__name__


def _exit_code(code: object) -> int:
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _finish(code: int) -> int:
    """Do what the interpreter does at exit, except for state that the fork inherited."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # a closed or broken stdout is the program's own loss
        return code or 1
    return code


def _open_standard_streams() -> None:
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "backslashreplace"
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace"
    )


def _load(source: str, name: str) -> dict[str, Any] | None:
    """Run the solution as the module `name`; report and return None if it does not compile."""
    _open_standard_streams()
    try:
        code = compile(source, "<solution>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        _report({"error": "compile", "text": _trace(error)})
        return None
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    exec(code, module.__dict__)
    return module.__dict__


def _program(job: dict[str, Any]) -> int:
    return 1 if _load(job["source"], "__main__") is None else 0


def _call(job: dict[str, Any]) -> int:
    namespace = _load(job["source"], "solution")
    if namespace is None:
        return 1
    value = _find_function(namespace, job["function"])(*codec.decode(job["args"]))
    if isinstance(value, types.GeneratorType):
        value = list(value)
    try:
        _report({"value": codec.encode(value)})
    except codec.NotPlain as error:
        _report({"not_plain": str(error)})
    return 0


def _find_function(namespace: dict[str, Any], name: str) -> Callable[..., Any]:
    if name in namespace:
        return namespace[name]
    if "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    raise NameError(f"the solution defines no {name!r}")


def _solution(job: dict[str, Any]) -> int:
    namespace = _load(job["source"], "solution")
    if namespace is None:
        return 1
    _report({"ready": True})
    remote.SolutionServer(Pipe(LINK), namespace).serve()
    return 0


class TestTimeout(BaseException):
    """One test, or the solution's own start, took too long."""

    __module__ = "builtins"  # notes show this short name


def _on_alarm(number: int, frame: object) -> None:
    raise TestTimeout("time-out")


def _tests(job: dict[str, Any]) -> int:
    _open_standard_streams()
    tree = ast.parse(job["source"], "<tests>")
    connection = remote.Connection(Pipe(LINK))
    entry_point = job.get("entry_point")
    signal.signal(signal.SIGALRM, _on_alarm)
    tests = [node for node in tree.body if isinstance(node, ast.Assert)]
    one_by_one = bool(tests) and entry_point is None
    total = len(tests) if one_by_one else 1
    _report({"count": total})
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
    namespace = _test_namespace(tree, connection, entry_point)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if one_by_one:
        _run_statements(tree, namespace, job["timeout_s"])
        return 0
    body = [_compiled([node]) for node in tree.body]
    if entry_point is not None:
        body.append(compile(f"check({entry_point})", "<tests>", "exec"))
    _verdict(0, body, namespace, job["timeout_s"])
    return 0


def _run_statements(tree: ast.Module, namespace: dict[str, Any], timeout_s: float) -> None:
    index = 0
    for node in tree.body:
        if isinstance(node, ast.Assert):
            if not _verdict(index, [_compiled([node])], namespace, timeout_s):
                return
            index += 1
        else:
            exec(_compiled([node]), namespace)


def _compiled(nodes: list[ast.stmt]) -> types.CodeType:
    return compile(ast.Module(nodes, []), "<tests>", "exec", dont_inherit=True)


def _verdict(
    index: int, body: list[types.CodeType], namespace: dict[str, Any], timeout_s: float
) -> bool:
    """Run one test and report; return False if the solution cannot serve the next one."""
    code, note, alive, gone = PASS, "", True, False
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        for part in body:
            exec(part, namespace)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except AssertionError as error:
        code, note = WRONG, f"assertion failed {error}".strip()[:300]
    except TestTimeout:
        code, note, alive = ERROR, f"time-out after {timeout_s:g} s", False
    except remote.SolutionGone as error:
        code, note, alive, gone = ERROR, str(error), False, True
    except BaseException as error:  # the solution's error, or one in the tests
        code, note = ERROR, _trace(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _report({"test": index, "code": code, "note": note, "gone": gone})
    return alive


def _test_namespace(
    tree: ast.Module, connection: remote.Connection, entry_point: str | None
) -> dict[str, Any]:
    """Return the names that tests see: their own, standard modules, then the solution's."""
    used, bound = set[str](), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    wanted = used - bound | ({entry_point} if entry_point else set())
    modules = {name for name in wanted if name in sys.stdlib_module_names and name != entry_point}
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace |= {name: importlib.import_module(name) for name in sorted(modules)}
    return namespace | connection.names(sorted(wanted - modules))


_JOBS: dict[str, Callable[[dict[str, Any]], int]] = {
    "program": _program,
    "call": _call,
    "solution": _solution,
    "tests": _tests,
}
