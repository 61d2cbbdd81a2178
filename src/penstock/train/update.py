"""One batch through the trainer: passes before the update, then its updates one by one.

    rows -> (reference, proximal log-probs) -> advantages -> packs: loss, backward -> AdamW

Owned by the consumer, which keeps what outlives a batch. A stop is honoured until the first optimizer
step of the batch; from there on the batch is finished.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.algo import kl
from penstock.algo.method import Algorithm
from penstock.config import Config
from penstock.train.advantages import shaped_rewards, token_advantages
from penstock.train.flat_batch import Rows, loss_weights, mini_batches, rows_of, update_sums
from penstock.train.metrics import TokenRecord
from penstock.train.objective import TokenInputs, pack_loss
from penstock.train.optimize import learning_rate
from penstock.train.pack import Pack, empty_pack, make_pack, split_by_tokens
from penstock.train.parallel import Ranks
from penstock.train.policy import Policy
from penstock.train.ptx import TextStream
from penstock.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What the updates of one batch did, for the metrics."""

    rows: Rows
    advantages_N: np.ndarray
    record: TokenRecord
    learning_rate: float
    grad_norms: list[float]  # of each update, before clipping
    skipped: int  # updates whose gradient was not finite
    ptx_losses: list[float]
    ptx_texts: int  # texts taken from the stream, over all ranks


class Updater:
    """The maths of a batch.

    `apply(rate, loss)` does an optimizer step unless loss or gradient is not finite, and tells
    (gradient norm, was it sound).
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        reference: Policy | None,
        texts: TextStream | None,
        ranks: Ranks,
        *,
        apply: Callable[[float, float], tuple[float, bool]],
        check_stop: Callable[[], None],
        count: Callable[[], None],
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.settings = algorithm.settings
        self.policy = policy
        self.reference = reference
        self.texts = texts
        self.ranks = ranks
        self._apply = apply
        self._check_stop = check_stop
        self._count = count  # called for each micro-batch

    def run(self, batch: Batch, total_steps: int) -> BatchOutcome:
        train = self.config.train
        rows = rows_of(batch.groups, batch.step, self.settings)
        inputs = TokenInputs.make(
            rows.behaviour_N, rows.temperature_N, self._exact_dtype, self.policy.device
        )
        updates = mini_batches(len(batch.groups), train.mini_batches) * train.num_epochs
        self._look_before(rows, inputs, several=len(updates) > 1)
        advantages_N = self._advantages(rows, batch, inputs)
        inputs.advantage_N = torch.from_numpy(advantages_N).to(inputs.advantage_N)
        record = TokenRecord(rows.num_tokens)
        rate = learning_rate(train, batch.step, total_steps)
        norms: list[float] = []
        ptx_losses: list[float] = []
        skipped = 0
        for number, group_numbers in enumerate(updates):
            chosen_R = np.flatnonzero(np.isin(rows.group_R, group_numbers))
            stop = self._check_stop if number == 0 else _go_on
            loss = self._accumulate(rows, chosen_R, inputs, advantages_N, record, stop)
            if self.texts is not None:
                ptx_losses.append(self._accumulate_texts(self.texts, number, stop))
            norm, sound = self._apply(rate, loss)
            norms.append(norm)
            skipped += not sound
        return BatchOutcome(
            rows=rows,
            advantages_N=advantages_N,
            record=record,
            learning_rate=rate,
            grad_norms=norms,
            skipped=skipped,
            ptx_losses=ptx_losses,
            ptx_texts=len(ptx_losses) * train.ptx.sequences_per_step,
        )

    def _look_before(self, rows: Rows, inputs: TokenInputs, *, several: bool) -> None:
        """Passes without gradient that must see the weights before the first update."""
        settings = self.settings
        if settings.needs_reference:
            inputs.reference_N = self._reference_logprobs(rows, inputs)
        if settings.kl_in_reward or (several and settings.decoupled):
            inputs.proximal_N = self._logprobs(rows, inputs, self.policy)

    def _reference_logprobs(self, rows: Rows, inputs: TokenInputs) -> Tensor:
        if self.reference is not None:
            return self._logprobs(rows, inputs, self.reference)
        with self.policy.without_adapters():
            return self._logprobs(rows, inputs, self.policy)

    def _logprobs(self, rows: Rows, inputs: TokenInputs, policy: Policy) -> Tensor:
        policy.train(False)
        result_N = torch.zeros_like(inputs.behaviour_N)
        with torch.no_grad():
            for pack in self._packs(rows, np.arange(len(rows.rollouts))):
                self._check_stop()
                index_N = torch.from_numpy(pack.token_N).to(result_N.device)
                result_N[index_N], _ = policy(pack, inputs.temperature_N[index_N])
        return result_N

    def _advantages(self, rows: Rows, batch: Batch, inputs: TokenInputs) -> np.ndarray:
        max_tokens_R = np.repeat(
            [self._max_tokens(group.task) for group in batch.groups],
            [len(group.rollouts) for group in batch.groups],
        )
        rewards_R = shaped_rewards(rows, max_tokens_R, self.settings)
        penalty_N = None
        if self.settings.kl_in_reward:
            assert inputs.proximal_N is not None
            assert inputs.reference_N is not None
            kl_N = kl.estimate(self.settings.kl_estimator, inputs.proximal_N, inputs.reference_N)
            penalty_N = self.settings.kl_beta * kl_N.cpu().numpy().astype(np.float64)
        return token_advantages(rows, rewards_R, penalty_N, self.settings, self.ranks)

    def _accumulate(
        self,
        rows: Rows,
        chosen_R: np.ndarray,
        inputs: TokenInputs,
        advantages_N: np.ndarray,
        record: TokenRecord,
        stop: Callable[[], None],
    ) -> float:
        """Forward and backward over one update's sequences; gradients add up in the masters.

        Returns the loss over all ranks.
        """
        sums = self.ranks.sum(update_sums(rows, chosen_R))
        weights_N = loss_weights(
            rows, chosen_R, sums, self.settings.aggregation, self._constant_length
        )
        weights_N *= 1.0 - self.config.train.ptx.coefficient
        inputs.weight_N = torch.from_numpy(weights_N).to(inputs.weight_N)
        self.policy.train(self._training_mode)
        before_update = stop is not _go_on
        live_R, idle_R = self._split_idle(rows, chosen_R, advantages_N)
        for part_R, backward in ((live_R, True), (idle_R, False)):
            with torch.set_grad_enabled(backward):
                for pack in self._packs(rows, part_R):
                    stop()
                    index_N = torch.from_numpy(pack.token_N).to(self.policy.device)
                    logprobs_N, entropies_N = self.policy(pack, inputs.temperature_N[index_N])
                    loss, seen = pack_loss(self.algorithm, pack, inputs, logprobs_N, entropies_N)
                    if backward:
                        loss.backward()
                    record.add(seen, before_update)
        loss = self.ranks.sum(np.array([record.flush()]))[0]
        record.losses.append(float(loss))
        return float(loss)

    def _split_idle(
        self, rows: Rows, chosen_R: np.ndarray, advantages_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sequences whose gradient is zero by construction need no backward pass, only a look."""
        if self.settings.kl_in_loss or self.ranks.world > 1:
            return chosen_R, chosen_R[:0]
        active_R = np.bincount(rows.row_N, weights=advantages_N != 0, minlength=len(rows.rollouts))
        live = active_R[chosen_R] > 0
        return chosen_R[live], chosen_R[~live]

    def _accumulate_texts(self, stream: TextStream, number: int, stop: Callable[[], None]) -> float:
        """Cross-entropy of the next texts, times the coefficient; returns its mean over tokens."""
        ptx = self.config.train.ptx
        texts = stream.peek(number * ptx.sequences_per_step, ptx.sequences_per_step, self.ranks)
        own = float(sum(len(text.predictors) for text in texts))
        num_tokens = max(float(self.ranks.sum(np.array([own]))[0]), 1.0)
        total = 0.0
        token_ids = [text.token_ids for text in texts]
        predictors = [text.predictors for text in texts]
        starts = np.cumsum([0, *(len(index) for index in predictors)])
        parts = split_by_tokens([len(ids) for ids in token_ids], self._token_budget)
        packs = (
            make_pack(part, token_ids, predictors, starts, self.policy.device) for part in parts
        )
        for pack in self._aligned(packs, len(parts)):
            stop()
            temperatures_N = torch.ones(
                len(pack.target_N), dtype=self._exact_dtype, device=self.policy.device
            )
            logprobs_N, _ = self.policy(pack, temperatures_N)
            loss = -logprobs_N.sum() / num_tokens
            (ptx.coefficient * loss).backward()
            total += float(loss.detach())
        return float(self.ranks.sum(np.array([total]))[0])

    def _packs(self, rows: Rows, chosen_R: np.ndarray) -> Iterator[Pack]:
        """Micro-batches of the chosen sequences that have trained tokens."""
        numbers = [int(row) for row in chosen_R if len(rows.predictors[row])]
        lengths = [len(rows.token_ids[row]) for row in numbers]
        parts = split_by_tokens(lengths, self._token_budget)
        packs = (
            make_pack(
                [numbers[index] for index in part],
                rows.token_ids,
                rows.predictors,
                rows.bounds_R1,
                self.policy.device,
            )
            for part in parts
        )
        return self._aligned(packs, len(parts))

    def _aligned(self, packs: Iterator[Pack], count: int) -> Iterator[Pack]:
        """As many packs on every rank: a sharded forward pass needs all of them."""
        missing = self.ranks.most(count) - count  # asked before the packs: ranks differ after
        fillers = (empty_pack(self.policy.device) for _ in range(missing))
        for pack in itertools.chain(packs, fillers):
            self._count()
            yield pack

    def _max_tokens(self, task: str) -> int:
        if task in self.config.tasks:
            return self.config.task_sampling(task).max_tokens
        return self.config.sampling.max_tokens

    @property
    def _constant_length(self) -> int:
        return max(self._max_tokens(task) for task in self.config.tasks)

    @property
    def _token_budget(self) -> int:
        """On a CPU small packs win: their activations stay in the cache."""
        automatic = 16384 if self.policy.device.type == "cuda" else 2048
        return self.config.train.micro_batch_tokens or automatic

    @property
    def _training_mode(self) -> bool:
        """Training mode serves adapter dropout and checkpointed activations, nothing else."""
        return self.config.train.gradient_checkpointing or self.config.model.lora.dropout > 0

    @property
    def _exact_dtype(self) -> torch.dtype:
        return torch.promote_types(self.policy.model.dtype, torch.float32)


def _go_on() -> None:
    """A stop that comes after the first optimizer step waits for the end of the batch."""
