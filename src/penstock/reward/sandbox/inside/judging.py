"""What counts as the same result, and the code of every test. Inside the sandbox.

Runs in the referee, a process without untrusted code that the host can kill, because everything that
it reads was made by an enemy. Values are compared as the forms of `wire.encode`, never put into sets
or dicts, so that the work grows with the size of a value and not with its square.

    1 pass    0 wrong answer    -1 runtime error or time-out    -2 does not compile
"""

from __future__ import annotations

import json
import math
import signal
from typing import Any

from penstock.reward.sandbox.inside import wire

PASS, WRONG, ERROR, COMPILE_ERROR = 1, 0, -1, -2
GAP, RELATIVE_GAP = 1e-6, 1e-9  # of numbers written with a point or an exponent
PROCESSOR_S = 10.0  # most processor time to judge one result
_NUMBER_CHARACTERS = 400  # of the longest word that is read as a number
_REPORT_LINES = 100  # of a solution's report; its own code writes one or two, at the end


def answer(request: dict[str, Any], processor_s: float = PROCESSOR_S) -> dict[str, Any]:
    """{"code", "note"} for one test, or {"result", "notes"} for assert-style tests.

    Data that takes longer to judge is a wrong answer: no answer at all would be a fault of the machine,
    and its rollout would be drawn again.
    """
    signal.signal(signal.SIGPROF, _on_limit)
    try:
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        if request["form"] == "asserts":
            return _asserts(request)
        code, note = _one_test(request)
    except Exception as error:  # the edge to data that untrusted code made up
        code, note = WRONG, f"the result cannot be judged: {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if request["form"] == "asserts":
        return {"result": [code], "notes": [note]}
    return {"code": code, "note": note[:600]}


def _on_limit(number: int, frame: object) -> None:
    raise TimeoutError


def _one_test(request: dict[str, Any]) -> tuple[int, str]:
    stdout, stderr, report = request["blobs"]
    reports = _last_reports(report)
    fault = _fault(request["outcome"], reports, stderr)
    if fault is not None:
        return fault
    if request["form"] == "stdio":
        printed = stdout.decode("utf-8", "backslashreplace")
        right = same_output(request["expected"], printed)
        return (PASS, "") if right else (WRONG, f"printed {_short(printed)}")
    last = reports[-1] if reports else {}
    if "not_plain" in last:
        return WRONG, _said(last["not_plain"])
    if "value" not in last:
        return ERROR, "the program ended before the function returned"
    right = same_value(request["expected"], last["value"])
    return (PASS, "") if right else (WRONG, f"returned {_short(_readable(last['value']))}")


def _asserts(request: dict[str, Any]) -> dict[str, Any]:
    """Put together what the judge reported and how the solution's process ended."""
    report, stderr, *last_words = request["blobs"]
    reports = _reports(report)
    broken = next((entry["broken"] for entry in reports if "broken" in entry), None)
    if broken is not None:
        return {"broken": _said(broken)}
    total = next((entry["count"] for entry in reports if type(entry.get("count")) is int), 1)
    if not 1 <= total <= request["max_tests"]:
        return {"too_many": total}
    tests = [entry for entry in reports if "test" in entry][:total]
    result = [
        entry["code"] if entry.get("code") in (PASS, WRONG, ERROR) else ERROR for entry in tests
    ]
    notes = [_said(entry.get("note")) for entry in tests]
    gone = bool(tests) and tests[-1].get("gone") is True
    if len(result) == total and not gone:
        return {"result": result, "notes": notes}
    fault = None
    if last_words:
        words, errors = last_words
        fault = _fault(request["ended"], _last_reports(words), errors) or (ERROR, "it exited early")
    fault = fault or _fault(request["outcome"], reports, stderr)
    code, note = fault or (ERROR, notes[-1] if notes else "the tests ended early")
    if code == COMPILE_ERROR:
        return {"result": [COMPILE_ERROR] * total, "notes": [note] * total}
    if gone:
        notes[-1] += f": {note}"
    missing = total - len(result)
    return {"result": result + [ERROR] * missing, "notes": notes + [f"not run: {note}"] * missing}


def _said(text: object) -> str:
    """A text field that untrusted code reported; empty if it is not text."""
    return text[:500] if isinstance(text, str) else ""


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _last_reports(report: bytes) -> list[dict[str, Any]]:
    """The last JSON lines of a solution, however many it wrote: reading them all would take too long."""
    return _reports(b"\n".join(report.rsplit(b"\n", _REPORT_LINES)[-_REPORT_LINES:]))


def _reports(report: bytes) -> list[dict[str, Any]]:
    """The JSON lines that a child reported, without anything else that it wrote there."""
    messages = []
    for line in report.split(b"\n"):
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(message, dict):
            messages.append(message)
    return messages


def _fault(
    outcome: dict[str, Any], reports: list[dict[str, Any]], stderr: bytes
) -> tuple[int, str] | None:
    """Why a child did not do its job; None if it did."""
    status = outcome["status"]
    if outcome["stopped"] == "wall":
        return ERROR, f"time-out after {outcome['limit_s']:g} s"
    if outcome["stopped"] == "output":
        return ERROR, "printed more than the output limit"
    error = next((report for report in reports if "error" in report), None)
    if error is not None and status != 0:
        return COMPILE_ERROR if error["error"] == "compile" else ERROR, _said(error.get("text"))
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return ERROR, "killed: out of processor time"
    if status < 0:
        return ERROR, f"killed by signal {-status}"
    if status > 0:
        text = stderr.decode("utf-8", "backslashreplace")
        return ERROR, f"exit status {status}: {_short(text[-200:])}"
    return None


def same_output(expected: str, printed: str) -> bool:
    """Compare the words of each line, decimal numbers by value; blanks and empty lines do not count."""
    left, right = _lines(expected), _lines(printed)
    return len(left) == len(right) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(left, right, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    if max(len(expected), len(printed)) > _NUMBER_CHARACTERS:
        return False
    try:
        return _close(float(expected), float(printed))
    except ValueError:
        return False


def _close(expected: float, number: float) -> bool:
    """Closer than a millionth, than half of a small number, or than the rounding of a large one."""
    if not (math.isfinite(expected) and math.isfinite(number)):
        return False  # two overflows are not the same number
    size = abs(expected)
    gap = max(min(GAP, size / 2), RELATIVE_GAP * max(size, 1.0))
    return abs(expected - number) <= gap


def same_value(expected: Any, value: Any) -> bool:
    """Compare forms as JSON data: a tuple is a list; some datasets wrap the value in a list of one."""
    if _same(expected, value):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(expected[0], value)


def _same(expected: Any, value: Any) -> bool:
    gold, answer = _open(expected), _open(value)
    if isinstance(gold, bool) or isinstance(answer, bool):
        return gold is answer
    if isinstance(gold, float) and isinstance(answer, int | float):
        return gold == answer or _close(gold, float(answer))
    if isinstance(gold, list) and isinstance(answer, list):
        return len(gold) == len(answer) and all(map(_same, gold, answer))
    if isinstance(gold, dict) and isinstance(answer, dict):
        return _same_tagged(gold, answer)
    if isinstance(gold, list | dict) or isinstance(answer, list | dict):
        return False
    return bool(gold == answer)


def _open(form: Any) -> Any:
    """A number, text, bool or None; a list for a list or tuple; or the form as it is."""
    if not isinstance(form, dict):
        return form
    name, content = wire.tag(form)
    if name in ("int", "float"):
        return wire.decode(form)
    if name == "tuple" and isinstance(content, list):
        return content
    return form


def _same_tagged(expected: dict[str, Any], value: dict[str, Any]) -> bool:
    (kind, gold), (answer_kind, answer) = wire.tag(expected), wire.tag(value)
    if kind != answer_kind:
        return False
    if kind in ("bytes", "complex", "range"):
        return bool(gold == answer)
    if not isinstance(answer, list) or len(gold) != len(answer):
        return False
    if kind in ("set", "frozenset"):
        return _sorted(gold) == _sorted(answer)
    if kind != "dict":
        return False
    answer_pairs = [(_key(key), item) for key, item in answer]
    gold_pairs = [(_key(key), item) for key, item in gold]
    answer_pairs.sort(key=lambda pair: pair[0])
    gold_pairs.sort(key=lambda pair: pair[0])
    return all(
        k == g and _same(x, y) for (k, x), (g, y) in zip(gold_pairs, answer_pairs, strict=True)
    )


def _sorted(items: list[Any]) -> list[str]:
    return sorted(json.dumps(item) for item in items)


def _key(form: Any) -> str:
    """A key as text: JSON has no other keys."""
    if isinstance(form, dict) and wire.tag(form)[0] not in ("int", "float"):
        return json.dumps(form)
    return str(wire.decode(form))


def _readable(form: Any) -> str:
    """A value's text for a note; a large or odd one as its form."""
    text = json.dumps(form)
    if len(text) > 200:
        return text
    try:
        return repr(wire.decode(form))
    except wire.NotPlain:
        return text
