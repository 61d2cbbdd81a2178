"""Adapters on a GPU: the rows of a pass grouped by adapter, as those of experts are, in two launches a product.

All adapters lie in stacks, so that CUDA graphs capture their products whoever is held. The host learns nothing of
which rows take which.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from penstock.engine.transformers.adapters import (
    MOST_ADAPTERS,
    AdaptedLinear,
    Pair,
    RowAdapters,
)
from penstock.model.decoder_weights import Products
from penstock.model.kernels.expert_kernels import (
    Routes,
    add_group_products,
    group_products,
    sort_entries,
)

_RANK = 32  # of each layer of a product that the stacks have room for at first


class GroupedAdapters(RowAdapters):
    """See `RowAdapters`. A row's number is on the device; that of none is any that no adapter has."""

    def __init__(self, model: Any, products: Products) -> None:
        super().__init__(model, products)
        self._stacks: list[Pair] = []
        self._routes: tuple[Routes, Routes] | None = None  # None: the model is checked

    def allocate(self, like: Tensor) -> None:
        """Make the stacks in the format and on the device of this tensor; the places are known."""
        self._stacks = [
            (
                like.new_zeros(MOST_ADAPTERS, _RANK * len(place.layers), place.inputs),
                like.new_zeros(MOST_ADAPTERS, place.outputs, _RANK * len(place.layers)),
            )
            for place in self.places
        ]

    def widen(self, weights: dict[str, Tensor]) -> bool:
        """Make room for an adapter's ranks; whether stacks were replaced by wider ones."""
        widened = False
        for number, place in enumerate(self.places):
            pair, (low, high) = place.pair(weights), self._stacks[number]
            more = 0 if pair is None else len(pair[0]) - low.shape[1]
            if more > 0:
                self._stacks[number] = pad(low, (0, 0, 0, more)), pad(high, (0, more))
                widened = True
        return widened

    def _put(self, number: int, pairs: list[Pair | None]) -> None:
        for pair, stacks in zip(pairs, self._stacks, strict=True):
            for stack in stacks:
                stack[number] = 0
            if pair is not None:
                rank = len(pair[0])
                stacks[0][number, :rank], stacks[1][number, :, :rank] = pair

    def assign(self, number_R: Tensor, kept_K: Tensor | None) -> None:
        """The adapter of each row of the next pass, and which rows its last layer keeps; None: all."""
        every = _grouped(number_R)
        self._routes = every, every if kept_K is None else _grouped(number_R[kept_K])

    def add(self, place: AdaptedLinear, x_RD: Tensor, output_RN: Tensor) -> Tensor:
        if self._routes is None:
            return output_RN
        routes, (low, high) = self._routes[place.late], self._stacks[place.number]
        return add_group_products(output_RN, group_products(x_RD, routes, low), routes, high)


def _grouped(number_R: Tensor) -> Routes:
    """Rows as entries of one choice, whose weights are not used."""
    return sort_entries(number_R[:, None], number_R[:, None], MOST_ADAPTERS)
