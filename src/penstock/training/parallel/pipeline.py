"""Pipeline parallel: each stage rank holds some consecutive layers, and packs flow through the stages.

The first stage has the embedding, the last one the final norm and the head (a tied weight lies on both).
Forward and backward passes of different packs overlap: a stage runs ahead by as many packs as there are
stages after it, then alternates (one forward, one backward). Packs have any length: every rank of a
copy knows all packs of an update, so shapes are not sent. Activations and gradients travel in two
process groups, whose orders cannot block each other. At the end all stages get the log-probs.
`take_stage` removes the other stages' layers from a model and keeps the names of what stays; publication and
checkpoints find the stage of a parameter in `Stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import UserError
from penstock.training.pack import Pack
from penstock.training.parallel.ranks import Axis, Ranks

# temperatures and early ends of a pack; where nothing is shared, also what comes from the stage before, and terms
Sampling = Callable[[Pack], tuple[Any, ...]]
Finish = Callable[..., Tensor | None]  # (pack, log-probs, entropies and other terms) -> loss
Backward = Callable[[Tensor], None]
Scorer = Any  # a `Policy`, whose file imports this one


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

    def is_copy(self, name: str) -> bool:
        """Whether another stage holds this parameter and this one has a copy."""
        return bool(self.tied) and name == self.tied and not self.axis.is_first

    def hand_out(
        self, name: str, tensor: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Send a whole parameter from its stage to all others; every rank must take part."""
        owner, shape = self.owners[name]
        buffer = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor
        buffer = buffer.contiguous()
        dist.broadcast(buffer, group=self.axis.group, group_src=owner)
        return buffer


def run_passes(
    policy: Scorer,
    packs: Iterable[Pack],
    sampling: Sampling,
    finish: Finish,
    *,
    backward: Backward | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Score each pack, hand the result to `finish`, and run `backward` on the loss that it returns.

    `check` may raise before a pack is begun; with a pipeline, before the first one only.
    """
    axis = policy.sharding.ranks.pipeline
    with torch.set_grad_enabled(backward is not None):
        if axis.size > 1:
            check()
            _Schedule(policy, axis, list(packs), sampling, finish, backward).run()
            return
        for pack in packs:
            check()
            loss = finish(pack, *policy(pack, *sampling(pack)))
            if backward is not None:
                assert loss is not None
                backward(loss)


@dataclass(slots=True)
class _PendingBackward:
    """A pack that waits for its backward pass."""

    hidden_in: Tensor | None  # what the stage before sent
    output: Tensor  # what goes to the next stage; on the last one the loss


@dataclass(slots=True)
class _Schedule:
    """One stage's passes over the packs of an update."""

    policy: Scorer
    axis: Axis
    packs: Sequence[Pack]
    sampling: Sampling
    finish: Finish
    backward: Backward | None
    pending: dict[int, _PendingBackward] = field(default_factory=dict)
    scores: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sending: list[tuple[Any, Tensor]] = field(default_factory=list)  # alive until they are sent

    def run(self) -> None:
        if not self.packs:
            return
        count = len(self.packs)
        ahead = min(self.axis.size - 1 - self.axis.index, count)
        if self.backward is None:
            ahead = count
        for number in range(count):
            self._forward(number)
            if number >= ahead:
                self._backward(number - ahead)
        if self.backward is not None:
            for number in range(count - ahead, count):
                self._backward(number)
        for work, _ in self.sending:
            work.wait()
        self._hand_out_scores()

    def _forward(self, number: int) -> None:
        pack, stages = self.packs[number], self.policy.sharding.stages
        hidden_in = None
        if not self.axis.is_first:
            shape = (1, len(pack.input_ids_T), stages.width)
            hidden_in = torch.empty(shape, dtype=stages.dtype, device=pack.input_ids_T.device)
            dist.recv(hidden_in, group=self.axis.group, group_src=self.axis.index - 1)
            hidden_in.requires_grad_(self.backward is not None)
        temperatures_N, early_N = self.sampling(pack)
        output = self.policy(pack, temperatures_N, early_N, hidden_in)
        if stages.is_last:
            logprobs_N, entropies_N = output
            self.scores[number] = (logprobs_N.detach(), entropies_N.detach())
            output = self.finish(pack, logprobs_N, entropies_N)
        else:
            self._send(output.detach(), self.axis.group, self.axis.index + 1)
        if self.backward is not None:
            self.pending[number] = _PendingBackward(hidden_in, output)

    def _backward(self, number: int) -> None:
        waiting, stages = self.pending.pop(number), self.policy.sharding.stages
        assert self.backward is not None
        if stages.is_last:
            self.backward(waiting.output)
        else:
            grad = torch.empty_like(waiting.output, dtype=stages.dtype)
            dist.recv(grad, group=stages.backward_group, group_src=self.axis.index + 1)
            torch.autograd.backward(waiting.output, grad.to(waiting.output.dtype))
        if waiting.hidden_in is not None:
            assert waiting.hidden_in.grad is not None
            self._send(waiting.hidden_in.grad, stages.backward_group, self.axis.index - 1)

    def _send(self, tensor: Tensor, group: Any, target: int) -> None:
        message = tensor.to(self.policy.sharding.stages.dtype).contiguous()
        work = dist.isend(message, group=group, group_dst=target)
        self.sending = [(w, t) for w, t in self.sending if not w.is_completed()]
        self.sending.append((work, message))

    def _hand_out_scores(self) -> None:
        """Send the log-probs of the last stage to the others, which finish the packs with them too."""
        stages, counts = self.policy.sharding.stages, [len(pack.target_N) for pack in self.packs]
        device = self.packs[0].input_ids_T.device
        exact = torch.promote_types(stages.dtype, torch.float32)
        table_2N = torch.empty(2, sum(counts), dtype=exact, device=device)
        if stages.is_last:
            for row, scores in enumerate(zip(*self.scores.values(), strict=True)):
                table_2N[row] = torch.cat(scores)
        if sum(counts):
            dist.broadcast(table_2N, group=self.axis.group, group_src=self.axis.size - 1)
        if stages.is_last:
            return
        with torch.no_grad():
            for pack, part_2N in zip(self.packs, table_2N.split(counts, 1), strict=True):
                self.finish(pack, *part_2N)


# ---- what a stage holds


def take_stage(model: Any, body: Any, ranks: Ranks, shapes: dict[str, torch.Size]) -> Stages:
    """Keep this rank's layers; `shapes` are the whole shapes of the model's parameters by name."""
    axis, head = ranks.pipeline, model.get_output_embeddings()
    tied = head.weight is body.embed_tokens.weight
    bounds = [len(body.layers) * stage // axis.size for stage in range(axis.size + 1)]
    stage_of = {id(p): 0 for p in body.embed_tokens.parameters()}
    for stage in range(axis.size):
        for layer in body.layers[bounds[stage] : bounds[stage + 1]]:
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
    tied_names = [
        name for name, parameter in model.named_parameters() if tied and parameter is head.weight
    ]
    stages = Stages(axis=axis, owners=owners, tied="".join(tied_names[:1]), dtype=model.dtype)
    stages.width = model.config.get_text_config().hidden_size
    _make_groups(stages, ranks)
    layers = nn.ModuleList()  # these keep their numbers, which are part of their names
    numbers = range(bounds[axis.index], bounds[axis.index + 1])
    layers._modules.update({str(number): body.layers[number] for number in numbers})
    body.layers = layers
    if not axis.is_first and not (stages.is_last and tied):
        body.embed_tokens = nn.Identity()
    if not stages.is_last:
        body.norm = nn.Identity()
        model.set_output_embeddings(nn.Identity())
    return stages


def _make_groups(stages: Stages, ranks: Ranks) -> None:
    """Make the groups of this rank's pipeline; all ranks make the groups of all pipelines."""
    in_stage = ranks.world // stages.axis.size
    for first in range(in_stage):
        members = list(range(first, ranks.world, in_stage))
        backward = dist.new_group(members)
        tied = dist.new_group([members[0], members[-1]]) if stages.tied else None
        if ranks.rank in members:
            stages.backward_group, stages.tied_group = backward, tied
