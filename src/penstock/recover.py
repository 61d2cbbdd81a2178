"""Before the first step: weights that everybody agrees on, from the start or from a journal. Layer 7.

Recovery = newest valid checkpoint + redo of the journalled steps, with no generation. On a CPU each
redone step must give the digest that was journalled, bit for bit; a difference stops the run.
"""

from __future__ import annotations

from penstock.config import Config
from penstock.errors import DigestMismatch, UserError
from penstock.job import Job
from penstock.types import StepReport

CHANGEABLE = (
    "run.",
    "train.steps",
    "train.episodes",
    "train.lr",
    "eval.",
    "checkpoint.",
    "track.",
    "launch.",
    "engine.max_slots",
    "engine.max_tokens_in_flight",
    "watchdog.",
    "produce.",
    "tasks.",
)
REASON = "it would make the redone steps differ from the journalled ones"


def allowed_changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, as text; raises for one that must not change between parts."""
    old, new = _flat(before.model_dump()), _flat(after.model_dump())
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        if not key.startswith(CHANGEABLE):
            raise UserError(
                f"{key}: got {new.get(key)!r} for a run with {old.get(key)!r}, allowed: the same value; {REASON}"
            )
        changes.append(f"{key} {old.get(key)!r} -> {new.get(key)!r}")
    return changes


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


async def begin(job: Job) -> int:
    """A new run: engine and trainer must start from the same weights."""
    await _agree_on_weights(job)
    return 0


async def recover(job: Job) -> int:
    """Restore the trainer, redo what the journal has past the checkpoint, restore the producer."""
    checkpoint = job.checkpoints.newest()
    step = 0
    if checkpoint is not None:
        step, _ = await job.trainer.load(str(checkpoint.path))
    committed = job.journal.last_committed_step()
    if checkpoint is not None and step > committed:
        await job.journal.commit_step(
            StepReport(step=step, policy_version=step, digest=checkpoint.digest)
        )
    journalled = {report.step: report for report in job.journal.steps()}
    for redo in range(step + 1, committed + 1):
        job.tracker.note(f"redoing step {redo} of {committed} from the journal")
        report = await job.trainer.train(job.journal.batch(redo))
        _compare(report, journalled[redo].digest)
        step = redo
    await _agree_on_weights(job)
    await job.producer.restore(job.journal)
    return step


def _compare(report: StepReport, journalled: str) -> None:
    if report.digest != journalled:
        raise DigestMismatch(
            f"step {report.step}: redone weights have digest {report.digest}, the journal has {journalled}; "
            "nothing was changed on disk"
        )


async def _agree_on_weights(job: Job) -> None:
    """Give the engine the trainer's weights unless it holds exactly those."""
    version, digest = await job.trainer.identity()
    job.journal.record_published(version, digest)
    stats = await job.engine.stats()
    if (stats.policy_version, stats.digest) != (version, digest):
        handle = await job.trainer.publish()
        digest = await job.engine.update_weights(version, handle)
    job.journal.record_confirmed("engine", version, digest)
    job.producer.weights_updated(version)
