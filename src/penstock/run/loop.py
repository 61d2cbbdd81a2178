"""The loop, on one screen.

    producer --groups--> replay buffer --batch--> trainer --digest--> journal
       ^                 (journalled first)          |
       +------- engine <----- weights (version, digest)

One loop for sync, async and forks: with `max_staleness = 0` the producer waits for each update, with
more it runs ahead; a fork takes its batches from another run's journal and has no engine. A batch is
journalled before the trainer sees it, a step before its weights are published; so a run that is killed
anywhere continues from its journal (`run/recover.py`). Knows no process, no tensor and no log format.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from penstock.engine.protocol import InferenceEngine
from penstock.errors import PromptsRetired, RunError, StopRequested
from penstock.run.job import Job
from penstock.types import Batch, StepReport, WeightHandle
from penstock.waits import WaitKind, loop_time
from penstock.workers.supervise.trainer import publishes_after


class Loop:
    """Consumes batches until `total_steps` are done; all parts are in the Job."""

    def __init__(self, job: Job, *, first_step: int = 0) -> None:
        self._job = job
        self.step = first_step  # updates done
        self._tasks: asyncio.TaskGroup
        self._training: asyncio.Task[StepReport] | None = None
        self._updating: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[None] | None = None
        self._tokens_before = 0
        self._unlogged: tuple[Batch, StepReport] | None = None  # a step that only the journal has

    async def run(self) -> None:
        """Train to the end. Waits for: groups, the trainer, the journal. Woken by: each of them."""
        job = self._job
        try:
            async with asyncio.TaskGroup() as self._tasks:
                producing = self._tasks.create_task(job.source.run(), name="produce")
                if self._evaluation_due():  # a resumed run evaluates what it had not yet
                    await self._start_evaluation()
                try:
                    while self.step < job.total_steps:
                        if reason := job.stop_rules.met(job.findings.newest, job.findings.open):
                            break
                        await self._one_step(self.step + 1)
                except PromptsRetired as error:
                    reason = str(error)
                if self.step < job.total_steps:
                    job.tracker.note(f"ended after step {self.step}: {reason}")
                    if self.step and publishes_after(job.config, self.step, job.total_steps):
                        await self._start_evaluation()  # none if this step is evaluated already
                await self._settle()
                producing.cancel()
            job.status.doing("done")
        finally:
            await self._end_update()
            self._log_step()  # a stop came between its commit and its log

    async def _one_step(self, step: int) -> None:
        job, started = self._job, loop_time()
        job.status.doing(f"waiting for the groups of step {step}")
        with job.waits.wait("loop", WaitKind.WAIT, f"groups of step {step}"):
            batch = await job.source.take_batch(step)
        waited = loop_time() - started
        publishes = publishes_after(job.config, step, job.total_steps)
        if job.config.launch.colocate:
            await self._settle()  # an evaluation cannot run while the engines sleep
            if publishes:  # engines that sleep cannot finish or abort a response
                await self._pause_producer()
        tokens = 0 if job.engine is None else (await job.engine.stats()).tokens_generated
        job.status.doing(f"training step {step}")
        updating = self._train_and_commit(batch, tokens, started, waited)
        self._training = asyncio.create_task(updating, name=f"train step {step}")
        # a stop never parts an update from its commit
        report = await asyncio.shield(self._training)
        if job.engine is None:
            job.confirm_weights(step, report.digest)
        elif publishes:
            await self._publish(job.engine)
        self._log_step()
        if self._evaluation_due():
            await self._start_evaluation()
        scored = bool(job.config.checkpoint.keep_best) and self._evaluation_due()
        if scored or job.checkpoints.due(step):
            job.status.doing(f"copying the state of step {step} for its checkpoint")
            await job.checkpoints.begin(job.trainer)

    async def _train_and_commit(
        self, batch: Batch, tokens: int, started: float, waited: float
    ) -> StepReport:
        report = await self._job.trainer.train(batch)
        times = {
            "policy_version": float(report.policy_version),
            "tokens/generated": float(max(0, tokens - self._tokens_before)),  # 0: engine restarted
            "time/step_s": loop_time() - started,
            "time/consumer_wait_s": waited,
            "workers/restarts": float(
                sum(w.restarts for w in self._job.workers.supervised.values())
            ),
            **self._job.source.read_metrics(),
        }
        self._tokens_before = tokens
        report = replace(report, metrics={**report.metrics, **times})
        await self._job.journal.commit_step(report)  # nothing is awaited between the two
        self.step, self._unlogged = batch.step, (batch, report)
        return report

    def _log_step(self) -> None:
        if self._unlogged is not None:
            step, self._unlogged = self._unlogged, None
            self._job.log_step(*step)

    async def _end_update(self) -> None:
        """After a stop, wait until the update under way is given up or committed."""
        if self._training is None or self._training.done():
            return
        self._training.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._job.trainer.request_stop()
        with contextlib.suppress(StopRequested):
            await asyncio.shield(self._training)

    async def _publish(self, engine: InferenceEngine) -> None:
        """Publish the weights; the engines load them while the next step trains."""
        await self._settle()
        handle = await self._job.trainer.publish()
        if handle.version != self.step:
            raise RunError(f"trainer: published version {handle.version}, allowed: {self.step}")
        self._job.journal.record_published(handle.version, handle.digest)
        updating = self._update_engine(engine, handle)
        self._updating = self._tasks.create_task(updating, name="update weights")

    async def _update_engine(self, engine: InferenceEngine, handle: WeightHandle) -> None:
        if not self._job.config.launch.colocate:
            await self._pause_producer()
        await engine.update_weights(handle.version, handle)
        await self._job.trainer.engines_loaded()
        self._job.source.weights_updated(handle.version)
        self._job.source.resume()

    async def _pause_producer(self) -> None:
        """Make room for new weights: leave, abort or await what is being generated."""
        on_update = self._job.config.sync.on_update
        if on_update != "keep":
            await self._job.source.pause(abort=on_update == "abort")

    async def _start_evaluation(self) -> None:
        after = [task for task in (self._evaluating, self._updating) if task is not None]
        work = self._job.evaluations.evaluate(self.step, after)
        self._evaluating = self._tasks.create_task(work, name="evaluate")
        if self._job.config.eval.blocking:
            self._job.status.doing(f"evaluating after step {self.step}")
            await self._evaluating

    async def _settle(self) -> None:
        """Wait until weights may be replaced: the last are loaded (`workers/pool/weights.py`), no evaluation needs them."""
        for task in (self._updating, self._evaluating):
            if task is not None:
                await task

    def _evaluation_due(self) -> bool:
        settings = self._job.config.eval
        if self.step == 0:
            return settings.at_start
        every, last = settings.every_steps, self.step == self._job.total_steps
        return last or (every > 0 and self.step % every == 0)
