"""How a batch is divided among tasks: largest remainder, and what is left over is carried.

With weights 9 : 1 : 0.5 and 8 groups a step the third task gets 0.38 groups a step: none in most
steps, one in every third. Every step has exactly `groups_per_step` groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from penstock.errors import UserError


def largest_remainder(quotas: Mapping[str, Fraction], total: int) -> dict[str, int]:
    """Whole numbers that add up to `total`, as near to the quotas as can be; ties by order."""
    counts = {name: max(0, math.floor(quota)) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    while sum(counts.values()) > total:
        over = max(quotas, key=lambda name: counts[name] - quotas[name])
        counts[over] -= 1
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class TaskShares:
    """Each step's groups per task, in order of steps, from a start where nothing is carried."""

    def __init__(
        self, weights: Mapping[str, float], groups_per_step: int, *, first_step: int = 1
    ) -> None:
        total = sum(Fraction(weight) for weight in weights.values())
        if total <= 0 or any(weight < 0 for weight in weights.values()):
            raise UserError(f"task weights: got {dict(weights)}, allowed: none below 0, one above")
        self._quotas = {
            name: Fraction(weight) / total * groups_per_step
            for name, weight in weights.items()
            if weight > 0
        }
        self._groups_per_step = groups_per_step
        self._carried = dict.fromkeys(self._quotas, Fraction(0))
        self._next_step = first_step
        self._steps: dict[int, dict[str, int]] = {}

    def at(self, step: int) -> dict[str, int]:
        """The groups of each task in that step; a task of weight 0 is not in it."""
        while self._next_step <= step:
            credit = {name: self._carried[name] + quota for name, quota in self._quotas.items()}
            counts = largest_remainder(credit, self._groups_per_step)
            self._carried = {name: credit[name] - counts[name] for name in credit}
            self._steps[self._next_step] = counts
            self._next_step += 1
        return self._steps[step]

    def forget_before(self, step: int) -> None:
        """Steps below `step` will not be asked for again."""
        for old in [known for known in self._steps if known < step]:
            del self._steps[old]
