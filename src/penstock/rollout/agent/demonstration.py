"""Demonstrations as rollouts: answers that the data gives. Nothing is sampled, nothing is scored.

So a supervised run has what every run has: the journal, checkpoints, resume to the bit, ranks, evaluation.
A demonstration's reward is its weight in the loss: 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.data.chat import ChatTemplate
from penstock.data.demonstration import TURNS, ShownRow, shown_rows, template_arguments
from penstock.rollout.agent_loop import AgentLoop
from penstock.types import Prompt, Rollout, Row, Score, Status, VersionSegment


class Demonstrations(AgentLoop):
    """Consumes rollouts to make, produces them with the answers of their prompts."""

    def __init__(
        self,
        chat: ChatTemplate,
        *,
        system_prompt: str,
        arguments: Mapping[str, Any],
        max_tokens: int,
        positions: int | None = None,
    ) -> None:
        """max_tokens: of all that follows a prompt; positions: the model's context, if it is known.

        A longer demonstration is cut there.
        """
        self._chat, self._system_prompt, self._arguments = chat, system_prompt, arguments
        self._max_tokens, self._positions = max_tokens, positions or sys.maxsize

    async def generate_group(
        self, rollouts: list[Rollout], *, enable_partial_rollout: bool = False
    ) -> list[Rollout]:
        for rollout in rollouts:
            if rollout.status is not Status.COMPLETED:
                assert rollout.prompt is not None
                self._fill(rollout, rollout.prompt)
        return rollouts

    async def pause(self) -> None:
        """Do nothing: nothing is under way."""

    def _fill(self, rollout: Rollout, prompt: Prompt) -> None:
        arguments = template_arguments(prompt.extra, self._arguments)
        rows = shown_rows(
            self._chat, prompt.messages, prompt.extra[TURNS], self._system_prompt, arguments
        )
        whole = sum(len(row.token_ids) for row in rows)
        rows = _cut(rows, self._max_tokens, self._positions)
        rollout.response_ids = np.concatenate([row.token_ids for row in rows])
        rollout.loss_mask = np.concatenate([row.learned for row in rows])
        length = len(rollout.response_ids)
        rollout.logprobs = np.zeros(length, np.float32)
        rollout.segments = (VersionSegment(rollout.issued_version, length),)
        if len(rows) > 1:
            rollout.rows = tuple(Row(row.prompt_ids, len(row.token_ids)) for row in rows)
        rollout.check()
        rollout.text = self._chat.decode(rollout.response_ids)
        rollout.finish_reason = "stop" if length == whole else "length"
        rollout.score = Score(1.0)
        rollout.move_to(Status.COMPLETED)


def _cut(rows: list[ShownRow], most: int, positions: int) -> list[ShownRow]:
    """The first `most` tokens behind the prompts, of each row those with a place in the model's context."""
    kept = []
    for row in rows:
        size = min(most, positions - len(row.prompt_ids))
        if size <= 0:
            break
        kept.append(ShownRow(row.prompt_ids, row.token_ids[:size], row.learned[:size]))
        most -= len(row.token_ids)
    return kept
