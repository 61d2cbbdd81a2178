"""Guess the number: an environment as the agent `gym` takes it."""

from __future__ import annotations

MOST = 16  # numbers: 1 to 16
NUMBERS = [str(number) for number in range(1, MOST + 1)]


class Guess:
    """Each answer is a guess; the world says higher or lower. Each guess costs a sixteenth."""

    def reset(self, gt_answer: str) -> str:
        self.secret, self.guesses = int(gt_answer), 0
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        self.guesses += 1
        if action not in NUMBERS:
            return "", 0.0, True  # the game is lost
        if int(action) == self.secret:
            return "", 1 - (self.guesses - 1) / MOST, True
        return ("higher" if int(action) < self.secret else "lower"), 0.0, False
