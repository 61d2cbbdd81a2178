"""How many tokens one forward pass of the trainer takes, if the user does not say.

On a CPU small packs are faster: their activations stay in the cache. On a GPU the activations of a pack
may take half of the memory that is free after weights, masters, gradients and moments. The estimate
counts what a decoder layer keeps for its backward pass; it does not know a model's own extras. A pack
need not be larger than what keeps the GPU at work on a layer while the host starts the next one; small
layers need more tokens for that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config import TrainConfig
from penstock.training.parallel.ranks import Ranks

CPU_TOKENS = 2048
LEAST_TOKENS, ENOUGH_TOKENS, MOST_TOKENS = 2048, 12288, 32768
SMALL_LAYER = 1 << 23  # numbers
_SHARE = 0.5  # of the free memory; the rest is for logits, fragments and what others allocate
_TO_COME = 4 + 8  # bytes per trained number that the first update allocates: gradient and moments


@dataclass(slots=True, frozen=True, kw_only=True)
class LayerShape:
    """What decides how much a model keeps per token."""

    layers: int
    hidden: int
    intermediate: int  # of all experts that see a token
    bytes_per_number: int  # of activations

    @classmethod
    def of(cls, config: Any, bytes_per_number: int) -> LayerShape:
        """Read a transformers config; of a model that sees images too, the part for text."""
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        hidden = int(config.hidden_size)
        experts = getattr(config, "num_experts_per_tok", None)
        per_expert = getattr(config, "moe_intermediate_size", None) or 0
        wide = getattr(config, "intermediate_size", None) or 4 * hidden
        intermediate = int(experts * per_expert) if experts and per_expert else int(wide)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            intermediate=intermediate,
            bytes_per_number=bytes_per_number,
        )

    @property
    def useful_tokens(self) -> int:
        """Tokens of a pack beyond which it only holds more memory."""
        numbers = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        return ENOUGH_TOKENS if numbers > SMALL_LAYER else MOST_TOKENS

    def bytes_per_token(self, *, checkpointing: bool) -> int:
        """The activations of one token: about 12 vectors a layer and 4 inside its MLP.

        With checkpointing each layer keeps its input, and one layer at a time is computed again.
        """
        one_layer = 12 * self.hidden + 4 * self.intermediate
        numbers = (
            self.layers * self.hidden + one_layer if checkpointing else self.layers * one_layer
        )
        return numbers * self.bytes_per_number


def choose_micro_batch_tokens(free: int, trained: int, bytes_per_token: int, useful: int) -> int:
    """The tokens of a pack, at most `useful`; `trained` numbers have no gradient and no moments yet."""
    room = int(max(0, free - _TO_COME * trained) * _SHARE)
    tokens = room // bytes_per_token // 1024 * 1024
    return max(LEAST_TOKENS, min(useful, tokens))


def token_budget(
    config: TrainConfig, shape: LayerShape, trained: int, device: torch.device, ranks: Ranks
) -> int:
    """The tokens of a pack on this device, where all ranks together train `trained` numbers; a choice is logged."""
    if config.micro_batch_tokens:
        return config.micro_batch_tokens
    if device.type != "cuda":
        return CPU_TOKENS
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    bytes_per_token = shape.bytes_per_token(checkpointing=config.gradient_checkpointing)
    share = trained // (ranks.data_world * ranks.context.size)
    tokens = choose_micro_batch_tokens(free, share, bytes_per_token, shape.useful_tokens)
    print(
        f"trainer on {device}: micro-batches of {tokens:,} tokens ({free / 2**30:.1f} GiB free, "
        f"{bytes_per_token / 2**10:,.0f} KiB of activations per token)",
        file=sys.stderr,
        flush=True,
    )
    return tokens * ranks.context.size  # which share a pack
