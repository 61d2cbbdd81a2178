"""Contiguous regions of one big token array: who sits where on the device.

First fit over a sorted list of holes; a freed region joins its neighbours. Requests reserve their
longest possible size, so nothing is ever evicted, and an empty array always fits the largest request.
"""

from __future__ import annotations

import bisect


class Regions:
    """Hands out [start, start + size) of an array."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)]  # (start, size), sorted, never adjacent

    def take(self, size: int) -> int | None:
        """The start of a free region; None: there is none of this size now."""
        for i, (start, room) in enumerate(self._holes):
            if room >= size:
                if room == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + size, room - size)
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        i = bisect.bisect(self._holes, (start, 0))
        if i < len(self._holes) and start + size == self._holes[i][0]:
            size += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            start, joined = self._holes[i - 1][0], self._holes[i - 1][1]
            self._holes[i - 1] = (start, joined + size)
        else:
            self._holes.insert(i, (start, size))

    @property
    def free(self) -> int:
        return sum(size for _, size in self._holes)
