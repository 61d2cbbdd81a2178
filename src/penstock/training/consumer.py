"""The consumer: trains the policy on batches of groups and hands out its weights.

    groups -> a part for each algorithm: flat batch -> reference and proximal log-probs -> advantages
           -> per update, for each part: packs (forward, loss, backward) -> clip -> AdamW -> digest, metrics

One step trains one batch, in one or several updates, and raises the policy version by one. Consumes a
`Batch`, produces a `StepReport`; runs in the thread or process that calls it. Only `request_stop` and
`work_done` are for other threads. With several trainer ranks, every rank calls the same methods with
its own share of the groups.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import Config
from penstock.data.chat import ChatTemplate
from penstock.errors import RunError, StopRequested
from penstock.model.arithmetic import arithmetic_of, use_arithmetic, use_threads
from penstock.model.loading import compute_dtype
from penstock.model.stored_weights import StoredWeights
from penstock.model.transfer import to_device
from penstock.training.adapters import add_adapters, describe_adapters
from penstock.training.algo import kl
from penstock.training.algo.controller import controllers
from penstock.training.algo.method import SFT, Algorithm, run_settings, task_algorithms
from penstock.training.arrival import Arrival
from penstock.training.average import REFERENCE, averages
from penstock.training.dither import HALF_FORMATS
from penstock.training.flat_batch import FlatBatch, batch_updates
from penstock.training.learner import Learner
from penstock.training.loss_part import LossPart
from penstock.training.metrics import adapt, peak_memory_mib, step_metrics
from penstock.training.model_check import check_loaded, check_model, lay_out
from penstock.training.objective import (
    TokenInputs,
    batch_rewards,
    loss_weights,
    pack_loss,
    token_advantages,
    update_sums,
)
from penstock.training.optimizer import Outcome, learning_rate
from penstock.training.pack import Pack, Rows, make_packs, token_budget
from penstock.training.parallel.pipeline import Sampling, run_passes
from penstock.training.parallel.ranks import Ranks, digest_over
from penstock.training.policy import (
    Policy,
    load_for_ranks,
    trainer_device,
)
from penstock.training.ptx import texts_of, texts_of_update
from penstock.training.scorers import load_scorers, with_hints
from penstock.training.snapshot import (
    load_snapshot,
    read_random_state,
    set_random_state,
    take_snapshot,
)
from penstock.training.stats import UpdateLoss, mean_of_finite
from penstock.training.value import Critic, TokenValues
from penstock.types import Batch, Group, StepReport
from penstock.weights.offload import HostOffload

MAX_BAD_UPDATES = 3  # skipped in a row for a non-finite loss or gradient, after which the run stops


@dataclass(slots=True, kw_only=True)
class _BatchInTraining:
    """One batch while it is trained: the parts of its loss, and what its updates have done so far."""

    parts: list[LossPart]
    texts: list[LossPart]  # of train.ptx, one for each update
    learning_rate: float
    outcomes: list[Outcome] = field(default_factory=list)  # of each update, when it is known
    value_outcomes: list[Outcome] = field(default_factory=list)  # of the critic's updates
    grad_norms: list[float] = field(default_factory=list)  # norm of each update before clipping
    skipped_updates: int = 0  # updates whose loss or gradient was not finite
    arrived_share: float = 1.0  # of the change of the masters, in the published weights

    @property
    def is_updated(self) -> bool:
        """Whether an update of this batch has been applied; a later stop waits for its last one."""
        return bool(self.outcomes)


class Consumer(Learner):
    """Owns the policy, its optimizer and its place in the run."""

    def __init__(
        self,
        config: Config,
        model: Any,
        *,
        total_steps: int,
        reference: Any | None = None,
        teachers: Mapping[str, Any] | None = None,
        texts: Sequence[Group] = (),
        ranks: Ranks | None = None,
        stored: StoredWeights | None = None,
    ) -> None:
        """stored: the files with the matrices of a model that was built without them."""
        use_arithmetic(config.model.arithmetic, model)
        self.config = config
        self.total_steps = total_steps
        self.ranks = ranks or Ranks()
        self.step = 0
        self.policy_version = 0
        self.bad_updates_in_a_row = 0
        self.work_done = 0  # packs, updates and published tensors so far; proves progress
        self.texts = texts
        self.settings = run_settings(config)
        self.algorithms = task_algorithms(config)
        self.controllers = controllers(self.algorithms)
        has_critic = any(method.settings.has_critic for method in self.algorithms.values())
        value_model = copy.deepcopy(model) if has_critic else None  # before the policy changes it
        self.critic: Critic | None = None
        make_policy = functools.partial(Policy, longest=config.longest_sequence)
        self.reference = None if reference is None else make_policy(reference)
        self.teachers = {name: make_policy(teacher) for name, teacher in (teachers or {}).items()}
        self.policy = make_policy(model, is_whole=stored is None)
        self.adapters = describe_adapters(model, self.policy.adapted_layers())
        for policy, path in self._policies():
            check_loaded(policy, path, stored if policy is self.policy else None, self.ranks)
            policy.end_ids = self.policy.end_ids  # which min_tokens banned
        dtype = compute_dtype(config.model, self.policy.device)
        self.engine_dtype = model.dtype if model.dtype == torch.float64 else dtype
        if config.train.gradient_checkpointing:
            self.policy.checkpoint_layers()
        if self.ranks.world > 1:
            for policy, path in self._policies():
                lay_out(policy, self.ranks, path, stored if policy is self.policy else None)
            self.policy.split(self.engine_dtype)
            if stored is not None:
                self.policy.fill(stored)
        self._prepare_to_learn(config.train, self.engine_dtype, config.seed)
        if self.engine_dtype in HALF_FORMATS and self.policy.packs and self.ranks.world == 1:
            check_model(self.policy, config.model.path)  # again, in the format that computes
        if config.train.masters == "dithered":
            self.policy.merge_seed = config.seed
        if config.model.arithmetic == "exact":
            self.policy.make_exact()
        self.averages = averages(config.train, self.masters)
        self.arrival = Arrival(self.policy, self.masters)
        self.host_offload = HostOffload(self._training_tensors)
        if self.policy.device.type == "cuda" and self.ranks.world == 1:
            samplings = [config.task_sampling(task) for task in config.tasks]
            self.policy.warm_up(bans_ends=any(sampling.min_tokens for sampling in samplings))
            self.update_step.warm_up()
        if value_model is not None:
            dtype, packs = self.engine_dtype, self.policy.packs
            self.critic = Critic(value_model, config, dtype, self.ranks, packs=packs, stored=stored)
        self.arithmetic = arithmetic_of(config.model.arithmetic, model, ranks=self.ranks.world)
        self._stop = threading.Event()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash of a batch")

    @classmethod
    def from_config(cls, config: Config, *, total_steps: int) -> Consumer:
        """Load the model, and the adapters, reference and texts that the config asks for."""
        use_threads(config.train.threads)
        torch.manual_seed(config.seed)
        device = trainer_device(config.model)
        dtype = compute_dtype(config.model, device)
        ranks = Ranks.from_environment(device, config.train.parallel)
        # Weights that are trained keep the file's digits; a frozen base has no masters.
        own_dtype = dtype if config.model.lora.rank else torch.float32
        model, stored = load_for_ranks(config.model, own_dtype, ranks)
        if config.model.lora.rank:
            add_adapters(model, config.model.lora)
        reference, teachers = load_scorers(config, dtype)
        return cls(
            config,
            model,
            total_steps=total_steps,
            reference=reference,
            teachers=teachers,
            texts=texts_of(config),
            ranks=ranks,
            stored=stored,
        )

    # ---- the interface

    def request_stop(self) -> None:
        """Ask a running `train` to end before its first update; safe from any thread."""
        self._stop.set()

    def train(self, batch: Batch) -> StepReport:
        """Train one step. If a stop was requested, raise StopRequested and change nothing."""
        started = time.perf_counter()
        self.reload()
        use_threads(self.config.train.threads)
        random_state = read_random_state(self)
        hashing = self._hashing.submit(batch.fingerprints)  # beside the update, which changes none
        try:
            trained = self.train_batch(batch)
        except StopRequested:
            self._stop.clear()
            for policy, _ in self._policies():
                policy.finish_update()
                policy.release()
            self.drop_gradients()
            set_random_state(self, random_state)
            raise
        self.step = batch.step
        self.policy_version += 1
        for average in self.averages.values():
            average.follow(self.step)
        updated = time.perf_counter()
        digest, fingerprints = self.digest(), hashing.result()
        ended = time.perf_counter()
        metrics = self._metrics(trained, ended - started)
        adapt(self.controllers.values(), trained.parts, self.ranks)
        return StepReport(
            step=self.step,
            policy_version=self.policy_version,
            digest=digest,
            metrics={**metrics, "time/digest_s": ended - updated},
            trained=fingerprints,
            arithmetic=self.arithmetic,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the policy as engines load it; all ranks must iterate."""
        for weight in self.policy.published_weights(self.engine_dtype, self.host_offload.current):
            self.work_done += 1
            yield weight

    def digest(self) -> str:
        """The digest of `weights()`."""
        return digest_over(self.ranks, self.weights())

    def snapshot(self, folder: Path) -> Callable[[], None]:
        """Copy model and training state; return a function that writes the copy to `folder`.

        The function may run in any thread during training.
        """
        return take_snapshot(self, folder)

    def load(self, folder: Path) -> None:
        """Restore what a snapshot wrote; training continues bitwise as it would have from there."""
        self.reload()
        load_snapshot(self, folder)

    def offload(self) -> None:
        """Move the model and what trains it from the GPU to host memory; `weights` brings one at a time back."""
        self.drop_gradients()
        self.host_offload.offload()

    def reload(self) -> None:
        """Undo `offload`, bit for bit; `train` and `load` call it themselves."""
        self.host_offload.reload()

    def drop_gradients(self) -> None:
        """Forget the gradients of an update that was given up, also those of the critic."""
        super().drop_gradients()
        if self.critic is not None:
            self.critic.drop_gradients()

    def _policies(self) -> Iterator[tuple[Policy, str]]:
        """Yield the policy, the critic, the reference and the teachers that there are, each with its path."""
        yield self.policy, self.config.model.path
        if self.critic is not None:
            yield self.critic.policy, self.config.model.path
        if self.reference is not None:
            yield self.reference, self.config.train.reference or self.config.model.path
        for name, teacher in self.teachers.items():
            yield teacher, self.config.teachers[name].path

    def _training_tensors(self) -> Iterator[Tensor]:
        """Yield what an offload moves: all but shards, and adapters, which are merged into what is published."""
        for average in self.averages.values():
            yield from average.tensors.values()
        for policy, _ in self._policies():
            for name, parameter in policy.named_parameters():
                if policy is not self.policy or (self.ranks.world == 1 and ".lora_" not in name):
                    yield parameter
        for learner in self._learners:
            yield from learner.masters.separate
            for moments in learner.optimizer.state.values():
                yield from (value for value in moments.values() if isinstance(value, Tensor))

    @property
    def _learners(self) -> list[Learner]:
        """What has masters and an optimizer."""
        return [self] if self.critic is None else [self, self.critic]

    def _metrics(self, trained: _BatchInTraining, seconds: float) -> dict[str, float]:
        metrics = step_metrics(trained.parts, self.ranks)
        text_losses = [loss for part in trained.texts for loss in part.stats.losses]
        if self.critic is not None:
            values = [part.values for part in trained.parts if part.values is not None]
            metrics |= self.critic.metrics(values)
        return metrics | {
            "lr": trained.learning_rate,
            "grad_norm": mean_of_finite(trained.grad_norms),
            "updates/skipped": float(trained.skipped_updates),
            "update/arrived": trained.arrived_share,
            "loss_scale": self.loss_scale.factor,
            "ptx/loss": mean_of_finite(text_losses),
            "time/train_s": seconds,
            "tokens_per_s": metrics["tokens/trained"] / seconds,
            "memory/peak_mib": peak_memory_mib(self.policy.device),
        }

    # ---- one batch

    def train_batch(self, batch: Batch) -> _BatchInTraining:
        """Make all updates of the batch; a stop is honoured until the first one is applied."""
        updates = self._updates(batch)
        current = self._prepare(batch, num_updates=len(updates))
        for number, group_numbers in enumerate(updates):
            if self.texts:
                earlier = (batch.step - 1) * len(updates)
                current.texts.append(self._text_part(earlier + number, batch.step))
            parts = [*current.parts, *current.texts[number:]]
            for learner in self._learners:
                learner.policy.begin_update()
            for part in parts:
                chosen_G = part.is_text | np.isin(part.number_G, group_numbers)
                self._accumulate(current, part, np.flatnonzero(chosen_G[part.flat.group_R]))
            loss = UpdateLoss([(part.stats, part.weight) for part in parts], self.ranks)
            for learner in self._learners:
                learner.policy.finish_update()
            if not current.is_updated:
                before = self.arrival.sample()
            current.outcomes.append(self._apply_update(current.learning_rate, loss))
            if self.critic is not None:
                current.value_outcomes.append(self.critic.apply_update(current.learning_rate))
            if number == len(updates) - 1:  # queued before the host waits for figures
                arrived = self.arrival.share(before)
            loss()
            for part in parts:
                part.stats.flush()
        for outcome in current.outcomes:  # first wait for what comes after the forward passes
            norm, finite = outcome()
            current.grad_norms.append(norm)
            current.skipped_updates += not finite
        current.skipped_updates += sum(not outcome()[1] for outcome in current.value_outcomes)
        current.arrived_share = arrived()
        return current

    def _updates(self, batch: Batch) -> list[np.ndarray]:
        """The numbers of this rank's groups in each update of the batch."""
        ranks = self.ranks
        total = int(ranks.sum_of(len(batch.groups)))
        return batch_updates(total, self.config, batch.step, ranks.data_rank, ranks.data_world)

    def _prepare(self, batch: Batch, *, num_updates: int) -> _BatchInTraining:
        """Lay the batch out, and compute what must come from the weights before the first update."""
        algorithms = dict.fromkeys(self.algorithms.values())  # each once
        return _BatchInTraining(
            parts=[self._part(batch, algorithm, num_updates) for algorithm in algorithms],
            texts=[],
            learning_rate=learning_rate(self.config.train, batch.step, self.total_steps),
        )

    def _part(self, batch: Batch, algorithm: Algorithm, num_updates: int) -> LossPart:
        """The rollouts of the tasks that one algorithm trains."""
        settings, device = algorithm.settings, self.policy.device
        numbers = [
            number
            for number, group in enumerate(batch.groups)
            if self.algorithms.get(group.task, next(iter(self.algorithms.values()))) is algorithm
        ]
        groups = [batch.groups[number] for number in numbers]
        part = LossPart.of(groups, numbers, batch.step, algorithm, self.policy, self._exact_dtype)
        part.weight = settings.weight * (1.0 - self.config.train.ptx.coefficient)
        own = [task for task, method in self.algorithms.items() if method is algorithm]
        part.max_tokens = max(self.config.task_sampling(task).max_tokens for task in own)
        inputs = part.inputs
        if self.critic is not None and settings.has_critic:
            values_N = self._logprobs(part.flat, inputs, self.critic.policy)
            part.values = TokenValues.of(values_N, settings)
            if batch.step <= self.config.train.critic_warmup_steps:
                part.weight = 0.0
        if settings.needs_reference:
            inputs.reference_N = self._reference_logprobs(part)
        if settings.needs_teacher and not settings.compares_vocabulary:
            inputs.teacher_N = self._teacher_logprobs(groups, part, batch.step)
        if settings.newest_from_trainer:
            inputs.newest_N = to_device(part.flat.staleness_N == 0, device)
        needs_proximal = settings.decoupled or settings.newest_from_trainer
        if settings.kl_in_reward or (num_updates > 1 and needs_proximal):
            inputs.proximal_N = self._logprobs(part.flat, inputs, self.policy, replays=True)
        part.set_advantages(self._advantages(groups, part))
        return part

    def _text_part(self, update: int, step: int) -> LossPart:
        """The texts of one update of the run: demonstrations, which weigh `train.ptx.coefficient`."""
        ptx, sft = self.config.train.ptx, SFT(SFT.defaults)
        texts = texts_of_update(self.texts, update, ptx.sequences_per_step, self.ranks)
        part = LossPart.of(texts, range(len(texts)), step, sft, self.policy, self._exact_dtype)
        part.weight, part.is_text = ptx.coefficient, True
        part.set_advantages(np.ones(part.flat.num_tokens))
        return part

    def _reference_logprobs(self, part: LossPart) -> Tensor:
        if self.reference is not None:
            return self._logprobs(part.flat, part.inputs, self.reference)
        moving = self.averages.get(REFERENCE)
        with moving.in_place(self.policy) if moving else self.policy.without_adapters():
            return self._logprobs(part.flat, part.inputs, self.policy)

    def _teacher_logprobs(self, groups: Sequence[Group], part: LossPart, step: int) -> Tensor:
        settings = part.algorithm.settings
        if settings.teacher in self.teachers:
            return self._logprobs(part.flat, part.inputs, self.teachers[settings.teacher])
        if self.config.teachers[settings.teacher].base_url:
            return part.recorded_teacher()
        hinted = list(with_hints(groups, self.config, self._chat))
        flat = FlatBatch.from_groups(hinted, step, settings, self.policy.end_ids)
        return self._logprobs(flat, part.inputs, self.policy)

    def _logprobs(
        self, flat: FlatBatch, inputs: TokenInputs, policy: Policy, *, replays: bool = False
    ) -> Tensor:
        """The log-probs of all trained tokens under `policy`, or a critic's values, without gradients."""
        policy.train(False)
        result_N = torch.zeros_like(inputs.behaviour_N)

        def keep(pack: Pack, logprobs_N: Tensor, _: Tensor) -> None:
            result_N[pack.index_N] = logprobs_N

        packs = self._packs(flat, np.arange(len(flat.rollouts)), replays=replays)
        run_passes(policy, packs, self._counted(inputs.sampled_for), keep, check=self._check_stop)
        policy.release()
        return result_N

    def _advantages(self, groups: Sequence[Group], part: LossPart) -> np.ndarray:
        settings, inputs = part.algorithm.settings, part.inputs
        if settings.distills:
            return np.zeros(part.flat.num_tokens)
        rewards_R = batch_rewards(part.flat, groups, self.config, settings)
        penalty_N = None
        if settings.kl_in_reward:
            assert inputs.proximal_N is not None
            assert inputs.reference_N is not None
            kl_N = kl.estimate(settings.kl_estimator, inputs.proximal_N, inputs.reference_N)
            penalty_N = settings.kl_beta * kl_N.cpu().numpy().astype(np.float64)
        compute = token_advantages if part.values is None else part.values.advantages
        return compute(part.flat, rewards_R, penalty_N, settings, self.ranks)

    # ---- one update

    def _accumulate(self, current: _BatchInTraining, part: LossPart, chosen_R: np.ndarray) -> None:
        """Run forward and backward over a part's rollouts of an update; gradients add up in the masters."""
        flat, inputs = part.flat, part.inputs
        sums = self.ranks.sum(update_sums(flat, chosen_R))
        part.stats.has_tokens = bool(sums[0])
        aggregation = part.algorithm.settings.aggregation
        weights_N = loss_weights(flat, chosen_R, sums, aggregation, part.max_tokens)
        inputs.weigh(weights_N)
        live_R, idle_R = (
            part.split_idle(chosen_R) if self.ranks.world == 1 else (chosen_R, chosen_R[:0])
        )

        def finish(pack: Pack, *scored: Tensor) -> Tensor:
            loss, figures_XN = pack_loss(part.algorithm, pack, inputs, *scored)
            part.stats.add(pack, loss, figures_XN, before_update=not current.is_updated)
            return loss if part.weight == 1 else part.weight * loss

        for part_R, backward in ((live_R, True), (idle_R, False)):
            self.forward_backward(
                self._packs(
                    flat,
                    part_R,
                    joined_by=part.algorithm if part.joins_rows else None,
                    replays=True,
                ),
                self._counted(functools.partial(part.inputs_of_pass, self.teachers)),
                finish,
                backward=backward,
                check=functools.partial(self._check_stop, current),
            )
        if self.critic is not None and part.values is not None:
            self.critic.accumulate(
                part.values,
                inputs.weight_N,
                self._packs(flat, chosen_R),
                self._counted(inputs.sampled_for),
                functools.partial(self._check_stop, current),
            )

    def _counted(self, sampling: Sampling) -> Sampling:
        """Count a pack as work when its forward pass begins."""

        def counted(pack: Pack) -> tuple[Any, ...]:
            self.work_done += 1
            return sampling(pack)

        return counted

    def _apply_update(self, rate: float, loss: UpdateLoss) -> Outcome:
        """Make one optimizer step, and count updates that are not finite."""
        self.work_done += 1
        outcome = self.optim_step(rate, loss)

        @functools.cache
        def count() -> tuple[float, bool]:
            norm, finite = outcome()
            overflowed = bool(np.isfinite(loss())) and self.loss_scale.overflowed(finite)
            if not overflowed:
                self.bad_updates_in_a_row = 0 if finite else self.bad_updates_in_a_row + 1
            if self.bad_updates_in_a_row >= MAX_BAD_UPDATES:
                raise RunError(
                    f"training: {MAX_BAD_UPDATES} updates in a row had a non-finite loss or gradient; "
                    "lower train.lr or look at the rewards"
                )
            return norm, finite

        if self.loss_scale.is_dynamic:  # the next update needs its factor
            count()
        return count

    def _check_stop(self, current: _BatchInTraining | None = None) -> None:
        """Raise StopRequested if any rank was asked to stop and no update has been applied."""
        if current is not None and current.is_updated:
            return
        if self.ranks.max_of(self._stop.is_set()):
            raise StopRequested("a stop was requested before the update was applied")

    # ---- packs

    def _packs(
        self,
        flat: FlatBatch,
        chosen_R: np.ndarray,
        *,
        joined_by: Algorithm | None = None,
        replays: bool = False,
    ) -> Iterator[Pack]:
        """Packs of the chosen rollouts' rows that have trained tokens.

        Rows of one rollout share a pack if the loss of a token depends on the rollout's other tokens. `replays`: the
        policy that sampled them scores them, and takes the experts that it took.
        """
        units = flat.units(chosen_R, joined=joined_by is not None)
        if not self._can_pack and any(len(unit) > 1 for unit in units):
            assert joined_by is not None
            settings = joined_by.settings
            raise RunError(
                f"training: {settings.name} with correction {settings.correction} needs a "
                "rollout's rows in one forward pass, and this model takes one row at a time"
            )
        return self.packs_of(flat, units, replays=replays)

    def packs_of(
        self, rows: Rows, units: Sequence[Sequence[int]], *, replays: bool = False
    ) -> Iterator[Pack]:
        """Packs of the rows in `units`, as large as this trainer takes them."""
        return make_packs(
            rows,
            units,
            budget=self._token_budget,
            joins=self._can_pack,
            device=self.policy.device,
            ranks=self.ranks,
            replays=replays,
        )

    # ---- settings

    @property
    def _can_pack(self) -> bool:
        return all(policy.packs for policy, _ in self._policies())

    @functools.cached_property
    def _token_budget(self) -> int:
        """Tokens of a pack; an automatic choice is made at the first step, when all memory is in use."""
        if not self._can_pack:
            return 1  # one row per pack
        trained = sum(
            master.numel()
            for learner in self._learners
            for master in learner.masters.parameters.values()
        )
        model, each = self.policy.model.config, self.engine_dtype.itemsize
        return token_budget(self.config.train, model, each, trained, self.policy.device, self.ranks)

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate.from_config(self.config.model)

    @property
    def _exact_dtype(self) -> torch.dtype:
        return torch.promote_types(self.policy.model.dtype, torch.float32)
