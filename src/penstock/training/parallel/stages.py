"""The stages of a pipeline: which layers and weights of a model each stage rank holds.

`take_stage` removes the rest from the model and keeps the names of what stays. `pipeline.py` sends packs
through the stages; publication and checkpoints find a parameter's stage here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import UserError
from penstock.training.parallel.ranks import Axis, Ranks


@dataclass(slots=True)
class Stages:
    """This rank's stage, the stage of every parameter, and the groups in which stages talk."""

    axis: Axis = field(default_factory=Axis)
    width: int = 0  # of the hidden states
    dtype: torch.dtype = torch.float32  # of what stages send
    backward_group: Any = None  # for gradients; activations travel in the axis' own group
    tied_group: Any = None  # of the first and the last stage, which both hold a tied weight
    tied: str = ""  # its name; empty: no weight is tied
    owners: dict[str, tuple[int, torch.Size]] = field(default_factory=dict)  # stage and whole shape

    @property
    def is_last(self) -> bool:
        return self.axis.index == self.axis.size - 1

    @property
    def exact_dtype(self) -> torch.dtype:
        """The format of log-probs."""
        return torch.promote_types(self.dtype, torch.float32)

    def is_copy(self, name: str) -> bool:
        """Return whether another stage holds this parameter and this one has a copy."""
        return bool(self.tied) and name == self.tied and not self.axis.is_first

    def hand_out(
        self, name: str, tensor: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Send a whole parameter from its stage to all others; every rank must take part."""
        owner, shape = self.owners[name]
        sent = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor
        sent = sent.contiguous()
        dist.broadcast(sent, group=self.axis.group, group_src=owner)
        return sent


def take_stage(model: Any, body: Any, ranks: Ranks, shapes: dict[str, torch.Size]) -> Stages:
    """Keep this rank's layers; `shapes` are the whole shapes of the model's parameters by name."""
    axis, head = ranks.pipeline, model.get_output_embeddings()
    tied = head.weight is body.embed_tokens.weight
    each = [len(body.layers) * stage // axis.size for stage in range(axis.size + 1)]
    stage_of = {id(p): 0 for p in body.embed_tokens.parameters()}
    for stage in range(axis.size):
        for layer in body.layers[each[stage] : each[stage + 1]]:
            stage_of |= {id(p): stage for p in layer.parameters()}
    for module in (body.norm, head):
        stage_of = {id(p): axis.size - 1 for p in module.parameters()} | stage_of
    owners = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in stage_of:
            raise UserError(
                f"train.parallel.pipeline: got {axis.size} with {type(model).__name__}, whose {name} "
                "belongs to no stage, allowed: 1"
            )
        owners[name] = (stage_of[id(parameter)], shapes[name])
    tied_names = [name for name, one in model.named_parameters() if tied and one is head.weight]
    stages = Stages(axis=axis, owners=owners, tied="".join(tied_names[:1]), dtype=model.dtype)
    stages.width = model.config.get_text_config().hidden_size
    _make_groups(stages, ranks)
    _keep_layers(body, each[axis.index], each[axis.index + 1])
    if not axis.is_first and not (stages.is_last and tied):
        body.embed_tokens = nn.Identity()
    if not stages.is_last:
        body.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
    return stages


def _keep_layers(body: Any, first: int, last: int) -> None:
    """Remove all layers but some; these keep their numbers, which are part of their names."""
    kept = nn.ModuleList()
    kept._modules.update({str(n): body.layers[n] for n in range(first, last)})
    body.layers = kept


def _make_groups(stages: Stages, ranks: Ranks) -> None:
    """Make the groups of this rank's pipeline; all ranks make the groups of all pipelines."""
    in_stage = ranks.world // stages.axis.size
    for first in range(in_stage):
        members = list(range(first, ranks.world, in_stage))
        backward = dist.new_group(members)
        tied = dist.new_group([members[0], members[-1]]) if stages.tied else None
        if ranks.rank in members:
            stages.backward_group, stages.tied_group = backward, tied
