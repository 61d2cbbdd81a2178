"""What the engine's thread asks of the part that runs the model."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from penstock.engine.protocol import FinishReason
from penstock.engine.transformers.sequences import Sequence, SlotTable

Finished = list[tuple[int, FinishReason]]


class Runner(Protocol):
    """Steps a model over the requests in slots; told when a request comes and goes."""

    model: torch.nn.Module
    table: SlotTable
    vocabulary: int  # token ids are below it
    longest: int  # most tokens of one request, prompt and response
    batch_invariant: bool

    def admit(self, sequence: Sequence) -> bool:
        """Give it a slot and memory, to be prefilled in the next step; False: there is none now."""

    def rows_of(self, sequence: Sequence) -> int:
        """Tokens that must be prefilled for it."""

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        """Prefill `new` and decode one token for all others; returns what is finished and why.

        Prompts in `keep_prompts` stay prefilled for equal ones that still wait.
        """

    def settle(self) -> Finished:
        """Wait for device work, so that the table is exact; may find more that is finished."""

    def output(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a request's new ids and log-probs."""

    def release(self, slot: int) -> None:
        """Free a slot and its memory."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take checked weights, asleep or awake; what was made of the old ones is forgotten."""

    def sleep(self) -> None:
        """Give memory back; no request is in a slot."""

    def wake(self) -> None:
        """Undo `sleep`, with the newest weights."""


def end_ids(model: torch.nn.Module) -> tuple[int, ...]:
    """The model's own end of sequence ids."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
