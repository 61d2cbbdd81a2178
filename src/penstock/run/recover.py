"""Before the first step: bring trainer and engine to the same weights, new or from a journal.

Recovery = newest valid checkpoint + redo of the journalled steps, without generation. Each redone step
must give the journalled digest, bit for bit; a difference stops the run, unless the step was trained on
another kind of GPU, with other libraries, or with arithmetic that does not repeat bits. The journal
decides: a checkpoint newer than its last step is renamed to `lost-*`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing

from penstock.config import Config
from penstock.config.changes import Change
from penstock.data.identity import TOTAL_STEPS, changed_code, check_content
from penstock.errors import DigestMismatch, JournalDamaged, UserError
from penstock.files import ScratchFolder, can_write, count, pasted
from penstock.inspection.track.logs import last_logged_step
from penstock.rollout.evaluation.evaluate import read_summaries
from penstock.run.job import Job, open_trainer
from penstock.store.checkpoint import Checkpoint, CheckpointStore
from penstock.store.journal import Journal, is_empty
from penstock.store.run_folder import CONFIG, LOST_AFTER, RunFolder
from penstock.types import Arithmetic, StepReport, contradicts
from penstock.weights.digest import FORM
from penstock.workers.supervise.trainer import TrainerClient

Note = Callable[[str], None]


def check_journal(folder: RunFolder) -> list[str]:
    """Notes for the user before a run continues; raise if its journal cannot be used."""
    told = last_logged_step(folder.metrics)
    if not folder.journal.exists() or is_empty(folder.journal):
        if told or any(folder.checkpoints.glob("step-*")):
            fault = f"journal {folder.journal}: it is missing or empty"
            raise JournalDamaged(with_way_out(fault, folder))
        return []  # killed before the first record
    try:
        with closing(Journal.open(folder.journal, readonly=True)) as journal:
            journal.check_for_resume()
            committed = journal.last_committed_step()
    except JournalDamaged as error:
        raise JournalDamaged(with_way_out(str(error), folder)) from error
    if not committed and any(folder.checkpoints.glob("step-[1-9]*")):
        fault = f"journal {folder.journal}: it has no step, but there are checkpoints"
        raise JournalDamaged(with_way_out(fault, folder))
    if told > committed:
        with closing(Journal.open(folder.journal)) as journal:
            record_loss(journal, committed, f"{folder.metrics.name} had step {told}")
            journal.sync()
        return [
            f"the journal ends at step {committed}, but {folder.metrics.name} has step {told}: "
            f"the end of the journal was lost; continuing from step {committed}"
        ]
    return _lost_evaluations(folder, committed)


def _lost_evaluations(folder: RunFolder, done: int) -> list[str]:
    """Notes on the evaluation that ended with a run that had trained its weights further."""
    eras = folder.eras()
    settings, begun = eras[-1].config.eval, max((era.last_step or 0 for era in eras), default=0)
    step = (done - 1) // settings.every_steps * settings.every_steps if settings.every_steps else 0
    made = [row for row in read_summaries(folder.evaluations) if row["step"] >= step]
    was_told = any(row["step"] > step for row in made)
    if not done or was_told or step < begun or not (step or settings.at_start):
        return []
    model = folder.checkpoints / f"step-{step}" / "model"
    command = f"penstock eval {pasted(folder.path)} model.path={pasted(model)}"
    way = f"; to see it: {command}" if model.is_dir() else ""
    return [
        f"warning: evaluation {task} after step {step} was cut off and is missing{way}"
        for task in settings.tasks
        if task not in {row["task"] for row in made}
    ]


def with_way_out(fault: str, folder: RunFolder) -> str:
    """The fault and the command that starts a new run from the newest good state."""
    checkpoint = CheckpointStore(folder.checkpoints).newest()
    if checkpoint is None:
        return f"{fault}; there is no good checkpoint"
    return (
        f"{fault}; newest good state: step {checkpoint.step}; start a new run from it with: "
        f"penstock train {pasted(folder.path / CONFIG)} model.path={pasted(checkpoint.path / 'model')} "
        f"run.name={pasted(folder.name)}-2"
    )


async def begin(job: Job) -> int:
    """Start a new run: give the engine the trainer's weights; return 0, the steps done."""
    await job.folder.record_config(job.journal, job.config, job.facts, after_step=0)
    await _agree_on_weights(job)
    return 0


async def recover(job: Job, *, accept_changes: bool = False) -> int:
    """Restore the trainer, then the batch source; return the last finished step.

    Data, tokenizer and chat template must have the content that the journal names, unless changes
    are accepted. The settings and what was accepted count from the next step on.
    """
    # what is not as before is told; what was accepted is a fact, and from which prompt on
    record, cursors = job.journal.read_identity(), job.journal.cursors()
    if code := changed_code(record, job.facts):
        job.tracker.note(f"{code}; redone steps are compared with the journal")
    accepted = check_content(job.folder, job.config, record, job.facts, accept_changes)
    for text in accepted:
        job.tracker.note(f"accepted: {text}")
    facts = dict(job.facts)
    if accepted:
        facts[f"accepted after step {job.journal.last_committed_step()}"] = "; ".join(accepted)
    if not record and cursors:
        job.tracker.note("the journal is older: settings, data and code are recorded from now on")
    if accepted or not record:
        facts |= {f"tasks.{task}.data since cursor": str(n) for task, n in cursors.items()}
    await job.trainer.restored()
    last = job.journal.last_committed_step()
    await _agree_on_weights(job)
    await job.source.restore(job.journal)
    await job.folder.record_config(job.journal, job.config, facts, after_step=last)
    return last


def redo_plan(journal: Journal, first: int, last: int) -> str:
    """Say how many steps will be redone and how long that may take, by the times of their first training."""
    where = f"the checkpoint of step {first - 1}" if first > 1 else "the start"
    if first > last:
        return f"trainer: restored at step {last} from its checkpoint; no step is redone"
    times = [report.metrics for report in journal.steps(first, last)]
    seconds = sum(t.get("time/step_s", 0.0) - t.get("time/consumer_wait_s", 0.0) for t in times)
    about = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    return f"trainer: {count(last - first + 1, 'step')} of {last} will be redone from the journal after {where}, in about {about}"


def keep_trainer_alive(job: Job) -> None:
    """From now on, restart and restore a trainer that dies, and repeat the call that failed."""

    async def restore(trainer: TrainerClient) -> None:
        """Bring a fresh trainer to the last journalled step: newest checkpoint, then redo."""
        activity, note = job.status.activity, job.tracker.note
        await job.checkpoints.settle()
        checkpoint = newest_checkpoint(job.checkpoints, job.journal, note)
        first = 1 if checkpoint is None else checkpoint.step + 1
        last = job.journal.last_committed_step()
        if last:
            note(redo_plan(job.journal, first, last))
        if checkpoint is not None:
            await trainer.load(str(checkpoint.path))
        async for report in redo(trainer, job.journal, first, last, note):
            job.status.doing(f"redoing step {report.step} of {last} from the journal")
        job.status.doing(activity)

    job.trainer.restart_with(restore)


async def save_at_stop(store: CheckpointStore, trainer: TrainerClient, journal: Journal) -> bool:
    """Save the trainer's state unless a checkpoint has it; return False if the journal has another.

    The trainer may be at an earlier step, if a redo was stopped, or a step ahead, if its commit failed.
    """
    await journal.flush()
    version, digest = await trainer.identity()
    journalled = journal.query("SELECT digest FROM steps WHERE committed AND step = ?", (version,))
    if version and journalled != [(digest,)]:
        return False
    if store.last_step is None or store.last_step < version:
        await store.save(trainer)
    return True


def newest_checkpoint(store: CheckpointStore, journal: Journal, note: Note) -> Checkpoint | None:
    """The newest good checkpoint that the journal knows; note what is wrong with newer ones."""
    committed = journal.last_committed_step()
    store.sweep()
    for path in store.after(committed):
        record_loss(journal, committed, f"there was a checkpoint {path.name}")
        note(
            f"the journal ends at step {committed}, but a newer checkpoint exists (kept as "
            f"{store.set_aside(path)}): the end of the journal was lost; continuing from step {committed}"
        )
    damaged: list[str] = []
    while (checkpoint := store.newest(damaged)) is not None:
        journalled = _digests(journal).get(checkpoint.step, checkpoint.digest)
        if checkpoint.digest == journalled:
            break
        note(
            f"checkpoint {checkpoint.path.name} has weights with digest {checkpoint.digest}, the journal has "
            f"{journalled} for that step: it is of another run, or was unreadable when the step was "
            f"redone (kept as {store.set_aside(checkpoint.path)}); using the next older checkpoint"
        )
    for damage in dict.fromkeys(damaged):
        note(f"damaged: {damage}; using the next older checkpoint")
    if checkpoint is None and damaged:
        note("no checkpoint is valid: every step is redone from the journal")
    return checkpoint


def record_loss(journal: Journal, committed: int, seen: str) -> None:
    """Record that the end of the journal was lost: every later audit lists it."""
    name = f"{LOST_AFTER}{committed}"
    known = journal.read_identity().get(name, "")
    if seen not in known:
        journal.record_identity({name: f"{known}; {seen}" if known else seen})


async def redo(
    trainer: TrainerClient,
    journal: Journal,
    first: int,
    last: int,
    note: Note,
    *,
    repair: bool = True,
) -> AsyncIterator[StepReport]:
    """Train the journalled steps again and compare every digest with the journalled one.

    Raise at a difference. With `repair`, where other bits are to be expected, note the difference and
    replace the journalled digest.
    """
    journalled = {report.step: report for report in journal.steps(first, last)}
    exact = await trainer.is_exact()
    told = False
    for step in range(first, last + 1):
        report = await trainer.train(journal.batch(step))
        before = journalled[step]
        pairs = zip(before.trained, report.trained, strict=False)  # (group, its hash)
        if any(contradicts(ours, theirs) for (_, ours), (_, theirs) in pairs):
            raise JournalDamaged(
                f"journal {journal.path}: damaged: the groups of step {step} are not those that the "
                "trainer recorded"
            )
        if report.digest != before.digest:
            # from the step before: this redo, or one that was killed, has changed what comes after it
            recorded = journal.arithmetic_since(first - 1 if repair else step)
            reason = _expected_difference(report.arithmetic, recorded)
            if not repair or (exact and not reason):
                causes = reason or (
                    "possible causes: another thread count, machine or library version, or a damaged journal"
                )
                raise DigestMismatch(
                    f"step {step}: redone weights have digest {report.digest}, the journal has "
                    f"{before.digest}; {causes}; nothing was changed on disk"
                )
            if not told:
                told = True
                reason = reason or "this device does not repeat bits"
                note(f"step {step} redone, with other bits: {reason}; continuing")
            await journal.redo_step(report)
        yield report


def _expected_difference(now: Arithmetic | None, recorded: Sequence[Arithmetic]) -> str:
    """Why a step that is trained again here may give other bits; empty: it must give the same."""
    if now is None or {now.device, *(before.device for before in recorded)} == {"cpu"}:
        return ""
    if not recorded:
        return "the journal does not say on which device the run was made"
    for before in recorded:
        if (now.device, now.libraries) != (before.device, before.libraries):
            return f"the run was made on {before}, this is {now}"
    return recorded[0].doubt or now.doubt


async def catch_up(
    folder: RunFolder, config: Config, changes: Sequence[Change], note: Note
) -> None:
    """Redo the steps that were done under other settings than `config` with those settings."""
    with closing(Journal.open(folder.journal)) as journal:
        committed = journal.last_committed_step()
        if config.train.steps is not None and config.train.steps < committed:
            raise UserError(
                f"train.steps: got {config.train.steps}, allowed: at least {committed}, the steps that "
                "the run has done"
            )
        last = max((era.last_step or 0 for era in folder.eras()), default=0)
        if any(change.in_update for change in changes):
            last = committed
        if last:
            last = min(last, committed)
            store = CheckpointStore(folder.checkpoints, folder.config().checkpoint)
            checkpoint = newest_checkpoint(store, journal, note)
            first = 1 if checkpoint is None else checkpoint.step + 1
            if first <= last:
                note(redo_plan(journal, first, last))
            async for report in recompute(
                folder, journal, checkpoint, last, note=note, at_end=store.save
            ):
                note(f"redoing step {report.step} of {last} with the settings it had")


async def recompute(
    folder: RunFolder,
    journal: Journal,
    checkpoint: Checkpoint | None,
    last: int,
    *,
    note: Note = lambda text: None,
    repair: bool = True,
    at_end: Callable[[TrainerClient], Awaitable[object]] | None = None,
) -> AsyncIterator[StepReport]:
    """Redo the steps up to `last`, from a checkpoint or from the start, config by config."""
    done = 0 if checkpoint is None else checkpoint.step
    state = None if checkpoint is None else checkpoint.path
    steps = int(folder.record().get(TOTAL_STEPS, 0)) or None
    with ScratchFolder.new("redo") as scratch:
        # apart from those of the run itself, which may be under way
        logs = folder.logs / "recompute" if can_write(folder.path) else scratch / "logs"
        for era in folder.eras():
            end = last if era.last_step is None else min(era.last_step, last)
            if end <= done:
                continue
            async with open_trainer(era.config, logs, steps) as workers:
                trainer = workers.trainer
                if state is not None:
                    await trainer.load(str(state))
                else:
                    _, digest = await trainer.identity()
                    begun = _digests(journal).get(0, digest)
                    if digest != begun:
                        raise DigestMismatch(
                            f"step 0: the model at model.path has digest {digest}, the run began with {begun}"
                        )
                async for report in redo(trainer, journal, done + 1, end, note, repair=repair):
                    yield report
                done, state = end, scratch / f"step-{end}"
                if end == last and at_end is not None:
                    await at_end(trainer)
                elif end < last:
                    await trainer.snapshot(str(state))
                    await trainer.write_snapshot()


def _digests(journal: Journal) -> dict[int, str]:
    digests = dict(journal.query("SELECT step, digest FROM steps WHERE committed ORDER BY step"))
    version_0 = journal.query("SELECT digest FROM weights WHERE version = 0 LIMIT 1")
    if version_0:
        digests[0] = version_0[0][0]
    for digest in digests.values():
        if not digest.startswith(FORM):
            raise UserError(
                f"journal {journal.path}: got weights with digests of an older form ({digest}), "
                f"allowed: {FORM}...; the version of penstock that began the run can continue it"
            )
    return digests


async def _agree_on_weights(job: Job) -> None:
    """Give the engine, if there is one, the trainer's weights unless it holds exactly those."""
    version, digest = await job.trainer.identity()
    if job.engine is None:
        job.confirm_weights(version, digest)
        return
    job.journal.record_published(version, digest)
    stats = await job.engine.stats()
    if (stats.policy_version, stats.digest) != (version, digest):
        handle = await job.trainer.publish()
        await job.engine.update_weights(version, handle)  # each engine confirms them
    else:
        job.journal.record_confirmed("engine", version, digest)
    job.source.weights_updated(version)
