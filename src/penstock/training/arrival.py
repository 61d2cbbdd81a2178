"""Which share of an update reaches the weights that are published.

Masters change by small steps, published weights by whole steps of their number format. Compares both
on a fixed sample: the first 65,536 numbers of each tensor that this rank holds a part of.
Costs no second copy of the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from penstock.model.transfer import HostCopy
from penstock.training.adapters import ADAPTER, adapter_names
from penstock.training.dither import HALF_FORMATS, Place
from penstock.training.optimizer import Masters
from penstock.training.parallel.sharding import local
from penstock.training.policy import Policy

Sample = tuple[Tensor, Tensor]  # the exact numbers of all tensors, and the published ones
_MOST_NUMBERS = 1 << 16  # of each tensor


class Arrival:
    """Measures what becomes of an update: `sample` before it, `share` after it."""

    def __init__(self, policy: Policy, masters: Masters) -> None:
        self._policy, self._masters = policy, masters
        self._sharding = policy.sharding

    def sample(self) -> Sample:
        """Copy the sample's numbers of every tensor that is published rounded."""
        nothing = torch.zeros(0, device=self._policy.device)
        with torch.no_grad():
            pairs = [*self._full(), *self._adapted(), (nothing, nothing)]
            # one copy for all tensors: hundreds of small ones would take longer than the update
            exact, published = (torch.cat(side) for side in zip(*pairs, strict=True))
        return exact, published

    def share(self, before: Sample) -> Callable[[], float]:
        """Compare with the sample `before` the update; return what gives the share that arrived.

        The share is <published change, exact change> / |exact change|^2 over all ranks, 1 if nothing is
        rounded or nothing changed. It is asked for last, because a GPU may have much to do before.
        """
        changed, arrived = (
            now.double() - old.double() for now, old in zip(self.sample(), before, strict=True)
        )
        sums = HostCopy(torch.stack([torch.dot(arrived, changed), torch.dot(changed, changed)]))

        def read() -> float:
            everywhere = self._sharding.ranks.sum_everywhere(sums.wait().numpy())
            return float(everywhere[0] / everywhere[1]) if everywhere[1] else 1.0

        return read

    def _full(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers of the masters and of the weights that are rounded from them, as views."""
        for name, master in self._masters.parameters.items():
            dtype = self._masters.formats[name]
            is_half = dtype in HALF_FORMATS
            if ".lora_" in name or not is_half or not self._sharding.is_counted(name):
                continue
            exact, rounded = _first_numbers(local(master)), self._masters.rounded.get(name)
            yield exact, exact.to(dtype) if rounded is None else _first_numbers(local(rounded))

    def _adapted(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of base + adapters: exact from the masters, and as the engines receive it."""
        for name, layer in self._policy.adapted_layers().items():
            dtype = self._masters.formats[name]
            if dtype not in HALF_FORMATS or not isinstance(layer.base_layer, nn.Linear):
                continue
            part = self._sharding.part(name, layer.base_layer.weight.detach())
            height, width = part.values.shape
            rows = slice(part.first_row, part.first_row + height, _step(part.values))
            columns = slice(part.first_column, part.first_column + width)
            place = Place(part.first_row, rows.step, part.first_column)
            base = self._policy.merge_base(part.values[:: rows.step], name, dtype, place)
            low_name, high_name = adapter_names(name)
            masters = [self._masters.parameters[side] for side in (low_name, high_name)]
            rounded = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
            exact, published = (
                base
                + layer.scaling[ADAPTER]
                * (
                    self._sharding.whole(high_name, high.detach())[rows].double()
                    @ self._sharding.whole(low_name, low.detach())[:, columns].double()
                )
                for low, high in (masters, rounded)
            )
            if self._sharding.is_counted(name):  # else only the gathering needed this rank
                yield exact.reshape(-1), published.to(dtype).reshape(-1)


def _first_numbers(part: Tensor) -> Tensor:
    """A view in one piece: hundreds of them are copied together, spaced numbers one by one."""
    return part.detach().reshape(-1)[:_MOST_NUMBERS]


def _step(part: Tensor) -> int:
    return max(1, -(-part.numel() // _MOST_NUMBERS))
