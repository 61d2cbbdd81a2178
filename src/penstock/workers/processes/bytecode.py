"""Where a run finds compiled modules if Python writes none beside the sources.

Images often tell Python to write no bytecode, or install packages that only root can write. The command and every worker
then compile torch and transformers anew, which takes longer than their imports. They keep what they compile in a
folder of the user's cache: the second start finds it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def use_bytecode_cache() -> None:
    """Keep what this process compiles from now on in the user's cache, where Python writes none."""
    if chosen := bytecode_environment():
        sys.pycache_prefix, sys.dont_write_bytecode = chosen["PYTHONPYCACHEPREFIX"], False


def bytecode_environment(package: str = "torch") -> dict[str, str]:
    """Return the variables that make a worker keep its bytecode in the user's cache; none where it need not."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "penstock" / "bytecode"
        if sys.pycache_prefix != str(folder) and (
            sys.pycache_prefix is not None or not _is_compiled_anew(package)
        ):
            return {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # no home, or none that can be written: compile as before
        return {}
    if found.st_uid != os.getuid() or found.st_mode & 0o022:  # what lies there is run as code
        return {}
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def _is_compiled_anew(package: str) -> bool:
    """Return whether every process compiles the package: it has no bytecode, and none will be written."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin or not spec.cached or Path(spec.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
