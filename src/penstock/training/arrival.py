"""Which share of an update reaches the weights that are published.

Masters change by small steps, published weights by whole steps of their number format. Compares both
on a fixed sample of each tensor: at most 256 x 256 evenly spaced elements, whose numbers in the whole
tensor do not depend on the number of ranks. Costs no second copy of the masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.transfer import HostCopy
from penstock.training.dither import HALF_FORMATS, Place
from penstock.training.optimizer import Masters
from penstock.training.parallel.sharding import Part
from penstock.training.policy import ADAPTER, Policy, adapter_names

Sample = tuple[Tensor, Tensor]  # the exact numbers of all tensors, and the published ones
_SIDE = 256


class Arrival:
    """Measures what becomes of an update: `sample` before it, `share` after it."""

    def __init__(self, policy: Policy, masters: Masters) -> None:
        self._policy, self._masters = policy, masters
        self._sharding = policy.sharding
        self._rounded = [name for name in masters.rounded if self._is_sampled(name)]
        self._sampler = self._make_sampler()

    def _make_sampler(self) -> Any | None:
        """Return what copies all samples at once; None: one by one, as on a CPU."""
        formats = {self._masters.rounded[name].dtype for name in self._rounded}
        if (
            self._policy.device.type != "cuda"
            or self._sharding.ranks.world > 1
            or len(formats) != 1
        ):
            return None
        try:
            from penstock.model.kernels.sample_kernels import EvenSamples
        except ImportError:  # CUDA without Triton
            return None
        parts = [
            self._sharding.part(n, self._masters.parameters[n].detach()) for n in self._rounded
        ]
        sizes = [(len(part.values), part.values.numel() // len(part.values)) for part in parts]
        return EvenSamples(
            [(size, *_spacing(part)) for size, part in zip(sizes, parts, strict=True)]
        )

    def _full_at_once(self, sampler: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of all masters and of all weights that are rounded from them."""
        yield (
            sampler.copy([self._masters.parameters[name] for name in self._rounded]),
            sampler.copy([self._masters.rounded[name] for name in self._rounded]),
        )

    def _is_sampled(self, name: str) -> bool:
        whole = self._masters.parameters[name]
        return ".lora_" not in name and whole.ndim > 0 and whole.numel() > 0

    def sample(self) -> Sample:
        """Copy the sample's numbers of every tensor that is published rounded."""
        nothing = torch.zeros(0, device=self._policy.device)
        with torch.no_grad():
            full = self._full() if self._sampler is None else self._full_at_once(self._sampler)
            pairs = [*full, *self._adapted(), (nothing, nothing)]
            # One copy for all tensors: hundreds of small operations would take longer than the update.
            exact, published = (
                torch.cat([part.reshape(-1) for part in side]) for side in zip(*pairs, strict=True)
            )
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
        """Yield the numbers of the masters and of the weights that are rounded from them."""
        for name, master in self._masters.parameters.items():
            rounded, dtype = self._masters.rounded.get(name), self._masters.formats[name]
            if (
                ".lora_" in name
                or not master.ndim
                or (rounded is None and dtype not in HALF_FORMATS)
                or not self._sharding.is_counted(name)
            ):
                continue
            part = self._sharding.part(name, master.detach())
            exact = _evenly_spaced(part, part.values)
            if rounded is not None:
                yield exact, _evenly_spaced(part, rounded.detach())
            else:
                yield exact, exact.to(dtype)

    def _adapted(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield base + adapters: exact from the masters, and as the engines receive it."""
        for name, layer in self._policy.adapted_layers().items():
            dtype = self._masters.formats[name]
            if dtype not in HALF_FORMATS or not isinstance(layer.base_layer, nn.Linear):
                continue
            part = self._sharding.part(name, layer.base_layer.weight.detach())
            rows, columns = _spacing(part)
            place = Place(
                part.first_row + rows.start,
                rows.step,
                columns.step,
                part.first_column + columns.start,
            )
            base = self._policy.merge_base(part.values[rows, columns], name, dtype, place)
            masters = [self._masters.parameters[side] for side in adapter_names(name)]
            own = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
            exact, published = (
                base + layer.scaling[ADAPTER] * self._product(name, part, *sides)
                for sides in (masters, own)
            )
            if self._sharding.is_counted(name):
                yield exact, published.to(dtype)

    def _product(self, name: str, part: Part, low: Tensor, high: Tensor) -> Tensor:
        """Return the sample's elements of high x low, as far as this rank holds the layer's weight."""
        rows, columns = _spacing(part)
        low_name, high_name = adapter_names(name)
        high_RK = self._sharding.whole(high_name, high.detach())[part.first_row :][rows]
        low_KC = self._sharding.whole(low_name, low.detach())[:, part.first_column :][:, columns]
        return high_RK.double() @ low_KC.double()


def _evenly_spaced(part: Part, values: Tensor) -> Tensor:
    """Return every n-th row and column of the whole tensor that is in this rank's part."""
    rows, columns = _spacing(part)
    if not values.numel():
        return values.reshape(0, 1)
    return values.reshape(len(values), -1)[rows, columns]


def _spacing(part: Part) -> tuple[slice, slice]:
    """Return which of the part's rows and columns are in the sample."""
    count = len(part.values)
    width = math.prod(part.shape[1:])
    here = part.values.numel() // count if count else 0
    return (
        slice(-part.first_row % (step := _step(part.shape[0])), count, step),
        slice(-part.first_column % (step := _step(width)), here, step),
    )


def _step(size: int) -> int:
    return -(-size // _SIDE)
