"""How much memory the machine, or the container that the run is in, has left."""

from __future__ import annotations

from pathlib import Path

_MACHINE, _LIMIT, _USED = (
    Path("/proc/meminfo"),
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory.current"),
)


def available_mib() -> float | None:
    """Return the MiB that processes can still get; None where the system does not tell."""
    found = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(found, default=None)


def _of_machine() -> float | None:
    try:
        lines = _MACHINE.read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if b"MemAvailable" in line), None)


def _of_container() -> float | None:
    try:
        limit, used = _LIMIT.read_bytes().strip(), _USED.read_bytes().strip()
    except OSError:
        return None
    return (int(limit) - int(used)) / 2**20 if limit.isdigit() and used.isdigit() else None
