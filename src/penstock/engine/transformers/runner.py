"""The protocol between the engine's thread and its runner, and functions that both runners share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engine.protocol import FinishReason
from penstock.engine.transformers.options import TransformersOptions
from penstock.engine.transformers.sequences import Sequence, SlotTable

Finished = list[tuple[int, FinishReason]]  # (slot, reason)


@dataclass(slots=True, frozen=True)
class CachedPrompt:
    """A prefilled prompt, kept while equal prompts still wait."""

    keys: torch.Tensor  # [layers, length, kv heads, size]
    values: torch.Tensor
    logits_V: torch.Tensor  # logits of the last token


class Runner(Protocol):
    """Runs a model over the requests in slots. Knows no threads, events or weight versions."""

    model: torch.nn.Module
    table: SlotTable
    prompts: dict[bytes, CachedPrompt]
    vocabulary: int  # size of the vocabulary
    longest: int  # most tokens of one request, prompt and response
    batch_invariant: bool

    def admit(self, sequence: Sequence) -> bool:
        """Reserve a slot and memory for the next step's prefill; False: none is free now."""

    def step(self, new: list[Sequence], keep_prompts: set[bytes]) -> Finished:
        """Prefill `new` and decode one token for all others; return what has finished and why.

        Prompts in `keep_prompts` stay cached for equal ones that still wait.
        """

    def synchronize(self) -> Finished:
        """Wait for device work, so that the table is exact; return what that work finished."""

    def release(self, slot: int) -> None:
        """Free a slot and its memory."""

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy checked weights into the model, asleep or awake; drop cached prompts."""

    def sleep(self) -> None:
        """Release memory. No request may be in a slot."""

    def wake(self) -> None:
        """Undo `sleep`, with the newest weights."""


def longest_request(model: torch.nn.Module, options: TransformersOptions) -> int:
    """Return the most tokens of one request, by the model's positions and the token budget."""
    positions = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    return min(positions, options.max_tokens_in_flight or positions)
