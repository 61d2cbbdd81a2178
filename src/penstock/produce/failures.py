"""The failure policy of one task: back off, then stop.

Failed groups are tried again after a wait that doubles. When nothing but failures comes back, fresh
prompts wait too, so a dead backend costs a handful of calls. Past the limit the run stops with one line.
"""

from __future__ import annotations

from collections import deque

from penstock.errors import TooManyFailures

_LONGEST_WAIT_S = 30.0
_IN_A_ROW_BEFORE_HOLD = 8


class FailurePolicy:
    """Counts the outcomes of attempts to generate a group."""

    def __init__(
        self, task: str, *, max_failure_share: float, failure_window: int, retry_backoff_s: float
    ) -> None:
        self._task = task
        self._max_failure_share = max_failure_share
        self._retry_backoff_s = retry_backoff_s
        self._recent: deque[bool] = deque(maxlen=failure_window)  # True: failed
        self._in_a_row = 0
        self._hold_until = 0.0
        self.total = 0

    def succeeded(self) -> None:
        self._recent.append(False)
        self._in_a_row = 0
        self._hold_until = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Count one; raises TooManyFailures past the limit."""
        self._recent.append(True)
        self._in_a_row += 1
        self.total += 1
        rounds = self._in_a_row // _IN_A_ROW_BEFORE_HOLD
        if rounds:
            self._hold_until = now + self.backoff_s(rounds)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) == self._recent.maxlen and share > self._max_failure_share:
            raise TooManyFailures(
                f"task {self._task}: {sum(self._recent)} of the last {len(self._recent)} groups failed, "
                f"allowed: a share of {self._max_failure_share:g}; the last reason: {reason}"
            )

    def backoff_s(self, failures: int) -> float:
        """How long the next try of something that failed so often waits."""
        return float(min(self._retry_backoff_s * 2.0 ** (failures - 1), _LONGEST_WAIT_S))

    def hold_s(self, now: float) -> float:
        """How long fresh prompts must still wait; 0: not at all."""
        return max(0.0, self._hold_until - now)
