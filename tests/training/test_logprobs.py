"""Chunked log-probs and entropies equal those from full logits, and need far less memory."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.training import logprobs
from penstock.training.logprobs import (
    LogitRule,
    VocabularySlice,
    banned_here,
    token_logprobs,
)
from penstock.training.pack import Kept
from penstock.training.parallel.ranks import Axis
from penstock.training.policy import Policy
from stages.training_data import tiny_model


def some_kept(targets):
    """Every other token was sampled among its own id and two more."""
    rows = [
        sorted({int(target), 2, 5}) if number % 2 else [] for number, target in enumerate(targets)
    ]
    return Kept(np.cumsum([0, *map(len, rows)]), torch.tensor([n for row in rows for n in row]))


def full_logprobs(hidden, weight, bias, targets, temperatures, rule, banned=None, kept=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = logits / temperatures[:, None]
    if banned is not None:
        early, ids = banned
        logits = torch.where(
            early[:, None] & torch.isin(torch.arange(11), torch.tensor(ids)), -torch.inf, logits
        )
    for row, ids in enumerate(np.split(kept.ids_M.numpy(), kept.bounds_N1[1:-1]) if kept else ()):
        if len(ids):
            without = ~torch.isin(torch.arange(11), torch.tensor(ids))
            logits = torch.where((torch.arange(13) == row)[:, None] & without, -torch.inf, logits)
    log_all = torch.log_softmax(logits, -1)
    entropies = -(log_all.exp() * log_all.clamp(min=-1e300)).sum(-1)
    return log_all.gather(-1, targets[:, None]).squeeze(-1), entropies


def case(bias: bool):
    torch.manual_seed(0)
    hidden = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(11, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, 11, (13,))
    temperatures = torch.rand(13, dtype=torch.float64) + 0.5
    return hidden, weight, offset, targets, temperatures


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0)])
@pytest.mark.parametrize(
    ("bans", "cuts"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_equal_to_full_logits(monkeypatch, stored, chunk, bias, rule, bans, cuts) -> None:
    monkeypatch.setattr(logprobs, "KEEP_ELEMENTS_CPU", 1 << 20 if stored else 0)
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 25)  # two rows at a time
    inputs, banned = case(bias), None
    if bans:  # two end tokens that were not allowed for every third token
        inputs[3].clamp_(max=8)
        banned = (torch.arange(13) % 3 == 0, [9, 10])
    kept = some_kept(inputs[3]) if cuts else None
    got, entropies = token_logprobs(*inputs, rule, chunk, banned=banned, kept=kept)
    expected, expected_entropies = full_logprobs(*inputs, rule, banned, kept)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    assert not entropies.requires_grad
    leaves = [tensor for tensor in inputs[:3] if tensor is not None]
    factors = torch.randn(13, dtype=torch.float64)
    got_grads = torch.autograd.grad((got * factors).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * factors).sum(), leaves)
    for own, other in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(own, other)


class Meeting:
    """Two ranks as two threads: what each gives is summed, or its maximum taken, when both have come."""

    def __init__(self, monkeypatch) -> None:
        self._given: list[torch.Tensor] = [torch.zeros(0)] * 2
        self._all = threading.Barrier(2, timeout=20)
        monkeypatch.setattr(logprobs, "all_sum", lambda given, axis: self._join(given, axis).sum(0))
        monkeypatch.setattr(
            logprobs, "all_max", lambda given, axis: self._join(given, axis).amax(0)
        )

    def _join(self, given, axis) -> torch.Tensor:
        self._given[axis.index] = given
        self._all.wait()
        joined = torch.stack(self._given)
        self._all.wait()
        return joined

    def run(self, of_rank) -> list:
        with ThreadPoolExecutor(2) as pool:
            return [one.result() for one in [pool.submit(of_rank, rank) for rank in range(2)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_gradient_takes_the_place_of_the_logits(monkeypatch, rule, temperature, dtype) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", 3000)
    torch.manual_seed(2)
    raw, targets = (8 * torch.randn(20, 997)).to(dtype), torch.randint(3, 997, (20,))
    banned = torch.arange(20) % 3 == 0, torch.arange(3)
    how = (targets, torch.full((20,), temperature), rule.scale, rule.softcap, banned)
    for gradient in (True, False):
        wanted = logprobs.chunk_logprobs_(raw.double(), *how, gradient, None)
        given = raw.clone()
        got = logprobs.chunk_logprobs_(given, *how, gradient, None)
        assert got[0].dtype == got[1].dtype == torch.float32
        torch.testing.assert_close(got[:2], wanted[:2], check_dtype=False)
        if gradient:
            assert got[2] is given
            torch.testing.assert_close(given, wanted[2].to(dtype))


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0)])
@pytest.mark.parametrize("bans", [False, True])
def test_slices_of_the_vocabulary_give_what_the_whole_gives(monkeypatch, rule, bans) -> None:
    """Slices of 6 and 5 columns: by its own size the second rank would make larger chunks."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS_CPU", 30)
    hidden, weight, bias, targets, temperatures = case(True)
    banned = (torch.arange(13) % 3 == 0, [4, 9, 10]) if bans else None
    if bans:
        targets = torch.where(torch.isin(targets, torch.tensor([4, 9, 10])), 3, targets)
    kept = None if bans else some_kept(targets)
    expected, entropies = full_logprobs(
        hidden, weight, bias, targets, temperatures, rule, banned, kept
    )
    factors = torch.randn(13, dtype=torch.float64)
    grads = torch.autograd.grad((expected * factors).sum(), [hidden, weight, bias])

    def of_rank(rank):
        part = slice(6 * rank, 6 * rank + 6)
        leaves = [
            one.detach().clone().requires_grad_() for one in (hidden, weight[part], bias[part])
        ]
        share = VocabularySlice(first=6 * rank, largest=6, axis=Axis(rank, 2))
        got = token_logprobs(
            *leaves, targets, temperatures, rule, banned=banned, kept=kept, share=share
        )
        return part, got, torch.autograd.grad((got[0] * factors).sum(), leaves)

    for part, got, own in Meeting(monkeypatch).run(of_rank):
        torch.testing.assert_close(got, (expected, entropies))
        torch.testing.assert_close(own, (grads[0], grads[1][part], grads[2][part]))


def test_no_tokens_give_a_zero_gradient() -> None:
    hidden, weight, _, targets, temperatures = case(False)
    got, _ = token_logprobs(hidden[:0], weight, None, targets[:0], temperatures[:0])
    got.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_half_precision_is_scored_in_float32() -> None:
    hidden, weight, _, targets, temperatures = case(False)
    got, entropies = token_logprobs(
        hidden.bfloat16(), weight.bfloat16(), None, targets, temperatures.float()
    )
    assert got.dtype == entropies.dtype == torch.float32


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive; works on meta tensors, which need no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(function) -> int:
    with torch.device("meta"):
        hidden = torch.empty(32768, 64, requires_grad=True)
        weight = torch.empty(150_000, 64, requires_grad=True)
        targets = torch.zeros(32768, dtype=torch.int64)
        temperatures = torch.ones(32768)
        with LiveBytes() as counter:
            logprobs, _ = function(hidden, weight, None, targets, temperatures, LogitRule())
            logprobs.sum().backward()
    return counter.peak


def test_peak_memory_at_32k_tokens_and_a_150k_vocabulary_is_below_a_third() -> None:
    full = peak_bytes(full_logprobs)
    chunk_tokens = logprobs.CHUNK_ELEMENTS_GPU // 150_000  # the larger of the two default chunks
    chunked = peak_bytes(lambda *inputs: token_logprobs(*inputs, chunk_tokens))
    assert full > 32768 * 150_000 * 4
    assert chunked < full / 3


@pytest.mark.parametrize("bans_ends", [False, True])
def test_a_warm_up_leaves_no_gradient(bans_ends) -> None:
    """The consumer calls it on a GPU only, where it compiles; it must run anywhere."""
    policy = Policy(tiny_model())
    policy.end_ids = (2, 3)
    policy.warm_up(bans_ends=bans_ends)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_banned_columns_are_made_once() -> None:
    """A GPU's host would wait for all queued work, in every pack."""
    weight_VD, flags_N = torch.zeros(9, 4), torch.tensor([True, False])
    first = banned_here((flags_N, [2, 11]), weight_VD, 4)
    second = banned_here((flags_N, [2, 11]), weight_VD, 4)
    assert first is not None
    assert second is not None
    assert first[1].tolist() == [7]  # 2 belongs to another rank's slice
    assert second[1] is first[1]
