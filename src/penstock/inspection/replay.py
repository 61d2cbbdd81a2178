"""`penstock replay`: a run computed again from its journal, or a fork trained on its rollouts.

The check recomputes every step and compares its digest with the journalled one. A fork is a run
folder of its own: it takes the recorded groups in the order they were trained, generates nothing,
and corrects for the policy that sampled them. Its journal has the groups, the steps, and who
published the versions that its rollouts name; `origin.json` says where they came from.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path

from penstock import run_folder
from penstock.algo.method import check_algorithm, resolve_settings
from penstock.algo.settings import keep_group
from penstock.checkpoint import CheckpointStore
from penstock.config import Config
from penstock.config.source import load_config
from penstock.errors import UserError
from penstock.job import open_trainer
from penstock.journal import Journal
from penstock.launch.part_factories import TrainerPart
from penstock.recover import newest_checkpoint, recompute, redo, save_at_stop
from penstock.run_folder import CONFIG, ORIGIN, Origin, RunFolder
from penstock.track.fanout import Fanout
from penstock.track.jsonl import restore_metrics
from penstock.track.protocol import RunInfo
from penstock.types import Batch, Group, StepReport

CORRECTION = "algorithm.correction.kind=token_truncate"


async def check_run(
    folder: RunFolder, to_step: int | None, on_step: Callable[[StepReport, int], None]
) -> int:
    """Recompute the steps and compare; raises at the first difference. The number of steps."""
    journal = Journal.open(folder.journal, readonly=True)
    try:
        last = _last_step(journal, to_step)
        async for report in recompute(folder, journal, None, last, repair=False):
            on_step(report, last)
        return last
    finally:
        journal.close()


def _last_step(journal: Journal, to_step: int | None) -> int:
    committed = journal.last_committed_step()
    if not committed:
        raise UserError(f"replay: got {journal.path} without a finished step, allowed: at least 1")
    if to_step is not None and not 1 <= to_step <= committed:
        raise UserError(f"--to: got {to_step}, allowed: 1 to {committed}")
    return to_step or committed


# -- forks -------------------------------------------------------------------------------------


def make_fork(
    parent: RunFolder, algorithm: str | None, overrides: Sequence[str], to_step: int | None
) -> RunFolder:
    """A new run folder beside its parent, ready to be trained."""
    named = [f"algorithm.name={algorithm}"] if algorithm else []
    corrected = [] if resolve_settings(parent.config().algorithm).decoupled else [CORRECTION]
    place = [f"run.dir={parent.path.parent}", f"run.name={_unused_name(parent, algorithm)}"]
    words = [*corrected, *place, *named, *overrides]
    config = load_config(parent.path / CONFIG, words).config
    if config.model != parent.config().model:
        raise UserError(
            "model: got other settings, allowed: the run's own, whose tokens are recorded"
        )
    journal = Journal.open(parent.journal, readonly=True)
    try:
        last = _last_step(journal, to_step)
        kept = sum(keep for _, keep in recorded_groups(journal, config, last))
        digest = journal.steps()[last - 1].digest
    finally:
        journal.close()
    steps = kept // config.train.groups_per_step
    if not steps:
        raise UserError(
            f"replay: got {kept} recorded groups that {config.algorithm.name} keeps, "
            f"allowed: at least train.groups_per_step = {config.train.groups_per_step}"
        )
    if any(word.startswith("train.steps=") for word in overrides) and config.train.steps:
        steps = min(steps, config.train.steps)
    settings = config.train.model_copy(update={"steps": steps, "episodes": None})
    config = config.model_copy(update={"train": settings})
    check_algorithm(config)
    folder = run_folder.create(config)
    origin = Origin(run=str(parent.path.resolve()), steps=last, digest=digest)
    (folder.path / ORIGIN).write_text(json.dumps(asdict(origin), indent=1))
    return folder


def _unused_name(parent: RunFolder, algorithm: str | None) -> str:
    name = f"{parent.name}-{(algorithm or 'fork').split(':')[-1]}"
    taken, number = parent.path.with_name(name), 2
    while taken.exists():
        taken, number = parent.path.with_name(f"{name}-{number}"), number + 1
    return taken.name


def recorded_groups(journal: Journal, config: Config, last: int) -> Iterator[tuple[Group, bool]]:
    """Every trained group in the order of training, and whether this config's algorithm keeps it."""
    settings = resolve_settings(config.algorithm)
    for step in range(1, last + 1):
        for group in journal.batch(step).groups:
            yield group, keep_group(group.rollouts, settings)


async def train_fork(folder: RunFolder, note: Callable[[str], None]) -> int:
    """Train a fork, new or resumed, to its end; the number of steps. Cancelled: a checkpoint."""
    origin = folder.origin()
    assert origin is not None, "only a fork is trained from another journal"
    config = folder.config()
    assert config.train.steps is not None, "a fork is made with its number of steps"
    parent = RunFolder(Path(origin.run))
    if not parent.journal.is_file():
        raise UserError(f"fork of {origin.run}: got no journal there, allowed: the run it is of")
    note(f"fork of {parent.path}, steps 1 to {origin.steps}; nothing is generated")
    async with AsyncExitStack() as closing:
        source = Journal.open(parent.journal, readonly=True)
        closing.callback(source.close)
        own = Journal.open(folder.journal)
        closing.callback(own.close)
        trainer = await closing.enter_async_context(open_trainer(config, folder.logs))
        tracker = _tracker(folder, config, own)
        closing.callback(tracker.close)
        store = CheckpointStore(
            folder.checkpoints, config.checkpoint, report=tracker.note, before_rename=own.sync
        )
        closing.push_async_callback(store.settle)
        done = await _restore(trainer, store, own, source, tracker)
        batches = _batches(source, own, config, origin.steps, done)
        try:
            async for batch in batches:
                await _one_step(trainer, own, tracker, batch)
                if store.due(batch.step):
                    await store.begin(trainer)
        except asyncio.CancelledError:
            await trainer.request_stop()
            await save_at_stop(store, trainer, own)
            raise
        await store.save(trainer)
    return config.train.steps


async def _restore(
    trainer: TrainerPart, store: CheckpointStore, own: Journal, source: Journal, tracker: Fanout
) -> int:
    """Bring the trainer to the fork's last finished step; a new fork copies who published what."""
    if not own.query("SELECT 1 FROM weights LIMIT 1"):
        for kind, engine, version, digest in source.query(
            "SELECT kind, engine, version, digest FROM weights ORDER BY at"
        ):
            if kind == "published":
                own.record_published(version, digest)
            else:
                own.record_confirmed(engine, version, digest)
    checkpoint = newest_checkpoint(store, own, tracker.note)
    if checkpoint is not None:
        await trainer.load(str(checkpoint.path))
    done = own.last_committed_step()
    first = 1 if checkpoint is None else checkpoint.step + 1
    async for _ in redo(trainer, own, first, done, tracker.note):
        pass
    return done


async def _batches(
    source: Journal, own: Journal, config: Config, last: int, done: int
) -> AsyncIterator[Batch]:
    """The batches of the fork's steps after `done`, each journalled before it is given."""
    step, waiting = done + 1, list[Group]()
    pending = own.pending_step()
    if pending is not None:
        yield own.batch(pending)
        step = pending + 1
    known = dict(own.query("SELECT group_id, state FROM groups"))
    for group, keep in recorded_groups(source, config, last):
        if step > (config.train.steps or 0):
            return
        state = known.get(group.group_id)
        if state in ("taken", "trained", "dropped"):
            continue
        if state is None:
            own.drawn(group)
        if not keep:
            await own.filtered(group)
            continue
        if state != "buffered":
            await own.landed(group)
        waiting.append(group)
        if len(waiting) == config.train.groups_per_step:
            await own.begin_step(step, waiting)
            yield Batch(step=step, groups=tuple(waiting))
            step, waiting = step + 1, []


async def _one_step(trainer: TrainerPart, own: Journal, tracker: Fanout, batch: Batch) -> None:
    started = time.monotonic()
    report = await trainer.train(batch)
    times = {
        "policy_version": float(report.policy_version),
        "tokens/generated": 0.0,
        "time/step_s": time.monotonic() - started,
        "time/consumer_wait_s": 0.0,
        "time/producer_wait_s": 0.0,
    }
    report = replace(report, metrics={**report.metrics, **times})
    await own.commit_step(report)
    tracker.log_step(batch.step, report.metrics)


def _tracker(folder: RunFolder, config: Config, own: Journal) -> Fanout:
    reports = own.steps()
    if reports:
        restore_metrics(folder.metrics, reports)
    info = RunInfo(
        config=config,
        folder=folder.path,
        name=folder.name,
        total_steps=config.train.steps or 0,
        first_step=reports[-1].step if reports else 0,
        live=lambda: "training on recorded rollouts",
    )
    return Fanout.from_info(info)
