"""The check of a model at the start of a run: the trainer's log-probs must be the model's own.

A few short sequences, two of which share a context, are scored by the unchanged model, each alone,
and by the policy, packed. A model that mixes packed sequences (convolutions, state-space layers) trains
one sequence per forward pass; a model whose log-probs the policy cannot give is refused. If the run's
sequences can outgrow a window of a family, the first layers score one that is longer; windows of other types
are covered by tests/training/test_architectures.py.
`lay_out` divides a checked model over the ranks of one copy, and checks that this changed nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import UserError
from penstock.model.decoder_check import (
    HALF_TOLERANCE,
    TOLERANCE,
    check_ids,
    difference,
    first_layers,
    kinds_end,
    long_length,
    recorded_routes,
    rotation_length,
    token_logprobs,
)
from penstock.model.families import long_rope_from
from penstock.model.stored_weights import StoredWeights
from penstock.training.pack import Pack, make_pack
from penstock.training.parallel.collectives import all_max
from penstock.training.parallel.pipeline import run_passes
from penstock.training.parallel.ranks import Ranks
from penstock.training.policy import Policy
from penstock.types import Choices
from penstock.waits import tell_stage

T = TypeVar("T")
log = logging.getLogger(__name__)

LENGTHS = (9, 5, 11, 11)  # two of one length, so that packed attention sees a block
CONTEXT = 3  # tokens that are not scored; the first two sequences share them
HALF_LEAK = 0.02  # mean difference in half precision when only other sequences of the pack change


def check_model(policy: Policy, path: str) -> None:
    """Let the policy pack sequences if no log-prob changes; else run each alone, if that is exact."""
    name = f"model.path: got {path!r} ({type(policy.model).__name__})"
    sequences = _sequences(policy)
    tell_stage(f"checking the model in {str(policy.model.dtype).removeprefix('torch.')}")
    policy.train(False)
    with torch.no_grad():
        try:
            plain_N, reason = _compare(policy, sequences)
            if reason is not None:
                policy.pack_sequences(False)
                gap, exact = _difference(policy, _policy_logprobs(policy, sequences), plain_N)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise UserError(
                f"{name}, which the trainer cannot run on token ids ({_first_line(error)}), "
                "allowed: a causal LM"
            ) from error
    whole_N, prefix_N = plain_N[: LENGTHS[0] - CONTEXT], plain_N[LENGTHS[0] - CONTEXT :]
    count = LENGTHS[1] - CONTEXT
    if not _routes(policy) and not _difference(policy, whole_N[:count], prefix_N[:count])[1]:
        raise UserError(f"{name}, in which tokens see the tokens after them, allowed: a causal LM")
    if reason is None:
        _check_long(policy, name)
        return
    if not exact:
        raise UserError(
            f"{name}, whose log-probs the trainer would miss by {gap:.2g}, allowed: a causal LM whose "
            "logits are a linear function of its last hidden states"
        )
    log.warning("%s: %s, so the trainer runs one sequence per forward pass", name, reason)


def _compare(policy: Policy, sequences: list[np.ndarray]) -> tuple[Tensor, str | None]:
    """The unchanged model's log-probs, and why the policy cannot pack sequences; None: it can.

    A run of sequences beyond the length at which the rotation changes uses the other one from the first
    token. The unchanged model does so in sequences as long, which the first layers compute.
    """
    layers = len(policy.layers)
    filler = 0
    if policy.decodes and policy.family is not None:
        filler = rotation_length(policy.family, policy.longest)
        layers = kinds_end(policy.family) if filler else layers
    with first_layers(policy.model, layers) if filler else contextlib.nullcontext():
        policy.pack_sequences(False)
        plain_N, experts = _plain_logprobs(policy, sequences, filler)
        return plain_N, _packing_fault(policy, sequences, plain_N, experts)


def _check_long(policy: Policy, name: str) -> None:
    """Refuse a family whose sequences beyond a window are not the unchanged model's."""
    if policy.family is None:
        return
    length = long_length(policy.family, policy.longest)
    if not length:
        return
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    sequences = [check_ids(vocabulary, length).numpy()]
    with torch.no_grad(), first_layers(policy.model, kinds_end(policy.family)):
        policy.pack_sequences(False)
        plain_N, experts = _plain_logprobs(policy, sequences)
        policy.pack_sequences(True)
        gap, exact = _difference(policy, _policy_logprobs(policy, sequences, experts), plain_N)
    if not exact:
        raise UserError(
            f"{name}, whose log-probs the trainer would miss by {gap:.2g} in a sequence of {length} tokens, "
            f"allowed: a model of type {policy.model.config.get_text_config().model_type} with unchanged layers"
        )


def check_loaded(policy: Policy, path: str, stored: StoredWeights | None, ranks: Ranks) -> None:
    """Check a model; if its matrices lie in files, the first rank reads them and tells the others."""
    if stored is None:
        check_model(policy, path)
        return

    def check() -> bool:
        check_model(policy, path)
        return policy.packs

    policy.pack_sequences(_streamed_on_first(policy, stored, ranks, check))


def _streamed_on_first(
    policy: Policy, stored: StoredWeights, ranks: Ranks, call: Callable[[], T]
) -> T:
    """Call a function on the first rank, where each layer has its matrices while it runs; send all ranks the result."""
    answer: list[Any] = [None]
    if ranks.is_first:
        try:
            with stored.streamed(policy.model, policy.layers, policy.device):
                answer = [call()]
        except UserError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], UserError):
        raise answer[0]
    answered: T = answer[0]
    return answered


def lay_out(policy: Policy, ranks: Ranks, path: str, stored: StoredWeights | None = None) -> None:
    """Divide the model over the ranks of one copy; refuse it if log-probs or gradients would change.

    stored: the files with the matrices, of which this rank reads its part when the model is divided.
    """
    if ranks.parallel.copies == 1:
        policy.cut(ranks, path)
        return
    if ranks.context.size > 1 and not policy.packs:
        raise UserError(
            f"train.parallel.context: got {ranks.context.size} with {type(policy.model).__name__} "
            f"({path!r}), which runs one sequence per forward pass, allowed: 1"
        )
    sequences = _sequences(policy)
    policy.train(False)
    with torch.no_grad():
        if stored is None:
            before_N = _policy_logprobs(policy, sequences)
        else:
            score = functools.partial(_own_logprobs, policy, sequences)
            before_N = _streamed_on_first(policy, stored, ranks, score)
    policy.cut(ranks, path)
    if stored is not None:
        policy.fill(stored)
    name = f"train.parallel: got {type(policy.model).__name__} ({path!r})"
    trained = {
        n: parameter for n, parameter in policy.model.named_parameters() if parameter.requires_grad
    }
    after_N = _policy_logprobs(policy, sequences, backward=bool(trained))
    gap, exact = _difference(policy, after_N, before_N)
    if ranks.max_of(not exact):
        raise UserError(
            f"{name}, whose divided log-probs differ by {gap:.2g}, allowed: 1 rank a copy"
        )
    policy.sharding.finish_gradients(trained)
    for parameter_name, parameter in trained.items():
        grad, parameter.grad = parameter.grad, None
        if grad is None or parameter_name in policy.sharding.cuts:
            continue
        norm = grad.double().norm()
        least, most = -all_max(-norm, ranks.tensor), all_max(norm, ranks.tensor)
        if most - least > (HALF_TOLERANCE if grad.itemsize == 2 else TOLERANCE) * most:
            raise UserError(
                f"{name}, whose plan misses that ranks have parts of the gradient of {parameter_name}, "
                "allowed: 1 rank a copy"
            )


def _own_logprobs(policy: Policy, sequences: list[np.ndarray]) -> Tensor:
    """The log-probs by the model's own code, with the rotation of the run's longest sequence."""
    filler = 0 if policy.family is None else rotation_length(policy.family, policy.longest)
    if not filler:
        return _policy_logprobs(policy, sequences)
    packs = policy.packs
    policy.pack_sequences(False)
    try:
        return _plain_logprobs(policy, sequences, filler)[0]
    finally:
        policy.pack_sequences(packs)


def _packing_fault(
    policy: Policy, sequences: list[np.ndarray], plain_N: Tensor, experts: list[Choices | None]
) -> str | None:
    """Why the policy cannot pack sequences, or None if it can."""
    if not getattr(policy.model, "_supports_attention_backend", False):
        return "its attention cannot be replaced by packed attention"
    if getattr(policy.model.config.get_text_config(), "attention_chunk_size", None):
        return "its attention works in chunks, which packed attention does not"
    if not policy.family and long_rope_from(policy.model.config, policy.longest) is not None:
        return "its rotation (long rope) depends on the longest sequence of a pass"
    policy.pack_sequences(True)
    try:
        packed_N = _policy_logprobs(policy, sequences, experts)
        gap, exact = _difference(policy, packed_N, plain_N)
        if exact and policy.model.dtype in (torch.bfloat16, torch.float16):
            # Rounding hides a small leak; other neighbours show it, because shapes stay the same.
            others = [ids.copy() for ids in sequences]
            for ids in others[1::2]:
                ids[CONTEXT:] = ids[CONTEXT:][::-1].copy()
            even = [n % 2 == 0 for n in range(len(LENGTHS))]
            experts = [own if is_same else None for own, is_same in zip(experts, even, strict=True)]
            same_N = np.repeat(even, np.array(LENGTHS) - CONTEXT)
            gap = float((_policy_logprobs(policy, others, experts) - packed_N)[same_N].abs().mean())
            exact = gap <= HALF_LEAK
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's own code may raise anything when it is packed
        return f"it cannot be packed ({_first_line(error)})"
    return None if exact else f"its layers mix packed sequences (log-probs differ by {gap:.2g})"


def _sequences(policy: Policy) -> list[np.ndarray]:
    """Token ids from the middle of the vocabulary, away from special tokens.

    No context is shared where its tokens may have taken other experts in each sequence.
    """
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    generator = np.random.default_rng(0)
    first, last = vocabulary // 4, max(3 * vocabulary // 4, vocabulary // 4 + 1)
    sequences = [generator.integers(first, last, length) for length in LENGTHS]
    if not _routes(policy):
        sequences[1] = sequences[0][: LENGTHS[1]]  # shows whether a token sees the tokens after it
    return sequences


def _routes(policy: Policy) -> bool:
    """Whether the decoder chooses experts."""
    return policy.family is not None and policy.family.experts is not None


def _plain_logprobs(
    policy: Policy, sequences: list[np.ndarray], filler: int = 0
) -> tuple[Tensor, list[Choices | None]]:
    """The unchanged model's log-probs of the sequences, each alone, laid end to end; and the experts it took.

    `filler` tokens after a sequence make it longer and change nothing else.
    """
    rows: list[Tensor] = []
    experts: list[Choices | None] = []
    with recorded_routes(policy.model, policy.family) as routes:
        for ids in sequences:
            ids_T = torch.from_numpy(ids).to(policy.device)
            longer_T = torch.nn.functional.pad(ids_T, (0, filler), value=int(ids[0]))
            logits_TV = policy.model(input_ids=longer_T[None], use_cache=False).logits[0]
            rows.append(token_logprobs(logits_TV[: len(ids)], ids_T)[CONTEXT - 1 :])
            experts.append(_choices(policy, routes, len(ids) - 1) if routes else None)
    return torch.cat(rows), experts


def _choices(policy: Policy, routes: dict[int, tuple[Tensor, Tensor]], passes: int) -> Choices:
    """The experts of the first passes over a sequence, as an engine records them."""
    assert policy.family is not None
    assert policy.family.experts is not None
    shape = passes, len(policy.family.layers), policy.family.experts.count
    number_PLC = np.zeros(shape, np.uint16)
    for layer, (_, chosen_RC) in routes.items():
        number_PLC[:, layer] = chosen_RC[:passes].cpu().numpy() + 1
    return replace(Choices.unknown(passes), experts=number_PLC.reshape(passes, -1))


def _policy_logprobs(
    policy: Policy,
    sequences: list[np.ndarray],
    experts: Sequence[Choices | None] = (),
    *,
    backward: bool = False,
) -> Tensor:
    """The policy's log-probs of the sequences, laid end to end; or their gradients as well.

    `experts`: those that the tokens take, of each sequence.
    """
    predictors = [np.arange(CONTEXT - 1, len(ids) - 1) for ids in sequences]
    first_token = np.cumsum([0, *(len(index) for index in predictors)])
    numbers = list(range(len(sequences)))
    result_N = torch.empty(int(first_token[-1]), dtype=torch.float64)
    for part in [numbers] if policy.packs else [[number] for number in numbers]:
        pack = make_pack(
            part,
            sequences,
            predictors,
            first_token,
            policy.device,
            choices=experts,
            replays=bool(experts),
        )
        ones_N = torch.ones(len(pack.target_N), device=policy.device)

        def keep(pack: Pack, logprobs_N: Tensor, _: Tensor) -> Tensor:
            result_N[torch.from_numpy(pack.token_N)] = logprobs_N.detach().double().cpu()
            return logprobs_N.sum()

        train = (lambda loss: loss.backward()) if backward else None
        run_passes(
            policy,
            [pack],
            functools.partial(lambda ones_N, _: (ones_N, None), ones_N),
            keep,
            backward=train,
        )
    return result_N


def _difference(policy: Policy, actual_N: Tensor, plain_N: Tensor) -> tuple[float, bool]:
    return difference(actual_N, plain_N, policy.model.dtype)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
