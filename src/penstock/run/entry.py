"""The way into a run, for the command line and for Python: processes first, then checks, then the session.

A worker imports torch and transformers for seconds, in which the driver imports the session, checks the data and
opens the journal. What costs nothing to check is checked before a process starts, and so is the trust in a run
folder. Import nothing heavy here: it would delay the start of the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.changes import Change, allowed_changes
from penstock.config.source import with_overrides
from penstock.errors import PenstockError, RunError, UserError
from penstock.files import pasted, say, sweep_scratch
from penstock.store import trust
from penstock.workers.processes.process_worker import early_workers

if TYPE_CHECKING:
    from penstock.store.run_folder import RunFolder


def train(config: Config, own_data: Sequence[Path] = ()) -> RunFolder:
    """Check the config and train it to the end; the run keeps the files `own_data` in its folder."""
    with early_workers(config):
        from penstock.data.chat import ask_hub
        from penstock.run import preflight
        from penstock.run.fit import fitted, say_fit
        from penstock.run.session import outside_a_loop, train_new

        preflight.check(config)
        ask_hub(config.model.path, "model.path")  # before a worker starts
        fit = fitted(config)
        say_fit(fit)

        def begin() -> RunFolder:
            preflight.try_rewards(fit.config)
            return train_new(fit.config, own_data)

        return outside_a_loop(begin, saves=True)


def resume(
    folder: RunFolder,
    overrides: Sequence[str] = (),
    *,
    accept_changes: bool = False,
    trusted: bool = False,
) -> None:
    """Continue a run, with the setting changes that are allowed.

    `accept_changes`: also if its data, tokenizer or chat template have other content than before.
    `trusted`: also if another user made it, whose code it may execute.
    """
    with folder.lock():
        try:
            config, changes = _settings(folder, overrides, trusted)
        except Exception:  # a mistake, or whatever a damaged record of the settings leads to
            from penstock.run.recover import check_journal

            check_journal(folder)  # raises if the journal is damaged, and says what to do
            raise
        sweep_scratch()  # also if nothing is left to do: its last driver may have been killed
        if not overrides and (ending := _already_ended(folder, config)):
            say(ending, error=True)
            return
        is_fork = folder.origin() is not None  # its trainer needs no process
        with nullcontext() if is_fork else early_workers(config):
            from penstock.run.session import outside_a_loop, resume_run

            outside_a_loop(
                lambda: resume_run(folder, config, changes, accept_changes=accept_changes),
                saves=True,
            )


def _settings(
    folder: RunFolder, overrides: Sequence[str], trusted: bool
) -> tuple[Config, list[Change]]:
    """The settings that a run continues with, and what of them is new."""
    from penstock.data.identity import absolute_paths
    from penstock.store.run_folder import FORK_OF, ORIGIN

    if folder.origin() is not None and overrides:
        raise UserError(f"resume of a fork: got {overrides[0]}, allowed: no changes; fork again")
    record = folder.record()
    if folder.origin() is None and FORK_OF in record:  # else it would begin to generate
        raise RunError(
            f"fork {folder.path}: its {ORIGIN} is missing; fork again: penstock replay {pasted(record[FORK_OF])}"
        )
    eras = [era.config for era in folder.eras(record)]
    trust.check(folder.path, eras, trust=trusted)
    before = absolute_paths(eras[-1])
    config = absolute_paths(with_overrides(before, overrides))
    changes = allowed_changes(before, config, pinned=record)
    if changes:
        from penstock.training.algo.method import check_algorithm

        check_algorithm(config)
    return config, changes


def _saved_step(folder: RunFolder) -> int:
    """The last step of a run, if its model is saved; else 0."""
    from penstock.store.checkpoint import CheckpointStore
    from penstock.store.journal import Journal

    model, step = CheckpointStore(folder.checkpoints).newest_model(), 0
    with suppress(PenstockError):  # a resume tells what is wrong and what to do
        with closing(Journal.look(folder.journal)) as journal:
            step = journal.last_committed_step()
    return step if model is not None and model.parent.name == f"step-{step}" else 0


def _already_ended(folder: RunFolder, config: Config) -> str:
    """How a run ended that has nothing left to do, and how it goes on; empty for any other."""
    from penstock.data.identity import TOTAL_STEPS
    from penstock.rollout.evaluation.evaluate import read_summaries

    saved = _saved_step(folder)
    if config.train.stop_when and saved:
        from penstock.inspection.findings import find
        from penstock.inspection.findings.observed import read_observed
        from penstock.run.stop_rules import StopRules

        observed = read_observed(folder)
        last = observed.rows[-1] if observed.rows else {}
        rules = StopRules(config.train.stop_when, folder.evaluations)
        if rule := rules.met(last, find(observed)):
            ending, change = f"was ended by train.stop_when ({rule})", "'train.stop_when=[]'"
            return f"{folder.path} {ending}; go on with: penstock resume {pasted(folder.path)} {change}"
    total = config.train.steps or int(folder.record().get(TOTAL_STEPS) or 0)
    rows = read_summaries(folder.evaluations)
    evaluated = {row["task"] for row in rows if row["step"] == total}
    if not total or saved < total or not config.eval.tasks.keys() <= evaluated:
        return ""
    return (
        f"{folder.path} is finished ({total} of {total} steps); go on with: "
        f"penstock resume {pasted(folder.path)} train.steps={2 * total}"
    )
