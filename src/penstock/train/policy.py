"""The policy as a torch module: packed tokens in, log-probs and entropies of chosen tokens out.

Wraps a transformers causal LM. Everything that needs the whole model happens inside one forward
call, so that a sharded model (`parallel.py`) gathers its weights exactly once. Loading, adapters and
the names under which weights leave live in `policy_weights.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.train.logprobs import LogitRule, token_logprobs
from penstock.train.pack import Pack
from penstock.train.packed_attention import ATTENTION_NAME


class Policy(nn.Module):
    """A causal language model that scores packed sequences."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.rule = LogitRule.of(model.config)
        model.set_attn_implementation(ATTENTION_NAME)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, pack: Pack, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the pack's trained tokens at their temperatures."""
        output = self.model.base_model(
            input_ids=pack.input_ids_T[None],
            position_ids=pack.position_ids_T[None],
            pack_layout=pack.layout,
            use_cache=False,
        )
        hidden_ND = output.last_hidden_state[0].index_select(0, pack.predictor_N)
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return token_logprobs(
                hidden_ND, head.weight, bias, pack.target_N, temperatures_N, self.rule
            )

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks: the largest list of modules in the model."""
        return list(max(filter(_is_list, self.modules()), key=_num_parameters))

    def compile_layers(self) -> None:
        """Fuse each block's small operations; one compilation serves all blocks and lengths."""
        for layer in self.layers:
            layer.compile(dynamic=True)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model is the one the adapters were put on; a no-op without adapters."""
        layers = [module for module in self.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
