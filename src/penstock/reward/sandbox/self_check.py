"""`penstock sandbox check`: which layers are active here, and what real attempts to get past them do.

Attempts on the kernel are programs that must fail; attempts on the judge are submissions that know no
answer and must not pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.reward.sandbox.host import ALL_LAYERS, Isolation, strongest
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import LEVELS, Level, SandboxSettings, job_limits
from penstock.reward.sandbox.verify import verify

_PROGRAMS = {
    "network": "import socket\nsocket.socket()",
    "a new process": "import os\nif os.fork() == 0: os._exit(0)",
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "a file outside": "open('/etc/passwd').read()",
    "writing outside": "open('/penstock-escaped', 'w')",
    "a signal to others": "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 0)",
    "memory past the limit": "x = bytearray(8 << 30)",
    "a better place for the processor": "import os\nos.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))",
    "root": "import os\nos.setuid(0)",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "an installed package": "import os, sys\nsys.path.append(os.path.dirname(os.__file__) + '/site-packages')\nimport pip",
    "a lock that others see": "import fcntl, os\nfcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
    "a notification about others": "import fcntl, os\nfcntl.fcntl(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 1026, 1)",
    "a mark that others see": "import os\nos.utime('/dev/null')",
}
_FORGER = """
import json, os, struct
size = struct.unpack('!I', os.read(4, 4))[0]
json.loads(os.read(4, size))
names = {name: {'object': [0, 'function']} for name in ('f', 'set', '__builtins__')}
body = json.dumps({'value': names}).encode() + b' ' * 99
os.write(4, struct.pack('!I', len(body)) + body)
body = json.dumps({'value': 0, 'changed': []}).encode()
while os.read(4, 1 << 16): os.write(4, struct.pack('!I', len(body)) + body)
"""
_OBJECT = "class Any:\n    def __contains__(self, item): return True\ndef f(): return Any()"
_ALIKE = """
import json, os
def f():
    form = {'set': [{'int': hex(n * ((1 << 61) - 1))} for n in range(20_000)]}
    os.write(3, json.dumps({'value': form}).encode() + b'\\n')
    os._exit(0)
"""
_STATE = "import os\nprint(oct(os.stat('.').st_mode))\nos.chmod('.', 0o711)"
_SUBMISSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "forged built-ins of the judge": ({"asserts": "assert set(f()) == set([1])"}, _FORGER),
    "ending the judge's loop": (
        {"asserts": "assert all(map(lambda x: f(x) == x, [1, 2]))"},
        "def f(x): raise StopIteration",
    ),
    "an object that judges itself": ({"asserts": "assert 3 in f()"}, _OBJECT),
    "an argument changed under the test": (
        {"asserts": "x = [2, 1]\nassert f(x) == sorted(x)"},
        "def f(x):\n    x.clear()\n    return x",
    ),
    "values that all hash alike": ({"inputs": [[]], "outputs": [1], "fn_name": "f"}, _ALIKE),
    "state from an earlier test": (
        {"inputs": ["", ""], "outputs": ["0o40700", "0o40711"]},
        _STATE,
    ),
}


@dataclass(slots=True, frozen=True)
class SandboxReport:
    """The report of `penstock sandbox check`."""

    isolation: Isolation
    missing: tuple[str, ...]
    reason: str  # why there is no stronger isolation; empty at the level full
    attempts: dict[str, bool]  # what was tried -> whether it was stopped
    minimum: Level

    @property
    def ok(self) -> bool:
        """Whether code would be run here under the settings."""
        strong = LEVELS.index(self.isolation.level) >= LEVELS.index(self.minimum)
        return strong and all(self.attempts.values())

    def lines(self) -> list[str]:
        """The report as lines of text."""
        verdict = "code would run" if self.ok else "code would be refused"
        text = [f"isolation: {self.isolation.level} (minimum: {self.minimum}): {verdict}"]
        text += [f"  because  {self.reason}"] if self.reason else []
        text += [f"  active   {layer}" for layer in self.isolation.layers]
        text += [f"  missing  {layer}" for layer in self.missing]
        for attempt, stopped in self.attempts.items():
            text.append(f"  {'stopped ' if stopped else 'POSSIBLE'} {attempt}")
        return text


def check(settings: SandboxSettings | None = None) -> SandboxReport:
    """Report which layers are active here, and whether real attempts to get past them are stopped."""
    settings = settings or SandboxSettings()
    isolation, reason = strongest(settings)
    missing = tuple(layer for layer in ALL_LAYERS if layer not in isolation.layers)
    pool = SandboxPool(settings, isolation)
    attempts = {}
    try:
        for name, source in _PROGRAMS.items():
            with pool.sandbox() as sandbox:
                job = {"job": "program", "source": source}
                outcome = sandbox.run(job, job_limits(settings, settings.timeout_s))
            attempts[name] = outcome.status != 0
        for name, (tests, source) in _SUBMISSIONS.items():
            attempts[name] = not verify(pool, tests, source).passed
    finally:
        pool.close()
    return SandboxReport(isolation, missing, reason, attempts, settings.minimum)
