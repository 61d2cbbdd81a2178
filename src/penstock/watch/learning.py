"""Warnings that nothing can be learned: equal rewards, or responses that are all cut off or empty.

Looks at the batch of every step and says so after a few steps in a row, then now and then while it
lasts. Decides nothing: a run whose first rewards are rare may still find one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.types import Batch, Rollout

FIRST, AGAIN = 5, 25  # steps in a row before the first warning, and between two warnings
_SHOWN = 160  # characters of an example


class LearningWatch:
    """Consumes batches, produces warnings of one line each."""

    def __init__(self, run: str, *, by_group: bool, by_reward: bool = True) -> None:
        """run: what `penstock rollouts` is given.

        by_group: advantages compare the responses of one prompt. by_reward: nothing else is added to
        the reward, such as a penalty for length.
        """
        self._run, self._by_group = run, by_group
        self._signs: list[Callable[[Batch], str]] = [_cut_off, _empty]
        if by_reward:
            self._signs.insert(0, self._equal_rewards)
        self._steps_in_a_row: Counter[int] = Counter()

    def look(self, batch: Batch) -> list[str]:
        """Return the warnings that are due with this batch."""
        warnings = []
        for number, sign in enumerate(self._signs):
            seen = sign(batch) if batch.groups else ""
            self._steps_in_a_row[number] = self._steps_in_a_row[number] + 1 if seen else 0
            steps = self._steps_in_a_row[number]
            if steps >= FIRST and (steps - FIRST) % AGAIN == 0:
                span = f"steps {batch.step - steps + 1} to {batch.step}"
                warnings.append(
                    f"warning: {span}: {seen}. An example: {_example(batch)}. See more with: "
                    f"penstock rollouts {self._run}"
                )
        return warnings

    def _equal_rewards(self, batch: Batch) -> str:
        rewards = [
            [rollout.score.value for rollout in group.rollouts if rollout.score is not None]
            for group in batch.groups
        ]
        every = [value for group in rewards for value in group]
        if not every:
            return ""
        if len(set(every)) == 1:
            return f"nothing can be learned, because all rewards of a step are equal (now {every[0]:g})"
        if self._by_group and all(len(set(group)) <= 1 for group in rewards):
            return (
                "nothing can be learned, because all responses to a prompt have the same reward "
                f"(from {min(every):g} to {max(every):g} over the prompts)"
            )
        return ""


def _rollouts(batch: Batch) -> list[Rollout]:
    return [rollout for group in batch.groups for rollout in group.rollouts]


def _cut_off(batch: Batch) -> str:
    rollouts = _rollouts(batch)
    if not all(rollout.finish_reason == "length" for rollout in rollouts):
        return ""
    longest = max(len(rollout.response_ids) for rollout in rollouts)
    return (
        f"every response was cut off at {longest} tokens before it ended; raise sampling.max_tokens, "
        "or check that the model knows its end of sequence"
    )


def _empty(batch: Batch) -> str:
    if any(rollout.text.strip() for rollout in _rollouts(batch)):
        return ""
    return "every response is empty; look at the prompts, the chat template and sampling.stop"


def _example(batch: Batch) -> str:
    group = batch.groups[0]
    answer = group.prompt.gt_answer
    expected = "" if answer is None else f", expected answer {_short(answer)}"
    return f"response {_short(group.rollouts[0].text)}{expected}"


def _short(text: str) -> str:
    """Quote a text in one line; of a long one, its end, where answers are."""
    line = " ".join(text.split())
    return repr(line if len(line) <= _SHOWN else f"...{line[-_SHOWN:]}")
