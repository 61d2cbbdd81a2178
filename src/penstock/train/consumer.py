"""The consumer: trains the policy on batches of groups and hands out its weights. Layer 3.

    Batch -> rows -> advantages -> packs -> loss, backward -> AdamW -> StepReport

One step trains one batch, in one or several updates, and raises the policy's version by one. Runs
in whatever thread or process calls it; `request_stop` alone may be called from another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.algo import kl
from penstock.algo.method import Algorithm
from penstock.algo.settings import method_class, resolve
from penstock.config import Config
from penstock.errors import RunError, StopRequested
from penstock.train import state
from penstock.train.credit import shaped_rewards, token_advantages
from penstock.train.measure import TokenRecord, step_metrics
from penstock.train.objective import TokenInputs, pack_loss
from penstock.train.optimize import clip_gradients, learning_rate, make_optimizer
from penstock.train.pack import Pack, make_pack, split_by_tokens
from penstock.train.parallel import Ranks
from penstock.train.policy import Policy
from penstock.train.rows import Rows, loss_weights, mini_batches, rows_of, update_sums
from penstock.train.weights import (
    Masters,
    add_adapters,
    compute_dtype,
    device_of,
    digest_of,
    load_model,
    published_weights,
)
from penstock.types import Batch, StepReport


class Consumer:
    """Owns the policy, its optimizer and its place in the run."""

    def __init__(
        self,
        config: Config,
        model: Any,
        *,
        total_steps: int,
        reference: Any | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.settings = resolve(config.algorithm)
        self.algorithm: Algorithm = method_class(config.algorithm.name)(self.settings)
        self.ranks = ranks or Ranks()
        self.total_steps = total_steps
        self.step = 0
        self.policy_version = 0
        self.bad_updates_in_a_row = 0
        self.policy = Policy(model)
        self.reference = None if reference is None else Policy(reference)
        self.engine_dtype = compute_dtype(config.model, self.policy.device)
        if self.policy.model.dtype == torch.float64:
            self.engine_dtype = torch.float64
        self.masters = Masters(model, separate=model.dtype == torch.bfloat16)
        self.optimizer = make_optimizer(self.masters.parameters, config.train)
        self._stop = threading.Event()

    @classmethod
    def from_config(cls, config: Config, *, total_steps: int) -> Consumer:
        """Load the model (and what the settings ask for beside it) and make ready to train."""
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        device = device_of(config.model)
        dtype = compute_dtype(config.model, device)
        model = load_model(config.model.path, config.model, dtype)
        if config.model.lora.rank:
            add_adapters(model, config.model.lora)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        reference = None
        own_base = config.model.lora.rank and not config.train.reference
        if resolve(config.algorithm).needs_reference and not own_base:
            path = config.train.reference or config.model.path
            reference = load_model(path, config.model, dtype).requires_grad_(False)
        return cls(config, model, total_steps=total_steps, reference=reference)

    def request_stop(self) -> None:
        """Ask a running `train` to end before it changes the weights; safe from any thread."""
        self._stop.set()

    def train(self, batch: Batch) -> StepReport:
        """One step. Raises StopRequested with the weights as they were if a stop was asked for."""
        started = time.perf_counter()
        torch.set_num_threads(self.config.train.threads)
        rows = rows_of(batch.groups, batch.step, self.settings)
        try:
            record, advantages_N, outcome = self._train_rows(rows, batch)
        except StopRequested:
            self._stop.clear()
            self._clear_gradients()
            raise
        self.step = batch.step
        self.policy_version += 1
        metrics = step_metrics(rows, advantages_N, record, self.ranks) | outcome
        seconds = time.perf_counter() - started
        metrics["time/train_s"] = seconds
        metrics["tokens_per_s"] = metrics["tokens/trained"] / seconds
        metrics["memory/peak_mib"] = _peak_memory_mib(self.policy.device)
        return StepReport(
            step=self.step,
            policy_version=self.policy_version,
            digest=self.digest(),
            metrics=metrics,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy as engines load it: transformers names, their format, adapters merged."""
        return published_weights(self.policy.model, self.engine_dtype)

    def digest(self) -> str:
        """The identity of `weights()`."""
        return digest_of(self.weights())

    def save(self, folder: Path) -> None:
        """Write model and training state under `folder`."""
        state.save(self, folder)

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote; what follows is bitwise what would have followed there."""
        state.load(self, folder)

    def _train_rows(
        self, rows: Rows, batch: Batch
    ) -> tuple[TokenRecord, np.ndarray, dict[str, float]]:
        train = self.config.train
        inputs = TokenInputs.make(
            rows.behaviour_N, rows.temperature_N, self._exact_dtype, self.policy.device
        )
        updates = mini_batches(len(batch.groups), train.mini_batches) * train.num_epochs
        self._look_before(rows, inputs, several=len(updates) > 1)
        advantages_N = self._advantages(rows, batch, inputs)
        inputs.advantage_N = torch.from_numpy(advantages_N).to(inputs.advantage_N)
        record = TokenRecord(rows.num_tokens)
        rate = learning_rate(train, batch.step, self.total_steps)
        norms, skipped = [], 0
        for number, group_numbers in enumerate(updates):
            chosen_R = np.flatnonzero(np.isin(rows.group_R, group_numbers))
            self._accumulate(rows, chosen_R, inputs, advantages_N, record, first=number == 0)
            norm, applied = self._apply(rate)
            norms.append(norm)
            skipped += not applied
        finite = [norm for norm in norms if np.isfinite(norm)]
        outcome = {
            "lr": rate,
            "grad_norm": float(np.mean(finite)) if finite else 0.0,
            "updates/skipped": float(skipped),
            "ptx/loss": 0.0,
        }
        return record, advantages_N, outcome

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
        policy.set_dropout(False)
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

    def _max_tokens(self, task: str) -> int:
        if task in self.config.tasks:
            return self.config.task_sampling(task).max_tokens
        return self.config.sampling.max_tokens

    def _accumulate(
        self,
        rows: Rows,
        chosen_R: np.ndarray,
        inputs: TokenInputs,
        advantages_N: np.ndarray,
        record: TokenRecord,
        *,
        first: bool,
    ) -> None:
        """Forward and backward over one update's sequences; gradients add up in the masters."""
        sums = self.ranks.sum(update_sums(rows, chosen_R))
        weights_N = loss_weights(
            rows, chosen_R, sums, self.settings.aggregation, self._constant_length
        )
        inputs.weight_N = torch.from_numpy(weights_N).to(inputs.weight_N)
        self.policy.set_dropout(self._training_mode)
        live_R, idle_R = self._split_idle(rows, chosen_R, advantages_N)
        for pack in self._packs(rows, live_R):
            if first:
                self._check_stop()
            self._pass(pack, inputs, record, before_update=first, backward=True)
        with torch.no_grad():
            for pack in self._packs(rows, idle_R):
                if first:
                    self._check_stop()
                self._pass(pack, inputs, record, before_update=first, backward=False)
        record.flush()

    def _pass(
        self,
        pack: Pack,
        inputs: TokenInputs,
        record: TokenRecord,
        *,
        before_update: bool,
        backward: bool,
    ) -> None:
        index_N = torch.from_numpy(pack.token_N).to(self.policy.device)
        logprobs_N, entropies_N = self.policy(pack, inputs.temperature_N[index_N])
        loss, seen = pack_loss(self.algorithm, pack, inputs, logprobs_N, entropies_N)
        if backward:
            loss.backward()
        record.add(seen, before_update)

    def _split_idle(
        self, rows: Rows, chosen_R: np.ndarray, advantages_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sequences whose gradient is zero by construction need no backward pass, only a look."""
        if self.settings.kl_in_loss or self.ranks.world > 1:
            return chosen_R, chosen_R[:0]
        active_R = np.bincount(rows.row_N, weights=advantages_N != 0, minlength=len(rows.rollouts))
        live = active_R[chosen_R] > 0
        return chosen_R[live], chosen_R[~live]

    def _packs(self, rows: Rows, chosen_R: np.ndarray) -> Iterator[Pack]:
        """Micro-batches of the chosen sequences that have trained tokens."""
        numbers = [int(row) for row in chosen_R if len(rows.predictors[row])]
        lengths = [len(rows.token_ids[row]) for row in numbers]
        for part in split_by_tokens(lengths, self._token_budget):
            yield make_pack(
                [numbers[index] for index in part],
                rows.token_ids,
                rows.predictors,
                rows.bounds_R1,
                self.policy.device,
            )

    def _apply(self, rate: float) -> tuple[float, bool]:
        """One optimizer step; a non-finite gradient changes nothing and is counted."""
        norm = clip_gradients(self.masters.parameters.values(), self.config.train.max_grad_norm)
        finite = bool(np.isfinite(norm))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.masters.publish()
        self._clear_gradients()
        self.bad_updates_in_a_row = 0 if finite else self.bad_updates_in_a_row + 1
        limit = self.config.train.max_bad_updates
        if self.bad_updates_in_a_row >= limit:
            raise RunError(
                f"training: {limit} updates in a row had a non-finite gradient "
                "(train.max_bad_updates); lower train.lr or look at the rewards"
            )
        return norm, finite

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _check_stop(self) -> None:
        asked = float(self._stop.is_set())
        if self.ranks.world > 1:
            asked = self.ranks.max(np.array([asked]))[0]
        if asked:
            raise StopRequested("a stop was asked for before the update was applied")

    @property
    def _token_budget(self) -> int:
        """On a CPU small packs win: their activations stay in the cache."""
        automatic = 16384 if self.policy.device.type == "cuda" else 2048
        return self.config.train.micro_batch_tokens or automatic

    @property
    def _training_mode(self) -> bool:
        return self.config.train.gradient_checkpointing or self.config.model.lora.dropout > 0

    @property
    def _exact_dtype(self) -> torch.dtype:
        return torch.promote_types(self.policy.model.dtype, torch.float32)

    @property
    def _constant_length(self) -> int:
        return max(self._max_tokens(task) for task in self.config.tasks)


def _peak_memory_mib(device: torch.device) -> float:
    """Most memory this process has held: of the GPU where it trains there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
