"""Which layers of isolation work on this machine, found by trying them.

`find_isolation()` tries the modes from the strongest to the weakest and returns the first with
level `full`, else the strongest that works. `check()` reports to the user, after a few real
attempts to break out.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import SandboxError
from penstock.sandbox.host import Mode, Nursery
from penstock.sandbox.settings import LEVELS, Level, SandboxSettings, job_limits

_FULL_NAMESPACES = frozenset({"mnt", "pid", "net", "ipc"})

_ATTEMPTS = {
    "network": "import socket\nsocket.socket()",
    "a new process": "import os\nif os.fork() == 0: os._exit(0)",
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "a file outside": "open('/etc/passwd').read()",
    "writing outside": "open('/penstock-escaped', 'w')",
    "a signal to others": "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 0)",
    "memory past the limit": "x = bytearray(8 << 30)",
    "root": "import os\nos.setuid(0)",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


@dataclass(slots=True, frozen=True)
class Isolation:
    """A mode that works on this machine, and the layers that it gives."""

    mode: Mode
    level: Level
    layers: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class SandboxReport:
    """The report of `penstock sandbox check`."""

    isolation: Isolation
    missing: tuple[str, ...]
    attempts: dict[str, bool]  # what was tried -> whether it was stopped
    minimum: Level

    @property
    def ok(self) -> bool:
        """Whether code would be run here under the settings."""
        strong = LEVELS.index(self.isolation.level) >= LEVELS.index(self.minimum)
        return strong and all(self.attempts.values())

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        verdict = "code would run" if self.ok else "code would be refused"
        text = [f"isolation: {self.isolation.level} (minimum: {self.minimum}): {verdict}"]
        text += [f"  active   {layer}" for layer in self.isolation.layers]
        text += [f"  missing  {layer}" for layer in self.missing]
        for attempt, stopped in self.attempts.items():
            text.append(f"  {'stopped ' if stopped else 'POSSIBLE'} {attempt}")
        return text


ALL_LAYERS = (
    "bubblewrap",
    "user namespace",
    "mount namespace",
    "process namespace",
    "network namespace",
    "ipc namespace",
    "seccomp",
    "landlock",
    "unprivileged user",
    "resource limits",
    "no new privileges",
)
_NAMES = {"user": "user", "mnt": "mount", "pid": "process", "net": "network", "ipc": "ipc"}


def _candidates(bubblewrap: bool) -> Iterator[Mode]:
    root = os.geteuid() == 0
    for wrapped in (True, False) if bubblewrap else (False,):
        yield Mode(bubblewrap=wrapped, namespaces=True, user_namespace=True)
        if root:
            yield Mode(bubblewrap=wrapped, namespaces=True, user_namespace=False)
    if bubblewrap and not root:
        yield Mode(bubblewrap=True, namespaces=False, user_namespace=False)
    yield Mode(bubblewrap=False, namespaces=False, user_namespace=False)


def _describe(mode: Mode, facts: dict[str, Any]) -> Isolation:
    layers = ["bubblewrap"] if mode.bubblewrap else []
    layers += [f"{word} namespace" for key, word in _NAMES.items() if key in facts["namespaces"]]
    layers += ["seccomp"] if facts["arch"] is not None else []
    layers += ["landlock"] if facts["landlock"] else []
    own_user = facts["uid"] != os.geteuid() or "user" in facts["namespaces"]
    layers += ["unprivileged user"] if facts["uid"] != 0 and own_user else []
    layers += ["resource limits", "no new privileges"]
    level: Level = "weak"
    if "seccomp" in layers and facts["uid"] != 0:
        if facts["namespaces"] and set(facts["namespaces"]) >= _FULL_NAMESPACES and own_user:
            level = "full"
        elif facts["landlock"]:
            level = "filtered"
    return Isolation(mode, level, tuple(layers))


def try_mode(mode: Mode, settings: SandboxSettings) -> Isolation | None:
    """Return the isolation that a mode gives here; None if it does not work."""
    try:
        nursery = Nursery(mode, settings)
    except SandboxError:
        return None
    try:
        sandbox = nursery.spawn()
        found = _describe(mode, sandbox.facts)
        sandbox.end()
        return found
    except SandboxError:
        return None
    finally:
        nursery.close()


@functools.lru_cache(maxsize=4)
def _best(bubblewrap: bool) -> Isolation | None:
    best: Isolation | None = None
    for mode in _candidates(bubblewrap):
        found = try_mode(mode, SandboxSettings())
        if found and (best is None or LEVELS.index(found.level) > LEVELS.index(best.level)):
            best = found
        if best and best.level == "full":
            break
    return best


def find_isolation(settings: SandboxSettings) -> Isolation:
    """Return the strongest isolation that works here; refuse one below the settings' minimum."""
    found = _strongest(settings)
    if LEVELS.index(found.level) < LEVELS.index(settings.minimum):
        raise SandboxError(
            f"sandbox: isolation here is {found.level!r} ({', '.join(found.layers)}), allowed: "
            f"{settings.minimum!r} or stronger; `penstock sandbox check` says what is missing, "
            f"the option minimum accepts weaker isolation"
        )
    return found


def _strongest(settings: SandboxSettings) -> Isolation:
    found = _best(settings.bubblewrap == "auto" and shutil.which("bwrap") is not None)
    if found is None:
        raise SandboxError("sandbox: no way to isolate code works on this machine (Linux only)")
    return found


def check(settings: SandboxSettings | None = None) -> SandboxReport:
    """Report which layers are active here, and whether real attempts to break out are stopped."""
    settings = settings or SandboxSettings()
    isolation = _strongest(settings)
    missing = tuple(layer for layer in ALL_LAYERS if layer not in isolation.layers)
    nursery = Nursery(isolation.mode, settings)
    attempts = {}
    try:
        for name, source in _ATTEMPTS.items():
            sandbox = nursery.spawn()
            job = {"job": "program", "source": source}
            outcome = sandbox.run(job, job_limits(settings, settings.timeout_s))
            sandbox.end()
            attempts[name] = outcome.status != 0
    finally:
        nursery.close()
    return SandboxReport(isolation, missing, attempts, settings.minimum)
