"""How long an engine decodes and a trainer trains: the two models that a profile fits and the twin runs on.

An engine makes one token for each of its rows in a decode step; a step with n rows takes `step_s + n *
row_s`. A group's prompt is computed once, in `prefill_s`. A trainer needs `fixed_s` for an update and
`token_s` for each response token, divided by its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count

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

    def at_speed(self, speed: float) -> DecodeModel:
        """Return an engine that is so many times as fast."""
        return DecodeModel(
            step_s=self.step_s / speed,
            row_s=self.row_s / speed,
            prefill_s=self.prefill_s / speed,
            slots=self.slots,
        )


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


@dataclass(slots=True, eq=False)
class _Request:
    """Some rows that were asked for together."""

    lengths: Sequence[int]  # tokens of each row
    left: int  # rows that have not ended
    begun: int = 0  # rows that run or have ended
    made: int = 0  # tokens of the longest row that has ended
    parts: list[_Part] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Part:
    """The rows of a request that began together."""

    request: int
    began: float  # decode steps done by then
    lengths: list[int]  # ascending
    ended: int = 0  # rows


class Rows:
    """The rows of one engine, or of `engines` equal ones as one: which run, which wait, which ends next.

    Rows advance together, so a row ends when the count of decode steps has reached its own: rows that begin
    together need one place in a heap, whatever their number and their tokens.
    """

    def __init__(self, model: DecodeModel, engines: int = 1) -> None:
        self.model = model
        self.slots = model.slots * engines
        self.running = self.waiting = 0  # rows
        self.busy_s = self.row_s = 0.0  # seconds with a row, and seconds of all rows
        self.steps = 0.0  # decode steps done
        self.stalls_s = 0.0  # seconds in which no row advanced, beside a row
        self.tokens = 0.0
        self.is_held = False  # no row begins
        self._engines = engines
        self._now = 0.0
        self._stalled_s = 0.0  # seconds to come in which no row advances
        self._requests: dict[int, _Request] = {}
        self._queue: deque[int] = deque()  # requests with rows that have not begun
        self._ends: list[tuple[float, int, _Part]] = []  # (steps at its next end, number, part)
        self._numbers = count()

    def _pace(self) -> float:
        return self.model.seconds(max(1.0, self.running / self._engines))

    def advance(self, now: float) -> None:
        """Move to a time at which no row ends or began to run before."""
        passed = now - self._now
        self._now = now
        if self.running:
            self.busy_s += passed
            self.row_s += passed * self.running
            stalled = min(passed, self._stalled_s)
            self._stalled_s -= stalled
            self.stalls_s += stalled
            steps = (passed - stalled) / self._pace()
            self.steps += steps
            self.tokens += steps * self.running
        else:
            self._stalled_s = max(0.0, self._stalled_s - passed)

    def stall(self, seconds: float) -> None:
        """Let all rows wait: a prefill, or weights being loaded between two decode steps."""
        self._stalled_s += seconds / self._engines

    def add(self, request: int, lengths: Sequence[int]) -> None:
        """Let a request's rows, of so many tokens each, wait for free slots."""
        self._requests[request] = _Request(lengths, len(lengths))
        self._queue.append(request)
        self.waiting += len(lengths)

    def admit(self) -> None:
        """Let waiting rows run for as long as slots are free."""
        while self._queue and self.running < self.slots and not self.is_held:
            number = self._queue[0]
            request = self._requests.get(number)
            if request is None:  # it was removed
                self._queue.popleft()
                continue
            begin = request.begun
            lengths = sorted(request.lengths[begin : begin + self.slots - self.running])
            request.begun += len(lengths)
            self.running += len(lengths)
            self.waiting -= len(lengths)
            part = _Part(number, self.steps, lengths)
            request.parts.append(part)
            heappush(self._ends, (self.steps + lengths[0], next(self._numbers), part))
            if request.begun == len(request.lengths):
                self._queue.popleft()

    def next_end(self) -> float | None:
        """Return the time at which the next row ends if no other begins before; None without rows."""
        while self._ends and self._ends[0][2].request not in self._requests:
            heappop(self._ends)
        if not self._ends:
            return None
        left = max(0.0, self._ends[0][0] - self.steps)
        return self._now + self._stalled_s + left * self._pace()

    def take_ended(self) -> list[tuple[int, int]]:
        """Return and forget the requests whose last row has ended, with the tokens of their longest rows."""
        done, until = [], self.steps + 1e-6
        while self._ends and self._ends[0][0] <= until:
            _, number, part = self._ends[0]
            request = self._requests.get(part.request)
            if request is None:  # it was removed
                heappop(self._ends)
                continue
            lengths, ended = part.lengths, part.ended
            while ended < len(lengths) and part.began + lengths[ended] <= until:
                ended += 1
            self.running -= ended - part.ended
            request.left -= ended - part.ended
            request.made = max(request.made, lengths[ended - 1])
            part.ended = ended
            if ended < len(lengths):
                heapreplace(self._ends, (part.began + lengths[ended], number, part))
            else:
                heappop(self._ends)
            if not request.left:
                del self._requests[part.request]
                done.append((part.request, request.made))
        return done

    def remove(self, number: int) -> int:
        """Forget a request before its end; return the tokens that its longest row has made."""
        request = self._requests.pop(number)
        made = request.made
        for part in request.parts:
            if part.ended < len(part.lengths):
                self.running -= len(part.lengths) - part.ended
                made = max(made, int(self.steps - part.began + 1e-6))
        self.waiting -= len(request.lengths) - request.begun
        return made
