"""Isolated execution of untrusted code, its HTTP server and client.

Stopped: network, files outside a scratch folder, other processes, memory, time, output, disk, signals to
others, the parent's environment. `check()` says which layers are active on this machine.

Not stopped: a bug in the Linux kernel; timing and cache side channels between sandboxes and the host;
use of the processor up to the time limit (a hostile solution slows its neighbours); reading the Python
standard library and system libraries; knowing the kernel's version and the time; guessing right
answers; within one submission, seeing from its process number how many threads earlier tests
started. With `processes = true` memory is limited per process, not in all. Below the level `full` (no
namespaces) code also sees that other processes exist, and has no scratch folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.reward.sandbox.self_check import SandboxReport
    from penstock.reward.sandbox.settings import SandboxSettings


def check(settings: SandboxSettings | None = None) -> SandboxReport:
    """Report which layers are active here, and whether real attempts to break out are stopped."""
    from penstock.reward.sandbox.self_check import check  # lazily: most commands need none of it

    return check(settings)


__all__ = ["check"]
