"""Tensor parallel: every tensor rank computes with its slice of the matrices of each layer.

Follows the plan that transformers has for the architecture. A `colwise` layer has a slice of the outputs,
a `rowwise` layer a slice of the inputs and a partial sum of the outputs; between the two no rank needs
another. The embedding and the head are cut by the vocabulary (`logprobs.py` scores tokens with a
slice of it). Layers keep their names; hooks around them, and `RowSlice`, talk to the other ranks.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import UserError
from penstock.model.parallel_plan import COLUMNS, GATHERED, SPLIT_ROWS, SUMMED
from penstock.training.parallel.collectives import gather_split, split_equal, sum_partial, use_equal
from penstock.training.parallel.ranks import Axis
from penstock.training.parallel.sharding import Cut, Sharding


def cut_model(model: Any, body: nn.Module, plan: dict[str, str], sharding: Sharding) -> Cut:
    """Cut the parameters that the plan names, the embedding and the head; note the cuts by name.

    Return the cut of the head: this rank's slice of the vocabulary.
    """
    axis, cuts = sharding.ranks.tensor, _Cuts(sharding.ranks.tensor)
    summed: set[int] = set()
    for name, module in list(body.named_modules()):
        style = next((plan[pattern] for pattern in plan if _fits(pattern, name)), None)
        parent, _, last = name.rpartition(".")
        if style == SUMMED:
            summed |= {id(parameter) for parameter in module.parameters()}
        elif style is not None and hasattr(module, "lora_A"):
            _cut_adapted(module, style, cuts)
        elif style is not None:
            _cut_linear(body.get_submodule(parent), last, style, cuts)
    _cut_vocabulary(model, axis, cuts)
    for name, parameter in model.named_parameters():
        if id(parameter) in cuts.by_id:
            sharding.cuts[name] = cuts.by_id[id(parameter)]
        elif id(parameter) in summed:
            sharding.summed.add(name)
    return cuts.by_id[id(model.get_output_embeddings().weight)]


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


class _Cuts:
    """Cuts parameters and remembers them by identity, because tied parameters have several names."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.by_id: dict[int, Cut] = {}

    def cut(self, module: nn.Module, name: str, dim: int) -> nn.Parameter | None:
        """Replace a parameter of `module` by this rank's slice; return the slice."""
        whole = getattr(module, name, None)
        if whole is None:
            return None
        total = whole.shape[dim]
        each = -(-total // self.axis.size)
        first = min(self.axis.index * each, total)
        part = whole.detach().narrow(dim, first, min(each, total - first))
        slice_ = nn.Parameter(
            part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad
        )
        setattr(module, name, slice_)
        self.by_id[id(slice_)] = Cut(dim, first, total)
        return slice_


def _cut_linear(parent: nn.Module, name: str, style: str, cuts: _Cuts) -> None:
    module, axis = parent.get_submodule(name), cuts.axis
    if not isinstance(module, nn.Linear):
        raise UserError(
            f"train.parallel.tensor: got a {type(module).__name__} in the plan, allowed: linear layers"
        )
    if style in (COLUMNS, GATHERED):
        cuts.cut(module, "weight", 0)
        cuts.cut(module, "bias", 0)
        module.register_forward_pre_hook(lambda _, inputs: (use_equal(inputs[0], axis),))
        if style == GATHERED:
            module.register_forward_hook(lambda _, __, output: gather_split(output, axis))
        return
    cuts.cut(module, "weight", 1)
    parent.add_module(name, RowSlice(module, axis, splits=style == SPLIT_ROWS))


class RowSlice(nn.Module):
    """A linear layer whose inputs are split over the ranks; the bias is added once."""

    def __init__(self, linear: nn.Linear, axis: Axis, *, splits: bool) -> None:
        """splits: inputs are whole, and this rank takes its part."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._axis, self._splits = axis, splits

    def forward(self, inputs: Tensor) -> Tensor:
        part = split_equal(inputs, self._axis) if self._splits else inputs
        output = sum_partial(functional.linear(part, self.weight), self._axis)
        return output if self.bias is None else output + self.bias


def _cut_adapted(module: Any, style: str, cuts: _Cuts) -> None:
    """Cut a layer with low-rank adapters: the side of the adapter that meets the cut is cut with it."""
    _cut_linear(module, "base_layer", style, cuts)
    if style in (GATHERED, SPLIT_ROWS):
        return  # inputs and outputs are whole, and so are the adapters
    adapters = module.lora_B if style == COLUMNS else module.lora_A
    for name in list(adapters):
        _cut_linear(adapters, name, style, cuts)


def _cut_vocabulary(model: Any, axis: Axis, cuts: _Cuts) -> None:
    """Cut the embedding and the head by rows; a tied weight stays one parameter."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    rows = cuts.cut(embedding, "weight", 0)
    assert rows is not None
    cut = cuts.by_id[id(rows)]
    if embedding.padding_idx is not None:  # its row gets no gradient from a lookup
        is_here = cut.first <= embedding.padding_idx < cut.first + len(rows)
        embedding.padding_idx = embedding.padding_idx - cut.first if is_here else None
    if tied:
        head.weight = rows
    else:
        cuts.cut(head, "weight", 0)
    cuts.cut(head, "bias", 0)
    lookup = _Lookup(cut.first, len(rows), axis)
    embedding.register_forward_pre_hook(lookup.before)
    embedding.register_forward_hook(lookup.after)


def look_up(ids: Tensor, weight_VD: Tensor, padding: int | None, first: int, axis: Axis) -> Tensor:
    """The rows of an embedding of which this rank has those from `first` on."""
    lookup = _Lookup(first, len(weight_VD), axis)
    (own_ids,) = lookup.before(None, (ids,))
    return lookup.after(None, (ids,), functional.embedding(own_ids, weight_VD, padding))


class _Lookup:
    """Looks up the ids whose rows this rank has; the other ranks look up the other ids."""

    def __init__(self, first: int, count: int, axis: Axis) -> None:
        self._first, self._count, self._axis = first, count, axis
        self._other = torch.zeros(0, dtype=torch.bool)  # which ids of this call are others'

    def before(self, _: nn.Module | None, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        ids = inputs[0] - self._first
        self._other = (ids < 0) | (ids >= self._count)
        return (ids.masked_fill(self._other, 0),)

    def after(self, _: nn.Module | None, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return sum_partial(output.masked_fill(self._other[..., None], 0), self._axis)
