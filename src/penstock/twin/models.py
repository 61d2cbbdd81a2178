"""How long an engine decodes and a trainer trains: the two models that a profile fits and the twin runs on.

An engine makes one token for each of its rows in a decode step; a step with n rows takes `step_s + n *
row_s`. A group's prompt is computed once, in `prefill_s`. A trainer needs `fixed_s` for an update and
`token_s` for each response token, divided by its ranks.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

LOSS_PER_DOUBLING = 0.05  # assumed: twice the ranks train 5 % less than twice as fast


@dataclass(slots=True, frozen=True, kw_only=True)
class DecodeModel:
    """The speed of one engine."""

    step_s: float  # of a decode step, whatever the rows
    row_s: float  # per row of a decode step
    prefill_s: float = 0.0  # per group
    slots: int = 64  # most rows

    def seconds(self, rows: float) -> float:
        return self.step_s + rows * self.row_s


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainModel:
    """The speed of the trainer."""

    fixed_s: float
    token_s: float  # per response token, on one rank
    spread: tuple[float, ...] = (1.0,)  # seconds of steps, relative to the model

    def seconds(self, tokens: int, ranks: int, step: int = 0) -> float:
        doublings = max(0, ranks - 1).bit_length()
        shared = self.token_s * tokens / ranks / (1 - LOSS_PER_DOUBLING) ** doublings
        return (self.fixed_s + shared) * self.spread[step % len(self.spread)]


class Rows:
    """The rows of one engine, or of `engines` equal ones as one: which run, which wait, which ends next.

    Rows advance together, so a row ends when the count of decode steps has reached its own: adding and
    ending a row cost a heap operation, whatever the number of rows and tokens.
    """

    def __init__(self, model: DecodeModel, engines: int = 1) -> None:
        self.model = model
        self.slots = model.slots * engines
        self.busy_s = self.row_s = 0.0  # seconds with a row, and seconds of all rows
        self._engines = engines
        self._steps = self._now = 0.0  # decode steps done by then
        self._stalled_s = 0.0  # seconds to come in which no row advances
        self.stalls_s = 0.0  # such seconds that have passed beside a row
        self.tokens = 0.0
        self._ends: list[tuple[float, int]] = []  # (count of steps at which it ends, row)
        self._running: dict[int, float] = {}  # row -> steps done when it began
        self._waiting: deque[tuple[int, int]] = deque()  # (row, tokens)
        self.is_held = False  # no row begins

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _pace(self) -> float:
        return self.model.seconds(max(1.0, len(self._running) / self._engines))

    def advance(self, now: float) -> None:
        """Move to a time at which no row ends or began to run before."""
        passed = now - self._now
        self._now = now
        if self._running:
            self.busy_s += passed
            self.row_s += passed * len(self._running)
            stalled = min(passed, self._stalled_s)
            self._stalled_s -= stalled
            self.stalls_s += stalled
            steps = (passed - stalled) / self._pace()
            self._steps += steps
            self.tokens += steps * len(self._running)
        else:
            self._stalled_s = max(0.0, self._stalled_s - passed)

    def stall(self, seconds: float) -> None:
        """Let all rows wait: a prefill, or weights being loaded between two decode steps."""
        self._stalled_s += seconds / self._engines

    def add(self, row: int, tokens: int) -> None:
        self._waiting.append((row, tokens))

    def admit(self) -> None:
        """Let waiting rows run for as long as slots are free."""
        while self._waiting and len(self._running) < self.slots and not self.is_held:
            row, tokens = self._waiting.popleft()
            self._running[row] = self._steps
            heapq.heappush(self._ends, (self._steps + tokens, row))

    def next_end(self) -> float | None:
        """Return the time at which the next row ends if no other begins before; None without rows."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self._steps)
        return self._now + self._stalled_s + left * self._pace()

    def take_ended(self) -> list[int]:
        """Return and forget the rows that have made their last token."""
        ended = []
        while self._ends and (
            self._ends[0][1] not in self._running or self._ends[0][0] <= self._steps + 1e-6
        ):
            _, row = heapq.heappop(self._ends)
            if self._running.pop(row, None) is not None:
                ended.append(row)
        return ended

    @property
    def steps(self) -> float:
        """The decode steps done."""
        return self._steps

    def remove(self, row: int) -> int:
        """Forget a row before its end; return the tokens that it has made."""
        began = self._running.pop(row, None)
        if began is None:
            self._waiting = deque(one for one in self._waiting if one[0] != row)
            return 0
        return max(0, int(self._steps - began + 1e-6))
