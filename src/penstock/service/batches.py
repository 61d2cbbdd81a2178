"""A client's batch and its loss: from messages to rows of tokens, and the losses of the protocol.

Position i of a datum predicts `target_tokens[i]`, which may be another token than the next one, or K tokens.
Every loss is a sum over tokens and datums; means are the clients' business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.errors import UserError
from penstock.store import wire
from penstock.store.wire import Message
from penstock.training.pack import Pack


@contextmanager
def readable(kind: str) -> Iterator[None]:
    """Say that a request is none of this kind where its fields have other types than the SDK's."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(
            f"{kind}: got fields that cannot be read ({error}), allowed: those of the SDK"
        ) from None


Settings = Mapping[str, float]
Inputs = Mapping[str, Tensor]  # the inputs of the tokens of a pack
TARGETS = "target_tokens"
_MOST_VALUES = 1 << 27  # of the tensors of a request: sparse ones are small until they are read
NO_LOGPROB = -99999.0  # of an empty place in a table of the most likely tokens


def _cross_entropy(lp_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -x["weights"] * lp_N


def _importance_sampling(lp_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -_ratio(lp_N, x) * x["advantages"]


def _ppo(lp_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    ratio_N, advantages_N = _ratio(lp_N, x), x["advantages"]
    return -(ratio_N * advantages_N).minimum(_clip(ratio_N, x, settings) * advantages_N)


def _cispo(lp_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -_clip(_ratio(lp_N, x), x, settings).detach() * lp_N * x["advantages"]


def _dro(lp_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -(lp_N * x["advantages"] - settings["beta"] / 2 * (lp_N - x["logprobs"]).square())


def _ratio(lp_N: Tensor, x: Inputs) -> Tensor:
    return (lp_N - x["logprobs"]).exp()


def _clip(ratio_N: Tensor, x: Inputs, settings: Settings) -> Tensor:
    """The ratio within its thresholds, which may be given for each token."""
    low, high = (x[key] if key in x else torch.full_like(ratio_N, settings[key]) for key in CLIPS)
    return ratio_N.clamp(low, high)


CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the protocol: its inputs beside the targets, its settings with their defaults, its formula."""

    inputs: tuple[str, ...]
    settings: Settings
    of_tokens: Callable[[Tensor, Inputs, Settings], Tensor]


LOSSES = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_SAMPLED, {}, _importance_sampling),
    "ppo": Loss(_SAMPLED, CLIPS, _ppo),
    "cispo": Loss(_SAMPLED, CLIPS, _cispo),
    "dro": Loss(_SAMPLED, {"beta": 0.05}, _dro),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of tokens for `make_packs`; predictors are repeated where a position has several targets."""

    token_ids: tuple[np.ndarray, ...]
    predictors: tuple[np.ndarray, ...]
    targets_N: np.ndarray
    choices: tuple[None, ...] = ()  # every token counts among all of the vocabulary

    @property
    def rollout_S(self) -> np.ndarray:
        return np.arange(len(self.token_ids))

    @property
    def bounds_S1(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.predictors)])

    @property
    def units(self) -> list[list[int]]:
        return [[number] for number, places in enumerate(self.predictors) if len(places)]

    def aimed(self, pack: Pack) -> Pack:
        """The pack with the targets of these rows."""
        targets_N = torch.from_numpy(self.targets_N[pack.token_N]).to(pack.target_N)
        return replace(pack, target_N=targets_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The datums of a forward_backward."""

    rows: Rows
    width: int  # targets of a position; 0: one, without an axis for it
    loss: Loss
    settings: Settings
    inputs: dict[str, np.ndarray]  # float32, one value for each target

    @classmethod
    @readable("forward_backward")
    def of(cls, request: Message, *, vocabulary: int, longest: int) -> Examples:
        """The request, checked; a mistake is a UserError."""
        name = request.get("loss_fn", "")
        if name not in LOSSES:
            raise UserError(f"loss_fn: got {name!r}, allowed: {', '.join(LOSSES)}")
        loss, settings = LOSSES[name], _settings(request, name)
        if not (data := request.get("data", [])):
            raise UserError("data: got no datum, allowed: at least 1")
        ids, targets, values, size = [], [], [], 0
        for number, datum in enumerate(data):
            place = f"data[{number}]"
            tokens = chunk_ids(datum.get("model_input", []), place)
            check_ids(tokens, f"{place}.model_input", vocabulary=vocabulary, longest=longest)
            tensors = datum.get("loss_fn_inputs", {})
            arrays = {key: dense(tensors[key], f"{place}.{key}") for key in tensors}
            _check_inputs(arrays, loss, len(tokens), place)
            if (size := size + sum(array.size for array in arrays.values())) > _MOST_VALUES:
                raise UserError(f"{place}: got {size} values, allowed: {_MOST_VALUES} of a request")
            target = arrays.pop(TARGETS).astype(np.int64)
            check_ids(target.ravel(), f"{place}.{TARGETS}", vocabulary=vocabulary)
            ids.append(tokens)
            targets.append(target)
            values.append(arrays)
        widths = {target.shape[1] if target.ndim > 1 else 0 for target in targets}
        if len(widths) > 1:
            raise UserError(
                f"{TARGETS}: got {sorted(widths)} targets a position, allowed: one width"
            )
        wanted = [
            *loss.inputs,
            *(k for k in CLIPS if k in loss.settings and any(k in arrays for arrays in values)),
        ]
        for (number, arrays), key in itertools.product(enumerate(values), wanted):
            if key not in arrays:
                raise UserError(f"data[{number}]: got no {key}, allowed: in each datum, or in none")
        return cls(
            rows=make_rows(ids, targets),
            width=widths.pop(),
            loss=loss,
            settings=settings,
            inputs={
                key: np.concatenate([arrays[key].ravel() for arrays in values]).astype(np.float32)
                for key in wanted
            },
        )

    def loss_of(self, pack: Pack, logprobs_N: Tensor) -> Tensor:
        """The loss of the pack's tokens."""
        inputs = {
            key: torch.from_numpy(values[pack.token_N]).to(logprobs_N)
            for key, values in self.inputs.items()
        }
        return self.loss.of_tokens(logprobs_N, inputs, self.settings).sum()

    def output(self, logprobs_N: np.ndarray, loss: float) -> bytes:
        """The answer: the log-probs of each datum, and the loss."""
        tensor = {
            "data": logprobs_N.astype("<f4").tobytes(),
            "offsets": (self.rows.bounds_S1 * 4).astype("<i8").tobytes(),
            "dtype": wire.FLOAT32,
            "trailing_shape": [self.width] if self.width else [],
        }
        record = {
            "type_tag": "logprobs",
            "fields": {"logprobs": tensor},
            "num_datums": len(self.rows.token_ids),
        }
        values = {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [record],
            "metrics": {"loss:sum": loss},
        }
        return wire.encode("ForwardBackwardOutput", values)


def make_rows(ids: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Rows:
    """Rows whose position i predicts targets[i]; positions behind the last target predict nothing."""
    return Rows(
        # one more token: packs read the target behind each predictor, before `aimed` replaces it
        token_ids=tuple(np.append(row, row[-1:]) for row in ids),
        predictors=tuple(
            np.repeat(np.arange(len(target)), target[0].size if len(target) else 1)
            for target in targets
        ),
        targets_N=np.concatenate([target.ravel() for target in targets]),
    )


def _settings(request: Message, name: str) -> Settings:
    allowed = LOSSES[name].settings
    given = {**request.get("loss_fn_config", {})}
    for key, value in request.get("loss_fn_config_v2", {}).items():
        given[key] = value.get("number", value.get("text", 0.0))
    for key, value in given.items():
        if key not in allowed or not isinstance(value, float) or not np.isfinite(value):
            names = ", ".join(allowed) or "none"
            raise UserError(f"loss_fn_config: got {key}={value!r}, allowed for {name}: {names}")
    return {**allowed, **given}


def _check_inputs(arrays: Mapping[str, np.ndarray], loss: Loss, length: int, place: str) -> None:
    for key in (TARGETS, *loss.inputs):
        if key not in arrays:
            names = ", ".join((TARGETS, *loss.inputs))
            raise UserError(f"{place}: got no {key}, allowed: loss_fn_inputs with {names}")
    shape = arrays[TARGETS].shape
    for key, values in arrays.items():
        if values.shape != shape or values.ndim not in (1, 2) or len(values) != length:
            raise UserError(
                f"{place}.{key}: got shape {list(values.shape)}, allowed: that of {TARGETS}, "
                f"[{length}] or [{length}, K] for {length} tokens"
            )
        if values.dtype == np.float32 and not np.isfinite(values).all():
            raise UserError(f"{place}.{key}: got NaN or infinity, allowed: finite numbers")


def chunk_ids(chunks: Sequence[Message], place: str) -> np.ndarray:
    """The token ids of a model input, whose chunks are joined."""
    if any("encoded_text" not in chunk for chunk in chunks):
        raise UserError(f"{place}: got a chunk that is no text, allowed: encoded_text")
    parts = [_array(chunk["encoded_text"].get("tokens", b""), "<i4", place) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def check_ids(ids: np.ndarray, place: str, *, vocabulary: int, longest: int = 0) -> None:
    """Refuse tokens that the model does not have, and more of them than it takes."""
    if not len(ids) or (longest and len(ids) > longest):
        raise UserError(f"{place}: got {len(ids)} tokens, allowed: 1 to {longest or 'any number'}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        got = f"token ids from {ids.min()} to {ids.max()}"
        raise UserError(f"{place}: got {got}, allowed: 0 to {vocabulary - 1}")


def dense(tensor: Message, place: str) -> np.ndarray:
    """A tensor as an array; what a sparse one does not hold is 0."""
    form = {wire.FLOAT32: "<f4", wire.INT64: "<i8"}.get(tensor.get("dtype", 0))
    if form is None:
        raise UserError(f"{place}: got another dtype, allowed: float32, int64")
    shape = tensor.get("shape", [])
    size = int(np.prod(shape, dtype=np.float64)) if shape else -1
    if "sparse_csr" not in tensor:
        values = _array(tensor.get("dense", b""), form, place)
        if shape and (min(shape) < 0 or size != len(values)):
            raise UserError(f"{place}: got {len(values)} values, allowed: those of shape {shape}")
        return values.reshape(shape) if shape else values
    csr = tensor["sparse_csr"]
    values = _array(csr.get("values", b""), form, place)
    crow, col = (_array(csr.get(k, b""), "<i8", place) for k in ("crow_indices", "col_indices"))
    counts = np.diff(crow)
    fits = (
        len(shape) == 2 and min(shape) >= 0 and size <= _MOST_VALUES and len(crow) == shape[0] + 1
    )
    fits = fits and (counts >= 0).all() and counts.sum() == len(col) == len(values)
    if not fits or (len(col) and not (col.min() >= 0 and col.max() < shape[1])):
        raise UserError(f"{place}: got indices that do not fit its shape {shape}")
    full = np.zeros(shape, values.dtype)
    full[np.repeat(np.arange(shape[0]), counts), col] = values
    return full


def _array(octets: bytes, form: str, place: str) -> np.ndarray:
    if len(octets) % np.dtype(form).itemsize:
        raise UserError(f"{place}: got {len(octets)} bytes, allowed: whole numbers of {form}")
    return np.frombuffer(octets, form)
