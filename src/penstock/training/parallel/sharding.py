"""How the parameters of one model lie over the trainer ranks.

A parameter is first cut over the tensor ranks (`tensor_parallel.py` says where), and what is left of it is
split by rows over the data ranks by FSDP2. This file knows both: which part of a parameter this rank
holds, how the whole one is gathered (one parameter at a time, for publication, digest and checkpoint),
how gradients are completed, and the norm of the whole gradient. With one rank every part is the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.model.stored_weights import StoredWeights
from penstock.training.parallel.collectives import all_gather
from penstock.training.parallel.pipeline import Stages
from penstock.training.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a parameter is cut over the tensor ranks: this rank's slice begins at `first` of `total`."""

    dim: int
    first: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows and columns of a parameter (or of a moment of it) that this rank holds."""

    first_row: int
    first_column: int
    values: Tensor
    shape: tuple[int, ...]  # of the whole tensor


class Sharding:
    """Finds, gathers and reduces the parts of a model's parameters; names are the model's own."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.stages = Stages()
        self.cuts: dict[str, Cut] = {}
        # uncut parameters, of whose gradient each tensor rank has a part
        self.summed: set[str] = set()

    def part(self, name: str, tensor: Tensor) -> Part:
        """The part of a tensor of parameter `name` that this rank holds."""
        shape, first_row, first_column = list(tensor.shape), 0, 0
        if is_split(tensor):
            rows_each = -(-len(tensor) // self.ranks.shard_mesh.size())
            first_row = min(self.ranks.shard_mesh.get_local_rank() * rows_each, len(tensor))
        if (cut := self.cuts.get(name)) is not None and shape:
            shape[cut.dim] = cut.total
            first_row += cut.first if cut.dim == 0 else 0
            first_column = cut.first if cut.dim == 1 else 0
        return Part(
            first_row=first_row,
            first_column=first_column,
            values=local(tensor),
            shape=tuple(shape),
        )

    def read_part(
        self, name: str, empty: nn.Parameter, stored: StoredWeights, device: torch.device
    ) -> nn.Parameter:
        """A parameter without values with this rank's part from the model's files."""
        part = self.part(name, empty)
        rows = slice(part.first_row, part.first_row + len(part.values))
        columns, cut = slice(None), self.cuts.get(name)
        if cut is not None and cut.dim == 1:
            columns = slice(part.first_column, part.first_column + part.values.shape[1])
        values: Any = stored.read(name, rows, columns).to(device=device, dtype=empty.dtype)
        if is_split(empty):
            from torch.distributed.tensor import DTensor

            split: Any = empty
            values = DTensor.from_local(
                values,
                split.device_mesh,
                split.placements,
                run_check=False,
                shape=split.shape,
                stride=split.stride(),
            )
        return nn.Parameter(values, requires_grad=empty.requires_grad)

    def is_counted(self, name: str) -> bool:
        """Whether this rank's part is the one that sums over all ranks count."""
        if self.stages.is_copy(name):
            return False
        return name in self.cuts or self.ranks.tensor.is_first

    def holds_alone(self, name: str, tensor: Tensor) -> bool:
        """Whether no other rank writes this rank's part to a checkpoint."""
        if not tensor.ndim:  # a counter, equal on all ranks of a stage
            is_first_of_stage = (
                self.ranks.rank % (self.ranks.world // self.ranks.parallel.pipeline) == 0
            )
            return is_first_of_stage and not self.stages.is_copy(name)
        return (is_split(tensor) or self.ranks.world == 1) and self.is_counted(name)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a tensor of parameter `name`; every rank must take part and gets all of it."""
        gathered = joined(tensor)
        if (cut := self.cuts.get(name)) is None:
            return gathered
        return all_gather(gathered, self.ranks.tensor, cut.dim, cut.total)

    def finish_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of which each tensor rank, or each stage with a copy, has a part."""
        for name in sorted(self.summed & parameters.keys()):
            grad = parameters[name].grad
            if grad is not None:
                dist.all_reduce(local(grad), group=self.ranks.tensor.group)
        tied = parameters.get(self.stages.tied)
        if tied is not None and tied.grad is not None:
            dist.all_reduce(local(tied.grad), group=self.stages.tied_group)

    def gradient_norm(self, parameters: Mapping[str, nn.Parameter]) -> Tensor | None:
        """The norm of the whole gradient, equal on all ranks; None if there is no gradient."""
        gradients = {
            name: parameter.grad
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        if self.ranks.world == 1:
            return nn.utils.get_total_norm(gradients.values()) if gradients else None
        counted = (local(grad) for name, grad in gradients.items() if self.is_counted(name))
        parts = [part for part in counted if part.numel()]
        norms = torch._foreach_norm(parts) if parts else ()
        squares = sum(float(norm.double().square()) for norm in norms)
        if not self.ranks.max_of(len(gradients)):
            return None
        total = self.ranks.sum_everywhere(np.array([squares]))[0]
        device = next(iter(parameters.values())).device
        return torch.tensor(float(np.sqrt(total)), dtype=torch.float64, device=device)


def is_split(tensor: Tensor) -> bool:
    """Whether FSDP2 has split this tensor by rows."""
    if not hasattr(tensor, "device_mesh"):
        return False
    placements: Any = tensor.placements
    assert [placement.is_shard(0) for placement in placements] == [True], "split by rows"
    return True


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor that is split by rows; a plain tensor as it is."""
    shard: Any = tensor.detach()
    rows: Tensor = shard.to_local() if hasattr(shard, "to_local") else tensor
    return rows


def joined(tensor: Tensor) -> Tensor:
    """Gather the rows of all data ranks; return a plain tensor as it is."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole


def split_over_data(
    module: nn.Module, layers: Iterable[nn.Module], ranks: Ranks, dtype: torch.dtype
) -> None:
    """Split the parameters by rows over the data ranks (FSDP2) and compute in `dtype`.

    Loss weights are already divided by sums over all ranks, so gradients are added, not averaged.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    master = next((p.dtype for p in module.parameters() if p.requires_grad), dtype)
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype, reduce_dtype=master
    )
    keeps = ranks.parallel.zero < 3  # weights stay gathered between the passes of an update
    options: dict[str, Any] = {"mesh": ranks.shard_mesh, "mp_policy": precision}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=not keeps, **options)
    fully_shard(module, **options)
    for part in split_modules(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has only sums for float32


def split_modules(module: nn.Module) -> list[Any]:
    """The modules that FSDP2 gathers and splits one after another."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
