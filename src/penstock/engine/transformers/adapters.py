"""Adapters of several models in one pass: each row of a batch takes those of its request, or none.

A product of the base is followed by high(low(x)) with the two matrices of the row's adapter. Layers that are one
product (q, k and v) have one pair, whose second matrix has a block for each of them. Here: what the devices share,
and the loop over the adapters of a pass on a CPU. On a GPU the rows are grouped (`cuda/grouped_adapters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.transformers.cpu.cpu_steps import round_up
from penstock.errors import EngineError
from penstock.model.decoder_weights import Linear, Products

NONE = -1  # the number of a row without an adapter
MOST_ADAPTERS = 16  # that an engine holds
_RANKS = 32  # ranks are padded to multiples: a vector remainder would change a row's bits

Pair = tuple[Tensor, Tensor]  # [rank, inputs] and [outputs, rank]


class AdaptedLinear:
    """A product of the base, and what the adapters of its rows add. `late`: it gets only the rows that a pass keeps."""

    def __init__(
        self, base: Linear, adapters: RowAdapters, layers: dict[str, int], inputs: int, late: bool
    ) -> None:
        self.base, self.late = base, late
        self.layers, self.inputs = layers, inputs  # by name: outputs
        self._adapters, self.number = adapters, len(adapters.places)

    @property
    def outputs(self) -> int:
        return sum(self.layers.values())

    def __call__(self, x_RD: Tensor) -> Tensor:
        return self._adapters.add(self, x_RD, self.base(x_RD))

    def pair(self, weights: Mapping[str, Tensor]) -> Pair | None:
        """The matrices of an adapter for these layers as one pair; None: it has none here."""
        known = {name: count for name, count in self.layers.items() if f"{name}.low" in weights}
        if not known:
            return None
        low = torch.cat([weights[f"{name}.low"] for name in known])
        high = low.new_zeros(self.outputs, round_up(len(low), _RANKS))
        row = column = 0
        for name, count in self.layers.items():
            if name in known:
                block = weights[f"{name}.high"]
                high[row : row + count, column : column + block.shape[1]] = block
                column += block.shape[1]
            row += count
        return functional.pad(low, (0, 0, 0, high.shape[1] - len(low))), high


class RowAdapters:
    """The adapters that an engine holds, and which rows of a pass take which. See `Products` too."""

    def __init__(self, model: Any, products: Products) -> None:
        self._products = products
        self._names = {id(module): name for name, module in model.named_modules()}
        self._head = model.get_output_embeddings()
        last = model.get_decoder().layers[-1]
        late = [last.self_attn.o_proj, *last.mlp.modules()]
        self._late = {id(module) for module in late}
        self.places: list[AdaptedLinear] = []
        self._number_of: dict[str, int] = {}
        self._dtype = model.get_input_embeddings().weight.dtype

    def joint(self, modules: list[Any]) -> Linear:
        base = self._products.joint(modules)
        if not all(isinstance(module, torch.nn.Linear) and module is not self._head for module in modules):  # fmt: skip
            return base
        layers = {self._names[id(module)]: module.out_features for module in modules}
        late = id(modules[0]) in self._late
        self.places.append(AdaptedLinear(base, self, layers, modules[0].in_features, late))
        return self.places[-1]

    def stacked(self, weight_EOI: Tensor, bias_EO: Tensor | None) -> Sequence[Linear]:
        return self._products.stacked(weight_EOI, bias_EO)

    # ---- what is held

    @property
    def most(self) -> int:
        """How many are held at once."""
        return MOST_ADAPTERS

    def number(self, name: str) -> int:
        """The number of an adapter that is held; the empty name's is that of none."""
        return self._number_of[name] if name else NONE

    def holds(self, name: str) -> bool:
        return not name or name in self._number_of

    def hold(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Keep an adapter: by the name of each of its layers, `.low` [rank, inputs] and `.high` [outputs, rank]."""
        layers = {layer for place in self.places for layer in place.layers}
        if other := {key.rpartition(".")[0] for key in weights} - layers:
            raise EngineError(f"adapter {name}: got layers {sorted(other)[:3]}, allowed: the decoder's products")  # fmt: skip
        free = set(range(MOST_ADAPTERS)) - set(self._number_of.values())
        if not free:
            raise EngineError(f"adapter {name}: got one more, allowed: {MOST_ADAPTERS} at once")
        weights = {key: tensor.to(self._dtype) for key, tensor in weights.items()}
        self._put(min(free), [place.pair(weights) for place in self.places])
        self._number_of[name] = min(free)

    def drop(self, name: str) -> None:
        """Forget an adapter that no request uses."""
        del self._number_of[name]

    def _put(self, number: int, pairs: list[Pair | None]) -> None:
        raise NotImplementedError

    def add(self, place: AdaptedLinear, x_RD: Tensor, output_RN: Tensor) -> Tensor:
        """The output of the base's product with what the rows' adapters add to it."""
        raise NotImplementedError


class LoopedAdapters(RowAdapters):
    """One adapter of a pass after another, each with its rows.

    Rows are padded to the multiple at which their bits do not depend on how many they are: `quantum_of` finds it.
    """

    def __init__(
        self,
        model: Any,
        products: Products,
        quantum_of: Callable[[set[tuple[int, int]]], int],
    ) -> None:
        super().__init__(model, products)
        self._quantum_of = quantum_of
        self._pairs: dict[int, list[Pair | None]] = {}
        self._quantum: dict[int, int] = {}
        self._rows: list[list[tuple[int, Tensor, Tensor]]] = [[], []]

    def _put(self, number: int, pairs: list[Pair | None]) -> None:
        self._pairs[number] = pairs
        sizes = {tuple(reversed(matrix.shape)) for pair in pairs if pair for matrix in pair}
        self._quantum[number] = self._quantum_of(sizes)

    def assign(self, number_R: np.ndarray, kept_K: np.ndarray | None) -> None:
        """The adapter of each row of the next pass, and which rows its last layer keeps; None: all."""
        self._rows = [
            self._by_adapter(number_R),
            self._by_adapter(number_R if kept_K is None else number_R[kept_K]),
        ]

    def _by_adapter(self, number_R: np.ndarray) -> list[tuple[int, Tensor, Tensor]]:
        """Each adapter, its rows, and the same padded."""
        found = []
        for number in np.unique(number_R[number_R != NONE]).tolist():
            rows = np.flatnonzero(number_R == number)
            padded = np.zeros(round_up(len(rows), self._quantum[number]), np.int64)
            padded[: len(rows)] = rows
            found.append((number, torch.from_numpy(rows), torch.from_numpy(padded)))
        return found

    def add(self, place: AdaptedLinear, x_RD: Tensor, output_RN: Tensor) -> Tensor:
        for number, rows_M, padded_P in self._rows[place.late]:
            if (pair := self._pairs[number][place.number]) is not None:
                low, high = pair
                x_PD = x_RD.index_select(0, padded_P)
                added_PN = functional.linear(functional.linear(x_PD, low), high)
                output_RN.index_add_(0, rows_M, added_PN[: len(rows_M)])
        return output_RN
