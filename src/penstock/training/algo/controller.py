"""Coefficients that follow a target: adaptive KL and adaptive entropy, one proportional controller.

After every step a coefficient is multiplied by 1 + 0.1 e, where e is the relative distance of the measured mean
from its target, at most 0.2 either way: it moves by at most 2 % a step. The factors are all the state there is;
a checkpoint holds them, so a resumed run goes on with the same coefficients.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.training.algo.method import Algorithm

GAIN, LARGEST_ERROR = 0.1, 0.2
LARGEST_FACTOR = 1000.0  # how far a coefficient moves from where it began, either way


def adapted(factor: float, measured: float, target: float, *, sign: int) -> float:
    """The factor after a step; `sign` 1: it rises while the measured mean is above its target, -1: below."""
    if not target or math.isnan(measured):
        return factor
    error = max(-LARGEST_ERROR, min(measured / target - 1.0, LARGEST_ERROR))
    moved = factor * (1.0 + sign * GAIN * error)
    return max(1.0 / LARGEST_FACTOR, min(moved, LARGEST_FACTOR))


class Controller:
    """Sets `kl_beta` and `entropy_beta` of one algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._start = algorithm.settings
        self._kl_factor = self._entropy_factor = 1.0

    def follow(self, *, kl: float, entropy: float) -> None:
        """Adapt the coefficients to the means of a step; NaN: nothing was measured."""
        start = self._start
        self._set(
            adapted(self._kl_factor, kl, start.kl_target, sign=1),
            adapted(self._entropy_factor, entropy, start.entropy_target, sign=-1),
        )

    def _set(self, kl_factor: float, entropy_factor: float) -> None:
        self._kl_factor, self._entropy_factor = kl_factor, entropy_factor
        self.algorithm.settings = replace(
            self._start,
            kl_beta=self._start.kl_beta * kl_factor,
            entropy_beta=self._start.entropy_beta * entropy_factor,
        )

    def state_dict(self) -> list[float]:
        return [self._kl_factor, self._entropy_factor]

    def load_state_dict(self, state: list[float]) -> None:
        self._set(*state)


def controllers(algorithms: dict[str, Algorithm]) -> dict[str, Controller]:
    """A controller for each algorithm with a target, by the first task that has it."""
    adaptive: dict[Algorithm, str] = {}
    for task, algorithm in algorithms.items():
        if algorithm.settings.kl_target or algorithm.settings.entropy_target:
            adaptive.setdefault(algorithm, task)
    return {task: Controller(algorithm) for algorithm, task in adaptive.items()}
