"""The process that runs one test: takes on its limits, then runs untrusted code. Inside the sandbox.

Five jobs: `program` (stdin to stdout), `call` (one function call), `solution` (serves its functions to
tests in another sandbox), `tests` (runs assert-style tests against such a solution) and `referee`
(compares what others left with what was expected). A report is a claim by the code that ran, never a
verdict; only `tests` and `referee`, which run no solution, give verdicts.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import functools
import importlib
import io
import json
import os
import resource
import signal
import symtable
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.reward.sandbox.inside import judging, kernel, remote, seccomp, wire
from penstock.reward.sandbox.inside.wire import Closed, Pipe

REPORT, LINK = 3, 4  # descriptors of the report pipe and of the link to the other sandbox
PASS, WRONG, ERROR = 1, 0, -1


def run(job: dict[str, Any], limits: dict[str, Any]) -> None:
    """Run the job and end the process; never returns."""
    try:
        _limit(limits)
        code = _JOBS[job["job"]](job)
    except SystemExit as error:
        code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
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
            limit = getattr(resource, name)
            _, hard = resource.getrlimit(limit)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if limits["seccomp"]:
        assert kernel.ARCH is not None
        program = seccomp.build_filter(
            kernel.ARCH,
            os.getpid(),
            scratch=limits["scratch"],
            threads=limits["tasks"] is not None,
        )
        kernel.set_seccomp_filter(program)


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
    value = _find_function(namespace, job["function"])(*wire.decode(job["args"]))
    if isinstance(value, types.GeneratorType):
        value = list(value)
    try:
        _report({"value": wire.encode(value)})
    except wire.NotPlain as error:
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
    remote.SolutionServer(Pipe(LINK, remote.MAX_REPLY_BYTES), namespace).serve()
    return 0


def _referee(job: dict[str, Any]) -> int:
    link = Pipe(LINK)
    while True:
        try:
            request = link.receive()
        except Closed:
            return 0
        link.send(judging.answer(request))


class TestTimeout(BaseException):
    """One test, or the solution's own start, took too long."""

    __module__ = "builtins"  # notes show this short name


class _Tests:
    """Runs the tests' source against the solution and reports a code for each test."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._timeout_s, self._entry_point = job["timeout_s"], job.get("entry_point")
        self._read = read_tests(job["source"], job["prelude"], job["names"], imports=True)
        self._connection = remote.Connection(Pipe(LINK, remote.MAX_REPLY_BYTES))
        self._namespace: dict[str, Any] = {}
        asserts = sum(isinstance(node, ast.Assert) for node in self._read.tree.body)
        self._one_by_one = asserts > 0 and self._entry_point is None
        self.count = asserts if self._one_by_one else 1
        late = TestTimeout(f"time-out after {self._timeout_s:g} s")
        signal.signal(signal.SIGALRM, lambda *_: self._connection.fail(late))

    def run(self) -> None:
        """Report every test up to the first that the solution does not survive."""
        if not self._report_failure(0, *self._attempt(self._bind)):
            return
        nodes = [_CallsForEffect().visit(node) for node in self._read.tree.body]
        if self._one_by_one:
            self._run_statements(nodes)
            return
        body = [_compiled(node) for node in nodes]
        if self._entry_point is not None:
            body.append(compile(f"check({self._entry_point})", "<tests>", "exec"))
        code, note, gone = self._attempt(functools.partial(self._execute, body))
        _report({"test": 0, "code": code, "note": note, "gone": gone})

    def _execute(self, body: list[types.CodeType]) -> None:
        for part in body:
            exec(part, self._namespace)

    def _run_statements(self, nodes: list[ast.stmt]) -> None:
        index = 0
        for node in nodes:
            action = functools.partial(self._execute, [_compiled(node)])
            code, note, gone = self._attempt(action)
            if not isinstance(node, ast.Assert):
                if not self._report_failure(index, code, note, gone):
                    return
                continue
            _report({"test": index, "code": code, "note": note, "gone": gone})
            index += 1
            if self._connection.fault is not None:
                return

    def _report_failure(self, index: int, code: int, note: str, gone: bool) -> bool:
        """Report a statement that failed before test `index`; return whether it went well."""
        if code != PASS and index < self.count:
            _report({"test": index, "code": code, "note": note, "gone": gone})
        return code == PASS

    def _attempt(self, action: Callable[[], object]) -> tuple[int, str, bool]:
        """Run one test; return its code, its note, and whether the solution has ended."""
        connection = self._connection
        code, note, connection.note = PASS, "", ""
        try:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
            action()
        except AssertionError as error:
            code, note = WRONG, f"assertion failed {error}".strip()[:300] + connection.note
        except BaseException as error:  # the solution's error, or one in the tests
            code, note = ERROR, _trace(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        fault = connection.fault
        if isinstance(fault, remote.NotPlainAnswer):
            code, note, connection.fault = WRONG, str(fault), None  # the next test may be right
        elif fault is not None:
            code, note = ERROR, str(fault)
        return code, note, isinstance(fault, remote.SolutionGone)

    def _bind(self) -> None:
        """Make the names that tests see: standard modules, and those under test from the solution."""
        self._namespace |= self._connection.names(self._read.solution)
        self._namespace |= {name: importlib.import_module(name) for name in self._read.modules}
        self._namespace |= {"__name__": "tests", "__builtins__": dict(vars(builtins))}
        self._namespace[_FOR_EFFECT] = remote.for_effect


_FOR_EFFECT = "__for_effect__"


def _tests(job: dict[str, Any]) -> int:
    _open_standard_streams()
    try:
        tests = _Tests(job)
    except (BrokenTests, ImportError) as error:
        _report({"broken": str(error)[:400]})
        return 0
    _report({"count": tests.count})
    if tests.count <= job["max_tests"]:
        tests.run()
    return 0


class _CallsForEffect(ast.NodeTransformer):
    """Marks calls whose value is not used: only those change the tests' arguments in place."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and _may_be_remote(call.func):
            call.args.insert(0, call.func)
            call.func = ast.copy_location(ast.Name(_FOR_EFFECT, ast.Load()), call)
        return node


def _may_be_remote(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id not in dir(builtins)  # exec and its like look at their caller
    return isinstance(function, ast.Attribute)


def _compiled(node: ast.stmt) -> types.CodeType:
    return compile(ast.Module([node], []), "<tests>", "exec", dont_inherit=True)


_JOBS: dict[str, Callable[[dict[str, Any]], int]] = {
    "program": _program,
    "call": _call,
    "solution": _solution,
    "tests": _tests,
    "referee": _referee,
}


# -- which names of assert-style tests come from the solution -----------------------------------


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class BrokenTests(Exception):
    """Tests that are no Python, or use names that neither they nor the solution are to define."""


class TestsRead(NamedTuple):
    """Tests behind their prelude, and where the names come from that they do not define."""

    tree: ast.Module
    solution: list[str]
    modules: list[str]  # of the standard library


def read_tests(source: str, prelude: str, names: Sequence[str], *, imports: bool) -> TestsRead:
    """Read tests; from the solution come `names`, or the only name that nobody defines.

    Without `imports` nothing is imported, and the names of tests with `import *` are not looked at.
    """
    try:
        body, helpers = ast.parse(source, "<tests>").body, ast.parse(prelude, "<prelude>").body
        free = _free_names([source, prelude])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTests(f"not valid Python: {str(error)[:300]}") from None
    if not body:
        raise BrokenTests("empty, allowed: at least one test")
    helpers = [n for n in helpers if not (isinstance(n, _DEFINITIONS) and n.name in names)]
    tree = ast.Module([*helpers, *body], [])
    stars = [
        node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]
    if stars and not imports:
        return TestsRead(tree, list(names), [])
    for module in stars:
        free -= vars(importlib.import_module(module)).keys()
    solution = _names_under_test(free, names)
    return TestsRead(tree, solution, sorted(free & sys.stdlib_module_names - {*solution}))


def _names_under_test(free: set[str], names: Sequence[str]) -> list[str]:
    unknown = sorted(free - {*names} - sys.stdlib_module_names)
    if not names and len(free) == 1:
        return list(free)
    if unknown and (names or len(unknown) > 1):
        entry_point = json.dumps([*names, *unknown])
        raise BrokenTests(
            f"not complete: they use {', '.join(unknown)} without a definition, allowed: "
            f'"entry_point": {entry_point} if the solution defines them, else "prelude": SOURCE'
        )
    return list(names) or unknown


def _free_names(sources: Sequence[str]) -> set[str]:
    """The global names that the sources use and none of them defines."""
    used, bound = set[str](), set(dir(builtins))
    tables = [symtable.symtable(source, "<tests>", "exec") for source in sources]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                bound.add(symbol.get_name())
    return {name for name in used - bound if not name.startswith("__")}
