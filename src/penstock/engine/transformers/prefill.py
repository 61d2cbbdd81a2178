"""Prefill on packed rows: prompts one after another in one forward pass, no padding between them.

Prompt tokens attend causally within their own sequence. The tokens of a partial response attend one
row at a time, exactly as when they were decoded, so that going on from a partial changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.engine.transformers.cpu.buckets import ReplayMask, attend_rows
from penstock.engine.transformers.kv_attention import AttentionCall, causal_attention


@dataclass(slots=True, frozen=True)
class Span:
    """Where one sequence lies in the packed rows."""

    start: int
    prompt_length: int
    length: int  # prompt and partial response

    @property
    def end(self) -> int:
        return self.start + self.length


class PrefillStep:
    """Collects the keys and values of every layer; `finish` gives them per sequence."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer == len(self._keys), "layers store in their order"
        rows = slice(self.spans[0].start, self.spans[-1].end)
        self._keys.append(key[0, :, rows].transpose(0, 1))
        self._values.append(value[0, :, rows].transpose(0, 1))

    def attend(self, layer: int, call: AttentionCall, output: torch.Tensor) -> None:
        """Fill the prefilled rows of `output` [1, rows, heads, value size]."""
        for span in self.spans:
            prompt = slice(span.start, span.start + span.prompt_length)
            output[:, prompt] = causal_attention(call, prompt).transpose(1, 2)
            if span.length > span.prompt_length:
                replayed = slice(prompt.stop, span.end)
                output[0, replayed] = self._replay(span, replayed, call)

    def _replay(self, span: Span, rows: slice, call: AttentionCall) -> torch.Tensor:
        masks = ReplayMask(span.prompt_length, span.length, call.key.dtype)
        count = rows.stop - rows.start

        def stored(new: torch.Tensor) -> torch.Tensor:
            """[rows, kv heads, padded length, size] without copying per row."""
            own = new[0, :, span.start : span.end].transpose(0, 1)
            padded = own.new_zeros(masks.padded, *own.shape[1:])
            padded[: span.length] = own
            return padded.transpose(0, 1).expand(count, -1, -1, -1)

        query = call.query[0, :, rows].transpose(0, 1)
        return attend_rows(query, stored(call.key), stored(call.value), masks, call)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefilled rows, [layers, rows, kv heads, size]."""
        return torch.stack(self._keys), torch.stack(self._values)
