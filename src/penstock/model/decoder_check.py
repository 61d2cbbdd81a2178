"""The check of a family at a start: the decoder's log-probs must be those of the unchanged, eager model.

A short sequence runs through the whole model; if the run's sequences can be longer than a window, or than
the length at which the rotation changes, one that is longer runs through the first layers, as many as hold
every kind of layer. A difference beyond rounding refuses the model. Rounding may decide between experts whose
scores are nearly tied: the decoder takes those of the unchanged model, if its own scored as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UserError
from penstock.model.attention import OneSequence, Step
from penstock.model.decoder import hidden_states, logits
from penstock.model.decoder_weights import Weights
from penstock.model.families import Family
from penstock.model.ops import Ops, TorchOps

SHORT = 11  # tokens
TOLERANCE = 1e-3  # largest difference of a log-prob in float32
HALF_TOLERANCE = 0.2  # mean difference in half precision, where rounding alone gives up to 0.1


def check_decoder(
    model: Any,
    family: Family,
    weights: Weights,
    longest: int,
    ops: Ops | None = None,
    steps: Callable[[int], Iterable[Step]] = lambda length: [OneSequence()],
) -> None:
    """Refuse a model whose log-probs the decoder does not give; `longest` is the run's longest sequence.

    `steps` are those that must give them for a sequence of a length.
    """
    lengths = [(long_length(family, longest), kinds_end(family))]
    if not rotation_length(family, longest):
        lengths.append((min(SHORT, longest), len(family.layers)))
    for length, layers in lengths:
        if not length:
            continue
        ids_T = check_ids(len(weights.embedding), length).to(weights.embedding.device)
        cut = replace(weights, layers=weights.layers[:layers])
        with torch.no_grad():
            with (
                eager_attention(model),
                first_layers(model, layers),
                recorded_routes(model, family) as routes,
            ):
                plain_T = token_logprobs(
                    model(input_ids=ids_T[None], use_cache=False).logits[0], ids_T
                )
            positions_T = torch.arange(length, device=ids_T.device)
            gaps = []
            for step in steps(length):
                lost: list[Tensor] = []
                step.chooser = functools.partial(_own_experts, routes, lost)
                hidden_TD = hidden_states(ops or TorchOps(), family, cut, step, ids_T, positions_T)
                actual_T = token_logprobs(logits(family, cut, hidden_TD), ids_T)
                gaps.append(difference(actual_T, plain_T, hidden_TD.dtype))
                if lost:
                    lost_N = torch.cat(lost).double().cpu()
                    gaps.append(difference(lost_N, torch.zeros_like(lost_N), hidden_TD.dtype))
        gap, exact = max(gaps, key=lambda result: (not result[1], result[0]))
        if not exact:
            what = "whose log-probs" + (" or the scores of its experts" if family.experts else "")
            raise UserError(
                f"model.path: got {type(model).__name__}, {what} differ by {gap:.2g} from those of "
                f"the decoder for {model.config.get_text_config().model_type} in a sequence of {length} tokens, "
                "allowed: a model of this type with unchanged layers, or engine vllm"
            )


@contextmanager
def recorded_routes(
    model: Any, family: Family | None
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """By layer, the scores [rows, experts] and the chosen experts of the model's own routers inside the context."""
    routes: dict[int, tuple[Tensor, Tensor]] = {}

    def record(layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        routes[layer] = output[0], output[2]

    hooks: list[Any] = []
    if family is not None and family.experts is not None:
        for index, layer in enumerate(model.get_decoder().layers):
            if family.layers[index].experts:
                router = getattr(layer.mlp, family.experts.router)
                hooks.append(router.register_forward_hook(functools.partial(record, index)))
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


def _own_experts(
    routes: dict[int, tuple[Tensor, Tensor]],
    lost: list[Tensor],
    layer: int,
    kept_K: Tensor | None,
    expert_RC: Tensor,
) -> Tensor:
    """The experts of the unchanged model; `lost` gets how much less the decoder's scored there."""
    score_RE, own_RC = routes[layer]
    least_R, chosen_R = (score_RE.gather(1, of.long()).amin(1) for of in (own_RC, expert_RC))
    lost.append(least_R.float() - chosen_R.float())
    return own_RC


def kinds_end(family: Family) -> int:
    """How many of the first layers hold every kind of layer."""
    return 1 + max(family.layers.index(layer) for layer in family.layers)


def rotation_length(family: Family, longest: int) -> int:
    """The length beyond which the unchanged model turns as a run of `longest` does; 0: it always does."""
    changes = [rope.changes_at for rope in family.ropes.values()]
    return max((length for length in changes if length is not None and length < longest), default=0)


def long_length(family: Family, longest: int) -> int:
    """The length of a sequence that outgrows all that a run of `longest` can outgrow; 0: nothing."""
    windows = [layer.window for layer in family.layers]
    reached = [length for length in windows if length is not None and SHORT <= length < longest]
    outgrown = max([*reached, rotation_length(family, longest)], default=0)
    return min(outgrown + SHORT, longest) if outgrown else 0


def check_ids(vocabulary: int, length: int) -> Tensor:
    """Token ids from the middle of the vocabulary, away from special tokens."""
    first, last = vocabulary // 4, max(3 * vocabulary // 4, vocabulary // 4 + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(first, last, (length,), generator=generator)


def token_logprobs(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """The log-probs of all tokens but the first."""
    scores_TV = logits_TV[:-1].to(torch.float64).log_softmax(-1)
    return scores_TV.gather(1, ids_T[1:, None])[:, 0].cpu()


def difference(actual_N: Tensor, plain_N: Tensor, dtype: torch.dtype) -> tuple[float, bool]:
    """(difference of the log-probs, whether it is within the rounding of the format)."""
    difference_N = (actual_N - plain_N).abs()
    if dtype in (torch.bfloat16, torch.float16):
        gap = float(difference_N.mean())
        return gap, gap <= HALF_TOLERANCE
    gap = float(difference_N.max())
    return gap, gap <= TOLERANCE


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Let a model attend as it is written, with the soft caps and sinks that fused attention drops."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Cut a model to its first layers."""
    body = model.get_decoder()
    layers = body.layers
    body.layers = layers[:count]
    try:
        yield
    finally:
        body.layers = layers
