"""Which share of an update reaches the weights that are published.

Masters change by small steps, published weights by whole steps of their number format. Compares both
on a fixed sample of each tensor: at most 256 x 256 evenly spaced elements, whose numbers in the whole
tensor do not depend on the number of ranks. Costs no second copy of the masters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from penstock.training.dither import HALF_FORMATS, Place
from penstock.training.optimizer import Masters
from penstock.training.policy import ADAPTER, Policy
from penstock.training.ranks import Ranks, own_rows, whole_tensor

Sample = list[tuple[Tensor, Tensor]]  # of each tensor: the exact numbers, the published ones
_SIDE = 256


class Arrival:
    """Measures what becomes of an update: `sample` before it, `share` after it."""

    def __init__(self, policy: Policy, masters: Masters, ranks: Ranks) -> None:
        self._policy, self._masters, self._ranks = policy, masters, ranks

    def sample(self) -> Sample:
        """Copy the sample's numbers of every tensor that is published rounded."""
        with torch.no_grad():
            return [*self._full(), *self._adapted()]

    def share(self, before: Sample) -> float:
        """Return <published change, exact change> / |exact change|^2 since `before`, over all ranks.

        1 if nothing is rounded or nothing changed.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self._policy.device)
        for (exact, published), (old_exact, old_published) in zip(
            self.sample(), before, strict=True
        ):
            change = exact.double() - old_exact.double()
            arrived = published.double() - old_published.double()
            sums += torch.stack([(arrived * change).sum(), change.square().sum()])
        arrived_dot, changed_dot = self._ranks.sum(sums.cpu().numpy())
        return float(arrived_dot / changed_dot) if changed_dot else 1.0

    def _full(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of the masters and of the weights that are rounded from them."""
        for name, master in self._masters.parameters.items():
            rounded, dtype = self._masters.rounded.get(name), self._masters.formats[name]
            if (
                ".lora_" in name
                or not master.ndim
                or (rounded is None and dtype not in HALF_FORMATS)
            ):
                continue
            first, rows = own_rows(master.detach(), self._ranks)
            exact = _evenly_spaced(first, rows, len(master)).clone()
            if rounded is not None:
                yield exact, _evenly_spaced(first, rounded.detach(), len(master)).clone()
            else:
                yield exact, exact.to(dtype)

    def _adapted(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield base + adapters: exact from the masters, and as the engines receive it."""
        for name, layer in self._policy.adapted_layers().items():
            dtype = self._masters.formats[name]
            if dtype not in HALF_FORMATS or not isinstance(layer.base_layer, nn.Linear):
                continue
            first, rows = own_rows(layer.base_layer.weight.detach(), self._ranks)
            row_step, column_step = (_step(size) for size in layer.base_layer.weight.shape)
            place = Place(first + -first % row_step, row_step, column_step)
            some = _evenly_spaced(first, rows, len(layer.base_layer.weight))
            base = self._policy.merge_base(some, name, dtype, place)
            stem = name.removesuffix("base_layer.weight")
            low, high = (f"{stem}lora_{side}.{ADAPTER}.weight" for side in "AB")
            sides = [(self._masters.parameters[low], self._masters.parameters[high])]
            sides.append((layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight))
            exact, published = (
                base + layer.scaling[ADAPTER] * self._product(*side) for side in sides
            )
            yield exact, published.to(dtype)

    def _product(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the sample's elements of high x low."""
        first, rows = own_rows(high.detach(), self._ranks)
        step = _step(len(high))
        low_KC = whole_tensor(low.detach())[:, :: _step(low.shape[1])]
        return rows[-first % step :: step].double() @ low_KC.double()


def _evenly_spaced(first_row: int, rows: Tensor, num_rows: int) -> Tensor:
    """Return every n-th row and column of a tensor of `num_rows` rows, of which a rank holds some."""
    table_RC = rows.reshape(len(rows), -1) if rows.numel() else rows.reshape(0, 1)
    step = _step(num_rows)
    return table_RC[-first_row % step :: step, :: _step(table_RC.shape[1])]


def _step(size: int) -> int:
    return -(-size // _SIDE)
