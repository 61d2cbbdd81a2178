"""How much memory a run needs, in bytes: functions of the model's shape and of a few settings; no weights are read.

`run/fit.py` gives them a config and a machine; trainer, engine and disk forecast use the same shape. Sizes that are
chosen from the free memory at run time (packs, KV cache) count with the least that works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.demo import model_file, resolve_model_path

LEAST_TOKENS, ENOUGH_TOKENS, MOST_TOKENS = 2048, 12288, 32768  # of a pack on a GPU
_SMALL_LAYER = 1 << 23  # numbers
MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes of a trained number: float32, and AdamW's two
_OTHER_NAMES = {  # of the same number, in older architectures and other mixtures
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner",),
    "num_experts": ("num_local_experts",),
    "max_position_embeddings": ("n_positions",),
}


class _Reader:
    """Numbers of a config, whose names differ; 0: it does not say."""

    def __init__(self, settings: Any) -> None:
        if hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        self._names: Mapping[str, str] = getattr(settings, "attribute_map", {})
        if not isinstance(settings, Mapping):
            settings = settings.to_dict() if hasattr(settings, "to_dict") else vars(settings)
        inner = settings.get("text_config")
        self._known = {**settings, **inner} if isinstance(inner, Mapping) else settings

    def __call__(self, name: str) -> int:
        for each in (name, self._names.get(name, name), *_OTHER_NAMES.get(name, ())):
            value = self._known.get(each)
            if isinstance(value, list | tuple):  # one for each layer
                value = max(value, default=0)
            if value:
                return int(value)
        return 0


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelShape:
    """What decides how much memory a model needs."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int  # of all experts that see a token
    queries: int  # numbers of a token's queries in one layer
    keys: int  # numbers of a token's keys in one layer, and of its values
    vocabulary: int
    positions: int = 0  # 0: the model does not say

    @classmethod
    def of(cls, settings: Any, parameters: int = 0) -> ModelShape:
        """Read a transformers config or its config.json; of a model that sees images too, the part for text.

        parameters: 0 if the weights have not been counted, then those of its matrices are.
        """
        known = _Reader(settings)
        hidden, layers = known("hidden_size"), known("num_hidden_layers")
        if not hidden or not layers:
            raise ValueError("the config names no hidden_size or no num_hidden_layers")
        heads = known("num_attention_heads") or 1
        size = known("head_dim") or hidden // heads
        keys = (known("num_key_value_heads") or heads) * size
        wide = known("intermediate_size") or 4 * hidden
        active, each = known("num_experts_per_tok"), known("moe_intermediate_size")
        whole = (known("num_experts") or 1) * (each or wide) if active else wide
        vocabulary = known("vocab_size")
        layer = hidden * (2 * heads * size + 2 * keys + 3 * whole)
        ends = vocabulary * hidden * (1 if known("tie_word_embeddings") else 2)
        return cls(
            parameters=parameters or layers * layer + ends,
            layers=layers,
            hidden=hidden,
            intermediate=active * each if active and each else wide,
            queries=heads * size,
            keys=keys,
            vocabulary=vocabulary,
            positions=known("max_position_embeddings"),
        )

    @property
    def useful_tokens(self) -> int:
        """Tokens of a pack beyond which it only holds more memory."""
        numbers = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        return ENOUGH_TOKENS if numbers > _SMALL_LAYER else MOST_TOKENS

    def adapters(self, rank: int) -> int:
        """The numbers of low-rank adapters on every matrix of every layer."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return rank * self.layers * (attention + 3 * (self.hidden + self.intermediate))

    def kv_bytes(self, each: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.keys * each

    def bytes_per_token(self, each: int, *, checkpointing: bool, joint: bool = False) -> int:
        """What one token of a pack keeps for the backward pass in the decoder's layers.

        A layer of modules keeps about 12 vectors and 4 inside its MLP; a layer of joint products (one GPU, half
        precision, all weights trained) 3 vectors, its queries, keys and values 3 times, and 2 inside its MLP.
        With checkpointing each layer keeps its input, and one layer at a time is computed again.
        """
        layer = 12 * self.hidden + 4 * self.intermediate
        if joint:
            layer = 3 * (self.hidden + self.queries + 2 * self.keys) + 2 * self.intermediate
        numbers = self.layers * self.hidden + layer if checkpointing else self.layers * layer
        return numbers * each


def read_shape(model: str) -> ModelShape | None:
    """The shape of a model from its config.json and the headers of its weights; None: not on this machine."""
    file = model_file(resolve_model_path(model), "config.json")
    if file is None:
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return ModelShape.of(settings, count_parameters(model))
    except (ValueError, TypeError, OSError):  # told where the model is loaded
        return None


def count_parameters(model: str) -> int:
    """The numbers in a model's safetensors files; 0 if there are none on this machine."""
    file = model_file(resolve_model_path(model), "config.json")
    return sum(map(_numbers_of, file.parent.glob("*.safetensors"))) if file else 0


def _numbers_of(path: Path) -> int:
    """Read a safetensors header: eight bytes of length, then JSON with every tensor's shape.

    0 of a file without one: it is refused where the model is loaded.
    """
    with path.open("rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        try:
            header = json.loads(file.read(length))
            tensors = (tensor for name, tensor in header.items() if name != "__metadata__")
            return sum(math.prod(tensor["shape"]) for tensor in tensors)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return 0


def moment_bytes(kind: str) -> int:
    """Both moments of a trained number, by train.moments."""
    return MOMENTS if kind == "float32" else MOMENTS // 2


def pack_tokens(free: int, trained: int, bytes_per_token: int, useful: int) -> int:
    """The tokens of a pack on a GPU, at most `useful`, of whose free memory the update will take `trained` bytes.

    Activations take half of what is left; the rest is for logits, fragments and what others allocate.
    """
    room = max(0, free - trained) // 2
    return max(LEAST_TOKENS, min(useful, room // bytes_per_token // 1024 * 1024))


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerNeeds:
    """The memory of one trainer rank."""

    weights: int  # as they compute, with those of references and teachers
    masters: int
    gradients: int
    moments: int
    activations: int  # of the largest pack: layers and logits
    saved: int  # a checkpoint, which lies in main memory while it is written

    @property
    def total(self) -> int:
        return self.resident + self.gradients + self.activations

    @property
    def resident(self) -> int:
        """What stays from step to step, and goes to the host while engines have the device."""
        return self.weights + self.masters + self.moments


def trainer_needs(
    shape: ModelShape,
    *,
    each: int,
    tokens: int,
    rank: int = 0,
    checkpointing: bool = False,
    joint: bool = False,
    shards: int = 1,
    zero: int = 3,
    learners: int = 1,
    averages: int = 0,
    scorers: int = 0,
    published: int = 0,
    moments: int = MOMENTS,
) -> TrainerNeeds:
    """What a rank needs for packs of `tokens`.

    each: bytes of a number as the model computes. rank: of adapters. shards: ranks that share the model; zero: what
    they share. learners: models that are trained (two with a critic). averages: float32 copies that follow the
    masters. scorers: frozen models beside the policy. published: copies of the weights that wait for engines.
    moments: bytes of a number's.
    """
    trained = shape.adapters(rank) if rank else shape.parameters
    copies = learners + scorers + published
    halves = each < MASTER or rank > 0  # then masters are separate numbers
    if shards > 1 and zero == 3:  # the masters are the parameters, of which a rank has its share
        copies, halves = scorers + published, True
    masters = MASTER * trained * (learners * halves + averages)
    layers = shape.bytes_per_token(each, checkpointing=checkpointing, joint=joint)
    return TrainerNeeds(
        weights=each * shape.parameters * copies // (shards if zero == 3 else 1),
        masters=masters // shards,
        gradients=GRADIENT * trained * learners // (shards if zero > 1 else 1),
        moments=moments * trained * learners // shards,
        activations=tokens * (layers + shape.vocabulary * each),
        saved=(
            each * shape.parameters + trained * (learners * (MASTER + moments) + averages * MASTER)
        )
        // shards,
    )
