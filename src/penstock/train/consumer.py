"""The consumer: trains the policy on batches of groups and hands out its weights.

One step trains one batch, in one or several updates (`update.py`), and raises the policy's version
by one. Runs in whatever thread or process calls it; `request_stop` and `pieces` alone are for other
threads. With several trainer ranks every rank calls the same methods with its own share of the groups.
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

from penstock.algo.choice import method_class, resolve
from penstock.config import Config
from penstock.errors import RunError, StopRequested
from penstock.models.loading import compute_dtype
from penstock.train import state
from penstock.train.metrics import step_metrics
from penstock.train.optimize import clip_gradients, make_optimizer
from penstock.train.parallel import Ranks, digest_over, shard
from penstock.train.policy import Policy
from penstock.train.policy_weights import (
    Masters,
    add_adapters,
    load_policy,
    published_weights,
    trainer_device,
)
from penstock.train.ptx import TextStream
from penstock.train.update import BatchOutcome, Updater
from penstock.types import Batch, StepReport
from penstock.weights.offload import Parking


class Consumer:
    """Owns the policy, its optimizer and its place in the run."""

    def __init__(
        self,
        config: Config,
        model: Any,
        *,
        total_steps: int,
        reference: Any | None = None,
        texts: TextStream | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.ranks = ranks or Ranks()
        self.step = 0
        self.policy_version = 0
        self.bad_updates_in_a_row = 0
        self.pieces = 0  # micro-batches, updates and tensors handed out, ever: a sign of life
        self.texts = texts
        self.policy = Policy(model)
        self.engine_dtype = compute_dtype(config.model, self.policy.device)
        if model.dtype == torch.float64:
            self.engine_dtype = torch.float64
        if config.train.compile:
            self.policy.compile_layers()
        if self.ranks.world > 1:
            shard(self.policy, self.ranks, self.engine_dtype)
        self.masters = Masters(model, separate=model.dtype == torch.bfloat16)
        self.optimizer = make_optimizer(self.masters.parameters, config.train)
        self.parking = Parking(self._needed_by_train)
        self._stop = threading.Event()
        self._updater = Updater(
            config,
            method_class(config.algorithm.name)(resolve(config.algorithm)),
            self.policy,
            None if reference is None else Policy(reference),
            texts,
            self.ranks,
            apply=self._apply,
            check_stop=self._check_stop,
            count=self._count,
        )

    @classmethod
    def from_config(cls, config: Config, *, total_steps: int) -> Consumer:
        """Load the model (and what the settings ask for beside it) and make ready to train."""
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        device = trainer_device(config.model)
        dtype = compute_dtype(config.model, device)
        ranks = Ranks.from_environment(device)
        # A sharded model keeps float32 masters and computes in `dtype` by itself.
        own_dtype = dtype if ranks.world == 1 else torch.float32
        model = load_policy(config.model.path, config.model, own_dtype)
        if config.model.lora.rank:
            add_adapters(model, config.model.lora)
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        reference = None
        base_serves = config.model.lora.rank > 0 and not config.train.reference
        if resolve(config.algorithm).needs_reference and not base_serves:
            path = config.train.reference or config.model.path
            reference = load_policy(path, config.model, dtype).requires_grad_(False)
        return cls(
            config,
            model,
            total_steps=total_steps,
            reference=reference,
            texts=TextStream.from_config(config),
            ranks=ranks,
        )

    def request_stop(self) -> None:
        """Ask a running `train` to end before it changes the weights; safe from any thread."""
        self._stop.set()

    def train(self, batch: Batch) -> StepReport:
        """One step. Raises StopRequested with everything as it was if a stop was asked for."""
        started = time.perf_counter()
        self.unpark()
        torch.set_num_threads(self.config.train.threads)
        random_state = torch.get_rng_state()
        try:
            outcome = self._updater.run(batch, self.total_steps)
        except StopRequested:
            self._stop.clear()
            self.optimizer.zero_grad(set_to_none=True)
            torch.set_rng_state(random_state)
            raise
        self.step = batch.step
        self.policy_version += 1
        if self.texts is not None:
            self.texts.cursor += outcome.ptx_texts
        digest = self.digest()
        metrics = self._metrics(outcome, time.perf_counter() - started)
        return StepReport(
            step=self.step, policy_version=self.policy_version, digest=digest, metrics=metrics
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy as engines load it: transformers names, their format, adapters merged."""
        for named in published_weights(self.policy.model, self.engine_dtype):
            self._count()
            yield named

    def digest(self) -> str:
        """The identity of `weights()`."""
        return digest_over(self.ranks, self.weights())

    def save(self, folder: Path) -> None:
        """Write model and training state under `folder`."""
        state.save(self, Path(folder))

    def load(self, folder: Path) -> None:
        """Go back to what `save` wrote; what follows is bitwise what would have followed there."""
        self.unpark()
        state.load(self, Path(folder))

    def park(self) -> None:
        """Give back the device memory that only `train` needs; the weights that leave for engines stay."""
        self.optimizer.zero_grad(set_to_none=True)
        self.parking.park()

    def unpark(self) -> None:
        """Undo `park`, bit for bit; `train` and `load` do so themselves."""
        self.parking.unpark()

    def _needed_by_train(self) -> Iterator[Tensor]:
        if self.masters.separate:
            yield from self.masters.parameters.values()
        if self._updater.reference is not None:
            yield from self._updater.reference.parameters()
        for moments in self.optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))

    def _metrics(self, outcome: BatchOutcome, seconds: float) -> dict[str, float]:
        metrics = step_metrics(outcome.rows, outcome.advantages_N, outcome.record, self.ranks)
        norms = [norm for norm in outcome.grad_norms if np.isfinite(norm)]
        return metrics | {
            "lr": outcome.learning_rate,
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "updates/skipped": float(outcome.skipped),
            "ptx/loss": float(np.mean(outcome.ptx_losses)) if outcome.ptx_losses else 0.0,
            "time/train_s": seconds,
            "tokens_per_s": metrics["tokens/trained"] / seconds,
            "memory/peak_mib": _peak_memory_mib(self.policy.device),
        }

    def _apply(self, rate: float, loss: float) -> tuple[float, bool]:
        """One optimizer step. A non-finite loss or gradient changes nothing and is counted.

        Nor does a gradient that is zero throughout: momentum alone must not move the weights.
        """
        self._count()
        norm = clip_gradients(self.masters.parameters.values(), self.config.train.max_grad_norm)
        finite = bool(np.isfinite(norm) and np.isfinite(loss))
        if finite and norm > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.masters.publish()
        self.optimizer.zero_grad(set_to_none=True)
        self.bad_updates_in_a_row = 0 if finite else self.bad_updates_in_a_row + 1
        limit = self.config.train.max_bad_updates
        if self.bad_updates_in_a_row >= limit:
            raise RunError(
                f"training: {limit} updates in a row had a non-finite loss or gradient "
                "(train.max_bad_updates); lower train.lr or look at the rewards"
            )
        return norm, finite

    def _count(self) -> None:
        self.pieces += 1

    def _check_stop(self) -> None:
        if self.ranks.most(int(self._stop.is_set())):
            raise StopRequested("a stop was asked for before the update was applied")


def _peak_memory_mib(device: torch.device) -> float:
    """Most memory this process has held: of the GPU where it trains there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
