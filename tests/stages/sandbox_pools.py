"""Pools for tests: every way to isolate that works on the machine the tests run on."""

from __future__ import annotations

import functools
import os
import re
import select
from collections.abc import Collection
from pathlib import Path

import pytest

from penstock.errors import SandboxError
from penstock.reward.sandbox.host import Isolation, Mode, try_mode
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import SandboxSettings

MODES = {
    "bubblewrap": Mode(bubblewrap=True, namespaces=True, user_namespace=True),
    "namespaces": Mode(bubblewrap=False, namespaces=True, user_namespace=True),
    "root namespaces": Mode(bubblewrap=False, namespaces=True, user_namespace=False),
    "filtered": Mode(bubblewrap=False, namespaces=False, user_namespace=False),
}


@functools.cache
def _isolation(name: str) -> Isolation | None:
    try:
        return try_mode(MODES[name], SandboxSettings())
    except SandboxError:
        return None


def make_pool(name: str, **settings: object) -> SandboxPool:
    """Return a pool of this mode; skip the test if the mode does not work or does not protect."""
    isolation = _isolation(name)
    if isolation is None or isolation.level == "weak":
        pytest.skip(f"isolation by {name} does not work on this machine")
    values = {"minimum": "filtered", **settings}
    return SandboxPool(SandboxSettings.model_validate(values), isolation)


def factories() -> dict[int, str]:
    """Return the factory of each process of this process's sandboxes, the factories' own included."""
    found, mark = dict[int, str](), re.compile(rf"# factory \d+ of process {os.getpid()}\b")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if named := mark.search(command):
                found[int(entry.name)] = named.group()
    return found


def left_over(besides: Collection[str] = ()) -> list[str]:
    """Return the factories, besides these, that have processes which do not end.

    On a busy machine a killed process still stands in the table for a moment: each may take ten seconds.
    """
    return sorted(
        {name for pid, name in factories().items() if name not in besides and not _ends(pid)}
    )


def _ends(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10.0)[0])
    finally:
        os.close(handle)
