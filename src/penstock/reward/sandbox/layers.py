"""Which layers of isolation work on this machine, found by trying them.

`find_isolation()` tries the modes from the strongest to the weakest and returns the first with
level `full`, else the strongest that works. What the kernel does not offer is named in one line, and
code is refused below the level that the settings ask for.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import SandboxError
from penstock.reward.sandbox.host import Mode, SandboxFactory, SandboxLost, one_id_is_mapped
from penstock.reward.sandbox.settings import LEVELS, Level, SandboxSettings, job_limits

_FULL_NAMESPACES = frozenset({"mnt", "pid", "net", "ipc"})


@dataclass(slots=True, frozen=True)
class Isolation:
    """A mode that works on this machine, and the layers that it gives."""

    mode: Mode
    level: Level
    layers: tuple[str, ...]


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


def try_mode(mode: Mode, settings: SandboxSettings) -> Isolation:
    """The isolation that a mode gives here; raise SandboxError with what keeps it from working."""
    factory = SandboxFactory(mode, settings)
    try:
        sandbox = factory.spawn()
        isolation = _describe(mode, sandbox.facts)
        limits = job_limits(settings, settings.timeout_s)
        outcome = sandbox.run({"job": "program", "source": ""}, limits)
        sandbox.end()
    except SandboxLost:
        raise SandboxError("the process of a sandbox ended") from None
    finally:
        factory.close()
    if outcome.status != 0:
        output = (outcome.report or outcome.stderr).decode(errors="replace")
        raise SandboxError(f"an empty program failed: {output[:200].strip()}")
    return isolation


@functools.lru_cache(maxsize=4)
def _best(bubblewrap: bool) -> tuple[Isolation | None, str]:
    """The strongest isolation that works here, and why there is no stronger one."""
    best: Isolation | None = None
    reasons = {}
    for mode in _candidates(bubblewrap):
        try:
            isolation = try_mode(mode, SandboxSettings())
        except SandboxError as error:
            reasons[mode] = str(error)
            continue
        if best is None or LEVELS.index(isolation.level) > LEVELS.index(best.level):
            best = isolation
        if best.level == "full":
            break
    return best, _why(best, reasons)


_EXPLAINED = (
    (
        "clone",
        "new namespaces are refused (a container's seccomp profile, or the sysctls "
        "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
        "kernel.apparmor_restrict_unprivileged_userns)",
    ),
    ("prctl 22", "seccomp filters are refused"),
    ("mount", "mounts in a new namespace are refused"),
)


def _why(best: Isolation | None, reasons: dict[Mode, str]) -> str:
    """In one line what is missing for the level `full`; empty if nothing is."""
    if best is not None and best.level == "full":
        return ""
    why = ["only one user id is mapped, root's"] if one_id_is_mapped() else []
    for mode, reason in reasons.items():
        if (mode.namespaces and not mode.bubblewrap) or best is None:
            why.append(next((text for part, text in _EXPLAINED if part in reason), reason))
    if best is not None and "landlock" not in best.layers:
        why.append("the kernel offers no Landlock")
    return "; ".join(dict.fromkeys(why))


def find_isolation(settings: SandboxSettings) -> Isolation:
    """The strongest isolation that works here; refuse one below the settings' minimum."""
    isolation, reason = strongest(settings)
    if LEVELS.index(isolation.level) < LEVELS.index(settings.minimum):
        raise SandboxError(
            f"sandbox: isolation here is {isolation.level!r} ({', '.join(isolation.layers)}), allowed: "
            f"{settings.minimum!r} or stronger; missing: {reason}; "
            f"the option minimum = {isolation.level!r} accepts what there is"
        )
    return isolation


def strongest(settings: SandboxSettings) -> tuple[Isolation, str]:
    """The strongest isolation here and why it is no stronger; raise SandboxError if none works."""
    best, reason = _best(settings.bubblewrap == "auto" and shutil.which("bwrap") is not None)
    if best is None:
        raise SandboxError(
            f"sandbox: code is refused, no level of isolation can be had here: {reason}"
        )
    return best, reason
