"""A worker process that answers each line with one line, within a time-out.

Blocking, for worker threads; one request at a time. After a time-out or the end of the process, kill it
and start another.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence

from penstock.errors import RewardError

MAX_REPLY_BYTES = 16 << 20
MAX_STRETCH = 10  # a process is stuck after this many times the limit in wall time


class ProcessGone(Exception):
    """The process ended without an answer."""


class ProcessSlow(Exception):
    """The process gave no answer in time."""


class LineProcess:
    """Starts the command and waits for its first line, which says that it is ready."""

    def __init__(self, command: Sequence[str], start_timeout_s: float) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the run, which closes its workers itself
        )
        try:
            self._read_line(start_timeout_s)
        except (ProcessGone, ProcessSlow):
            said = self.last_words()
            self.kill()
            raise RewardError(f"{' '.join(command[1:3])} does not start: {said}") from None

    def ask(self, line: str, timeout_s: float, *, processor_time: bool = False) -> str:
        """Return the answer to one line. Raises ProcessGone or ProcessSlow.

        With `processor_time` the limit is on the process's own processor time, so that a busy machine
        changes no result; the wait is still bounded by `MAX_STRETCH` times the limit.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ProcessGone from None
        if not processor_time:
            return self._read_line(timeout_s)
        return self._read_line(timeout_s * MAX_STRETCH, timeout_s)

    def _read_line(self, wall_s: float, processor_s: float = math.inf) -> str:
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), bytearray()
        deadline, limit = time.monotonic() + wall_s, self._processor_s() + processor_s
        while not line.endswith(b"\n"):
            left = min(deadline - time.monotonic(), limit - self._processor_s())
            if not select.select([descriptor], [], [], max(0.0, left))[0]:
                if left > 0:
                    continue  # the process waited for a processor: read its clock again
                raise ProcessSlow
            chunk = os.read(descriptor, 1 << 16)
            if not chunk or len(line) > MAX_REPLY_BYTES:
                raise ProcessGone
            line += chunk
        return line.decode().strip()

    def _processor_s(self) -> float:
        """Return the processor time that the process has used; 0 if it has ended."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)  # the clock of that process
        except OSError:
            return 0.0

    def last_words(self) -> str:
        """Return the last lines that the process wrote to stderr."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 2000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it ended or hung without a message"

    def kill(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # killed with a request still in the buffer
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()
