"""The policy: a transformers causal LM that scores packed sequences, and the weights it publishes.

Everything that needs the whole model happens inside one forward call, so a sharded model gathers its
weights once. Also here: loading, sharding, and the names and format under which
weights leave for the engines. `optimizer.py` changes the weights.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.config import ModelConfig
from penstock.config.demo import resolve_model_path
from penstock.data.chat import response_end_ids
from penstock.errors import UserError
from penstock.model import packed_attention
from penstock.model.decoder import hidden_states
from penstock.model.decoder_weights import ModuleProducts, Products, Weights, read_weights
from penstock.model.families import family_of
from penstock.model.kernels.trained_products import TrainProducts
from penstock.model.loading import (
    add_end_ids,
    choose_device,
    end_ids,
    exact_attention,
    format_of,
    load_causal_lm,
)
from penstock.model.ops import Ops, TorchOps
from penstock.model.parallel_plan import check_stages, tensor_plan
from penstock.model.stored_weights import StoredWeights, build, fill, persistent_buffers
from penstock.training.adapters import ADAPTER, adapter_names
from penstock.training.dither import HALF_FORMATS, WHOLE, Place, dither_, dither_key
from penstock.training.exact import ExactForward
from penstock.training.logprobs import (
    LogitRule,
    VocabularySlice,
    token_logprobs,
    warm_up,
)
from penstock.training.pack import Pack, empty_pack, make_pack
from penstock.training.parallel.context_parallel import share_pack
from penstock.training.parallel.pipeline import run_passes, take_stage
from penstock.training.parallel.rank_decoder import RankDecoder
from penstock.training.parallel.ranks import Ranks
from penstock.training.parallel.sharding import Sharding, split_modules, split_over_data
from penstock.training.parallel.tensor_parallel import cut_model
from penstock.training.vocabulary import HeadInputs, VocabularyTerms, terms_of
from penstock.waits import tell_stage


class Policy(nn.Module):
    """A causal language model that scores packed sequences.

    Without `packs` every pack must hold one sequence, and the model runs unchanged. A family runs through the
    decoder of `penstock.model.decoder`; `longest` is the run's longest sequence.
    """

    packs: bool

    def __init__(self, model: Any, *, longest: int | None = None, is_whole: bool = True) -> None:
        super().__init__()
        self.model = model
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest = min(filter(None, (longest, positions)), default=0)
        self.family = family_of(model.config, self.longest)
        self._is_whole = is_whole  # it has all weights, or had them before it was divided
        self._checkpoints = False
        self.stored_buffers = persistent_buffers(model)  # of all stages: no training changes them
        self.merge_seed: int | None = None  # of the dither under merged adapters; None: no dither
        self.sharding = Sharding(Ranks())
        self.head_share: VocabularySlice | None = None  # None: all of the vocabulary
        self._delays_gradients = False  # until the end of an update
        self._switched: list[nn.Module] | None = None  # by `train`; None: not looked up yet
        self._masters: Mapping[int, nn.Parameter] = {}  # of parameters by their ids
        self._rank_decoder: RankDecoder | None = None  # None: this rank has the whole model
        self.exact: ExactForward | None = None  # None: the trainer's own arithmetic
        self._kernels: tuple[Ops, Products] | None = None  # None: not made yet
        self._weights: tuple[tuple[Products, int], Weights] | None = None  # of these layers
        self.rule = LogitRule.of(model, self.family)
        self.end_ids = end_ids(model)
        self._own_attention = exact_attention(model)
        assert self._own_attention != packed_attention.ATTENTION_NAME, "one policy per model"
        self.pack_sequences(True)

    def pack_sequences(self, packs: bool) -> None:
        """Choose packed attention, or the model's own code for packs of one sequence."""
        self.packs = packs
        attention = packed_attention.ATTENTION_NAME if packs else self._own_attention
        self.model.set_attn_implementation(self._own_attention if self.decodes else attention)

    def add_gradients_to(self, masters: Mapping[int, nn.Parameter]) -> None:
        """Let layers on a GPU add their gradients to these masters, by the ids of their parameters."""
        self._masters, self._kernels = masters, None
        if self.decodes and not isinstance(self._table()[0], TorchOps):
            line = f"trainer on {self.device}: {len(self.layers)} layers train by kernels"
            print(line, file=sys.stderr, flush=True)

    def make_exact(self) -> None:
        """Compute log-probs with the bits of the engine from now on."""
        is_plain = self.decodes and self._rank_decoder is None and not self.adapted_layers()
        self.exact = ExactForward.of(self.model, self.family if is_plain else None)
        self._kernels = None

    @property
    def decodes(self) -> bool:
        """Whether the decoder computes packed sequences, else the model's own layers."""
        here = self._is_whole or self._rank_decoder is not None
        return self.packs and self.family is not None and here

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        body: nn.Module = self.model.base_model
        return self.model.model if body is self.model else body

    @property
    def device(self) -> torch.device:
        return next(
            parameter.device for parameter in self.model.parameters() if not parameter.is_meta
        )

    def forward(
        self,
        pack: Pack,
        temperatures_N: Tensor,
        early_N: Tensor | None = None,
        hidden: Tensor | None = None,
        terms: VocabularyTerms | None = None,
    ) -> Any:
        """(log-probs, entropies) of the pack's trained tokens at their temperatures.

        With `terms`, their divergences from the teacher too, and entropies that carry a gradient.

        Where `early_N` is set, the distribution is the one without the end tokens. With a pipeline,
        `hidden` comes from the stage before, and all stages but the last return hidden states.
        """
        if self.sharding.ranks.context.size > 1:
            return self._shared_forward(pack, temperatures_N, early_N)
        return self._score(pack, temperatures_N, early_N, hidden, terms)

    def _shared_forward(
        self, pack: Pack, temperatures_N: Tensor, early_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Score this rank's tokens of the pack; return the results of all of its tokens."""
        shared = share_pack(pack, self.sharding.ranks.context)
        early = None if early_N is None else early_N[shared.own_N]
        logprobs, entropies = self._score(shared.pack, temperatures_N[shared.own_N], early)
        return shared.spread(logprobs), shared.spread(entropies)

    def _score(
        self,
        pack: Pack,
        temperatures_N: Tensor,
        early_N: Tensor | None,
        hidden: Tensor | None = None,
        terms: VocabularyTerms | None = None,
    ) -> Any:
        states = self._states(pack, hidden)
        if not self.sharding.stages.is_last:
            return states
        logprobs_N, entropies_N = self._logprobs(states, pack, temperatures_N, early_N)
        if terms is None:
            return logprobs_N, entropies_N
        banned, divergence_N = None if early_N is None else (early_N, self.end_ids), None
        with torch.autocast(states.device.type, enabled=False):
            head = self._head_inputs(states)
            if terms.entropy:
                entropies_N = terms_of(head, None, "entropy", temperatures_N, banned, pack.kept)
            if terms.teacher is not None:
                kind = terms.divergence
                divergence_N = terms_of(
                    head, terms.teacher, kind, temperatures_N, banned, pack.kept
                )
        return logprobs_N, entropies_N, divergence_N

    def head_inputs(self, pack: Pack) -> HeadInputs:
        """What the distributions of the pack's trained tokens are made from."""
        return self._head_inputs(self._states(pack, None))

    def _head_inputs(self, states_ND: Tensor) -> HeadInputs:
        head = self.model.get_output_embeddings()
        return HeadInputs(
            hidden_ND=states_ND,
            weight_VD=head.weight,
            bias_V=getattr(head, "bias", None),
            rule=self.rule,
        )

    def _states(self, pack: Pack, hidden: Tensor | None) -> Tensor:
        """The hidden states of the pack's predictors; of all tokens on a stage that is not the last."""
        if self.decodes:
            return self._decode(pack, hidden)
        packing: dict[str, Any] = {}
        if self.packs:
            attention = self.model.config._attn_implementation
            assert attention == packed_attention.ATTENTION_NAME, (
                f"another model set {attention} in the config"
            )
            packing = {"position_ids": pack.position_ids_T[None], "pack_layout": pack.layout}
        else:
            assert pack.num_sequences <= 1, "this model runs one sequence per forward pass"
        if hidden is None:
            packing["input_ids"] = pack.input_ids_T[None]
        else:
            packing["inputs_embeds"] = hidden
        states: Tensor = self.body(use_cache=False, **packing).last_hidden_state
        if not self.sharding.stages.is_last:
            return states
        return states[0].index_select(0, pack.predictor_N)

    def _decode(self, pack: Pack, hidden: Tensor | None) -> Tensor:
        """The hidden states of the pack's predictors, by the decoder; or what the next stage goes on with."""
        assert self.family is not None
        ops, products = self._table()
        if self.exact is not None:
            weights = self._read_weights(products)
            return self.exact.hidden_states(
                ops, weights, self._step(pack), pack, checkpoints=self._checkpoints
            )
        if self._rank_decoder is not None:
            return self._rank_decoder.hidden_states(
                ops, products, pack, self._step(pack), hidden, checkpoints=self._checkpoints
            )
        return hidden_states(
            ops,
            self.family,
            self._read_weights(products),
            self._step(pack),
            pack.input_ids_T,
            pack.position_ids_T,
            pack.predictor_N,
            checkpoints=self._checkpoints,
        )

    def _step(self, pack: Pack) -> packed_attention.PackedStep:
        """The step of a pack, with the experts that an engine of this model took."""
        assert self.family is not None
        chosen, row = pack.experts_TN, self.family.experts
        if chosen is not None and row is not None:
            layers = len(self.family.layers)
            is_ours = chosen.shape[1] == layers * row.count  # else another model's rollouts
            chosen = chosen.unflatten(1, (layers, row.count)) if is_ours else None
        return packed_attention.PackedStep(pack.layout, None if row is None else chosen)

    def _read_weights(self, products: Products) -> Weights:
        """The model's weights. Joint ones are read once: to look them up takes longer than to launch a layer."""
        assert self.family is not None
        if self.family.experts is not None or not isinstance(products, TrainProducts):
            return read_weights(self.model, self.family, products)
        layers = self.model.get_decoder().layers
        if self._weights is None or self._weights[0] != (
            products,
            len(layers),
        ):  # or cut by a check
            self._weights = (
                (products, len(layers)),
                read_weights(self.model, self.family, products),
            )
        return self._weights[1]

    def _table(self) -> tuple[Ops, Products]:
        """How the decoder computes: by kernels in half precision on a GPU, else in plain torch."""
        if self.device.type != "cuda" or self.model.dtype not in HALF_FORMATS:
            return TorchOps(), ModuleProducts()
        if self._kernels is None and self.exact is not None:
            self._kernels = self.exact.table(self._masters)
        if self._kernels is None:
            self._kernels = _kernels(self._masters, divided=self._rank_decoder is not None)
        return self._kernels

    def _logprobs(
        self, hidden_ND: Tensor, pack: Pack, temperatures_N: Tensor, early_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head, products = self.model.get_output_embeddings(), self._table()[1]
        bias = getattr(head, "bias", None)
        banned = None if early_N is None else (early_N, self.end_ids)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return token_logprobs(
                hidden_ND,
                head.weight,
                bias,
                pack.target_N,
                temperatures_N,
                self.rule,
                banned=banned,
                kept=pack.kept,
                share=self.head_share,
                add_to=products.adder(head.weight) if isinstance(products, TrainProducts) else None,
                exact=None
                if self.exact is None
                else self.exact.scores(pack, temperatures_N, banned),
            )

    def warm_up(self, *, bans_ends: bool) -> None:
        """Compile the kernels of layers and head; `bans_ends`: some responses have min_tokens."""
        if self.decodes and self._masters:
            self._warm_up_layers()
        tell_stage("compiling the head")
        head = self.model.get_output_embeddings()
        warm_up(
            head.weight,
            getattr(head, "bias", None),
            self.rule,
            self.end_ids if bans_ends and self.end_ids else None,
        )

    def _warm_up_layers(self) -> None:
        """Train two short packs, of sequences with a context and without, and drop the gradients."""
        rows = [np.arange(8), np.arange(8), np.arange(5)]
        predictors = [np.arange(4, 7), np.arange(4, 7), np.arange(1, 4)]
        for numbers in ([0, 1, 2], [2]):
            pack = make_pack(numbers, rows, predictors, [0, 3, 6], self.device)
            logprobs_N, _ = self(pack, torch.ones(len(pack.target_N), device=self.device))
            logprobs_N.sum().backward()
        for master in self._masters.values():
            master.grad = None

    def train(self, mode: bool = True) -> Policy:
        """Turn training mode on only for checkpointed layers: the policy that sampled had no dropout."""
        if self._switched is None:
            super().train(False)
            self._switched = [
                module
                for module in self.modules()
                if getattr(module, "gradient_checkpointing", False)
            ]
        for module in self._switched:
            module.training = mode
        if self.exact is not None:
            self.exact.renew()  # the weights may have changed since the last pass
        return self

    def checkpoint_layers(self) -> None:
        """Keep only the inputs of each block in the forward pass; compute the rest again in backward."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(
                f"train.gradient_checkpointing: got true with {type(self.model).__name__}, which has "
                "no layers that can be checkpointed, allowed: false"
            )
        self._switched, self._checkpoints = None, True
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(_checkpointed, layer)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks: the largest list of modules in the model."""
        lists = (module for module in self.modules() if isinstance(module, nn.ModuleList))
        largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
        return list(largest)

    def cut(self, ranks: Ranks, path: str) -> None:
        """Keep this tensor rank's slice of the parameters; see `tensor_parallel.py`."""
        self.sharding = Sharding(ranks)
        plan: dict[str, str] = {}
        if ranks.tensor.size > 1:
            plan = tensor_plan(self.model.config, ranks.tensor.size, path)
            cut = cut_model(self.model, self.body, plan, self.sharding)
            largest = -(-cut.total // ranks.tensor.size)
            self.head_share = VocabularySlice(first=cut.first, largest=largest, axis=ranks.tensor)
        if ranks.pipeline.size > 1:
            check_stages(self.model.config, ranks.pipeline.size, path)
            shapes = {
                name: torch.Size(self.sharding.part(name, parameter).shape)
                for name, parameter in self.model.named_parameters()
            }
            self.sharding.stages = take_stage(self.model, self.body, ranks, shapes)
        if self.packs and self.family is not None:
            self._kernels = None
            self._rank_decoder = RankDecoder.of(
                self.model,
                self.body,
                self.family,
                plan,
                self.head_share,
                is_last=self.sharding.stages.is_last,
            )

    def split(self, dtype: torch.dtype) -> None:
        """Split what is left of the parameters over the data ranks, and compute in `dtype`."""
        self.sharding.stages.dtype = dtype
        split_over_data(self, self.layers, self.sharding.ranks, dtype)

    def fill(self, stored: StoredWeights) -> None:
        """Read this rank's part of the matrices that have no values yet."""
        filled: dict[int, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta:
                filled[id(parameter)] = self.sharding.read_part(
                    name, parameter, stored, self.device
                )
        tied = self.model.state_dict(keep_vars=True).items()  # under each of its names
        state = {name: filled[id(tensor)] for name, tensor in tied if id(tensor) in filled}
        self.model.load_state_dict(state, strict=False, assign=True)
        stored.close()

    def release(self) -> None:
        """Free the weights that were gathered for passes without a backward pass."""
        for module in split_modules(self):
            module.reshard()

    def begin_update(self) -> None:
        """With train.parallel.zero = 1, keep weights and gradients whole until `finish_update`."""
        ranks = self.sharding.ranks
        if ranks.world > 1 and ranks.shard_mesh.size() > 1 and ranks.parallel.zero == 1:
            self._delay_gradients(True)

    def finish_update(self) -> None:
        """Reduce the gradients that `begin_update` kept: a pass without tokens adds nothing to them."""
        if self._delays_gradients:
            self._delay_gradients(False)
            run_passes(
                self,
                [empty_pack(self.device)],
                lambda _: (torch.ones(0, device=self.device), None),
                lambda _, logprobs_N, __: logprobs_N.sum(),
                backward=lambda loss: loss.backward(),
            )

    def _delay_gradients(self, delays: bool) -> None:
        self._delays_gradients = delays
        for module in split_modules(self):
            module.set_requires_gradient_sync(not delays)
            module.set_reshard_after_backward(not delays)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Turn the adapters off inside the context, so that the model is the base model."""
        layers = [module for module in self.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def published_weights(
        self, dtype: torch.dtype, current: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, tensor in `dtype`), adapters merged, tied weights once.

        `current`: where a parameter is now, if it may be offloaded. With a sharded model every rank must iterate, because each tensor is gathered.
        """
        stages = self.sharding.stages
        parameters = {n: p for n, p in self.model.named_parameters() if not stages.is_copy(n)}
        adapted = self.adapted_layers() if any(".lora_" in name for name in parameters) else {}
        for name in stages.owners or parameters:
            if ".lora_" in name:
                continue
            format_, published = format_of(self.model, name, dtype), None
            if name in parameters:
                here = current(parameters[name].detach()).to(self.device)
                published = self._published(name, here, adapted.get(name), format_)
            if stages.owners:
                published = stages.hand_out(name, published, format_, self.device)
            assert published is not None
            yield name.replace(".base_layer.", "."), published

    def _published(
        self, name: str, parameter: Tensor, adapted: Any | None, dtype: torch.dtype
    ) -> Tensor:
        """Gather one weight, with what its adapters add to it."""
        whole = self.sharding.whole
        if adapted is None:
            return whole(name, parameter.detach().to(dtype))
        merged = self.merge_base(whole(name, parameter.detach()), name, dtype)
        return merged.add_(self._addition(name, adapted)).to(dtype)

    def _addition(self, name: str, layer: Any) -> Tensor:
        """What the adapters of a layer add to its weight."""
        if self.sharding.ranks.world == 1:
            delta: Tensor = layer.get_delta_weight(ADAPTER).detach()
            return delta
        low, high = (
            self.sharding.whole(name, getattr(layer, side)[ADAPTER].weight.detach())
            for side, name in zip(("lora_A", "lora_B"), adapter_names(name), strict=True)
        )
        product = (high @ low) * layer.scaling[ADAPTER]
        return product.t() if layer.fan_in_fan_out else product

    def adapted_layers(self) -> dict[str, Any]:
        """The layers that have adapters, by the name of their base weight."""
        return {
            f"{name}.base_layer.weight": module
            for name, module in self.model.named_modules()
            if hasattr(module, "lora_A") and hasattr(module, "base_layer")
        }

    def merge_base(
        self, base: Tensor, name: str, dtype: torch.dtype, place: Place = WHOLE
    ) -> Tensor:
        """A base weight at full precision, as adapters are added to it before it is rounded.

        Dithered, so that what the adapters add survives the rounding in expectation; without an
        addition the rounding gives the base weight back, bit for bit.
        """
        exact = base.to(torch.promote_types(base.dtype, torch.float32), copy=True)
        if self.merge_seed is not None and dtype in HALF_FORMATS:
            dither_(exact, dtype, dither_key(self.merge_seed, name), place)
        return exact


def _checkpointed(layer: nn.Module, call: Callable[..., Any], *inputs: Any) -> Any:
    """Call a layer in evaluation mode, without its dropout, and keep only its inputs for backward.

    transformers checkpoints a layer only in training mode.
    """

    def evaluate(*inputs: Any) -> Any:
        layer.training = False
        try:
            return call(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluate, *inputs, use_reentrant=False)


def _kernels(masters: Mapping[int, nn.Parameter], *, divided: bool) -> tuple[Ops, Products]:
    """The decoder's operations on a GPU; a divided model is multiplied by its modules, whose hooks talk to other ranks."""
    from penstock.model.kernels.train_ops import TrainOps

    return TrainOps(masters), ModuleProducts() if divided else TrainProducts(masters)


def trainer_device(config: ModelConfig) -> torch.device:
    """The device of this trainer rank."""
    return choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))


def load_policy(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Load a model for a policy; `model_check.py` decides whether it can train."""
    packed_attention.register()
    model = load_causal_lm(
        resolve_model_path(path),
        dtype=dtype,
        device=trainer_device(config),
        trust_remote_code=config.trust_remote_code,
    )
    add_end_ids(model, response_end_ids(config))
    return model


def load_for_ranks(
    config: ModelConfig, dtype: torch.dtype, ranks: Ranks
) -> tuple[Any, StoredWeights | None]:
    """Load the model; or, for several ranks, only build it, for `fill` to read each rank's part.

    A model with adapters, and one whose files do not hold its parameters as they are, is loaded by transformers.
    """
    device = trainer_device(config)
    if not config.lora.rank and (ranks.world > 1 or device.type == "cuda"):
        packed_attention.register()
        built = build(
            resolve_model_path(config.path),
            dtype=dtype,
            device=device,
            trust_remote_code=config.trust_remote_code,
        )
        if built is not None:
            model, stored = built
            add_end_ids(model, response_end_ids(config))
            if ranks.world > 1:
                return model, stored
            tell_stage("loading the model")
            fill(model, stored, device)
            return model, None
    return load_policy(config.path, config, dtype), None
