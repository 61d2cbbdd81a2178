"""`penstock audit RUN`: check every law that can be proven from the journal. Changes nothing.

Conservation per task, a reason for every drop, batches that match their groups, no group trained twice,
the staleness bound by each rollout's oldest token, nothing missing, weights confirmed with the committed
digest, tokens as the trainer recorded them (`laws.py`). All of it sees one moment of a live run. The weights that checkpoints name must be those of their steps. Warns where trained responses differ in length from drawn ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import files
from penstock.config.doubts import unrepeatable_samples
from penstock.errors import JournalDamaged
from penstock.inspection.laws import (
    EraBounds,
    chain_faults,
    read_contents,
    redone_versions,
    row_faults,
    staleness,
)
from penstock.inspection.track.logs import last_logged_step
from penstock.rollout import calculate_stale_threshold
from penstock.store.checkpoint import read_checkpoints
from penstock.store.journal import Journal
from penstock.store.run_folder import LOST_AFTER, Era, RunFolder

_BIAS_LIMIT = 0.05  # largest relative difference of trained and drawn mean length without a warning
_STRAGGLER_STEPS = 200  # steps of its task that may leave a group in flight behind
_MOST_NAMED = 50  # most damaged records that are named
_ENOUGH = 50  # fewest groups for which a difference is reported


@dataclass(slots=True, kw_only=True)
class TaskAudit:
    """Counts and means of one task."""

    drawn: int = 0
    trained: int = 0
    buffered: int = 0
    in_flight: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    length_drawn: float | None = None  # mean response tokens of a group when it first completed
    length_trained: float | None = None
    reward_drawn: float | None = None
    reward_trained: float | None = None

    @property
    def balanced(self) -> bool:
        accounted = self.trained + self.buffered + self.in_flight + sum(self.dropped.values())
        return self.drawn == accounted


@dataclass(slots=True, kw_only=True)
class Audit:
    """The result of an audit; `faults` is empty when every law holds."""

    tasks: dict[str, TaskAudit]
    max_staleness_trained: int
    max_staleness_allowed: int
    committed_steps: int
    faults: list[str]
    warnings: list[str]
    proved: list[str] = field(default_factory=list)  # of agents' rollouts

    @property
    def balanced(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        tasks, counted = self.tasks.values(), ("drawn", "trained", "buffered", "in_flight")
        dropped: Counter[str] = sum((Counter(task.dropped) for task in tasks), Counter())
        totals = {name: sum(getattr(task, name) for task in tasks) for name in counted}
        return {**totals, "dropped": dropped, "balanced": self.balanced, **asdict(self)}


def audit_run(
    folder: RunFolder,
    *,
    as_json: bool = False,
    deep: bool = False,
    console: Console | None = None,
) -> int:
    """Audit a run and print the result; return 0 if every law holds, else 1."""
    result = take_audit(folder, deep=deep)
    console = console or files.console()
    if as_json:
        console.print_json(json.dumps(result.as_json()), ensure_ascii=True)
    else:
        _print(result, console)
    return 0 if result.balanced else 1


def take_audit(folder: RunFolder, *, deep: bool = False) -> Audit:
    """Audit a run; return what was found. `deep`: every file of its checkpoints is read too."""
    origin = folder.origin()
    eras = [_era_bounds(era) for era in folder.eras()]
    # read before the journal: the run may be under way
    last_logged = last_logged_step(folder.metrics)
    with closing(Journal.open(folder.journal, readonly=True)) as journal:
        journal.check_file()
        result = audit_journal(journal, eras, recorded=origin is not None)
        # weights that are not those of their step; with `deep` also files that changed
        digests = dict(journal.query("SELECT step, digest FROM steps WHERE committed"))
        for checkpoint in read_checkpoints(folder.checkpoints, whole=deep):
            if isinstance(checkpoint, str):
                result.faults.append(checkpoint)
            elif digests.get(checkpoint.step, checkpoint.digest) != checkpoint.digest:
                result.faults.append(
                    f"checkpoint {checkpoint.path.name} has weights with digest {checkpoint.digest}, the "
                    f"journal has {digests[checkpoint.step]} for that step"
                )
    if last_logged > result.committed_steps:
        result.faults.append(
            f"the journal ends at step {result.committed_steps}, but {folder.metrics.name} has "
            f"step {last_logged}: its end was lost"
        )
    if origin is not None:
        result.warnings.append(
            f"this run is a fork: its rollouts and weight versions are those of {origin.run}"
        )
    if origin is None:
        result.warnings += unrepeatable_samples(folder.config())
    for name, value in folder.record().items():
        if name.startswith(LOST_AFTER):
            result.warnings.append(f"the end of the journal was {name}: {value}")
        if name.startswith("accepted after step"):
            result.warnings.append(f"{name}: {value}")
    return result


def _era_bounds(era: Era) -> EraBounds:
    config, allowed, longest_wait = era.config, {}, {}
    for name in config.tasks:
        produce = config.task_produce(name)
        threshold = calculate_stale_threshold(produce.staleness_bound, config.sync.every_steps)
        allowed[name] = threshold - 1
        # Steps wait for a group in flight before it is too old. With oversampling they leave it behind; an
        # expired group may wait for its tail batch.
        slack = _STRAGGLER_STEPS if produce.over_sample_threshold else 2
        longest_wait[name] = (produce.max_tries + 1) * threshold + slack
    chosen = frozenset(name for name, task in config.tasks.items() if task.sampler != "shuffle")
    return EraBounds(era.last_step, allowed, longest_wait, config.seed, chosen)


def audit_journal(journal: Journal, eras: Sequence[EraBounds], *, recorded: bool = False) -> Audit:
    """Audit a journal; hold each step to the bounds of the era it was trained in.

    `eras` are in order. `recorded`: a fork, whose groups were drawn by another run.
    """
    with journal.snapshot():
        damaged = journal.damaged()
        damage = [f"{what}: the record is not what was written" for what in damaged[:_MOST_NAMED]]
        if len(damaged) > _MOST_NAMED:
            more = len(damaged) - _MOST_NAMED
            damage.append(f"{more} further records are not what was written")
        try:
            return _account(journal, eras, recorded, damage)
        except (TypeError, ValueError, KeyError) as error:  # damage can change the type of a value
            if not damage:
                raise
            raise JournalDamaged(f"journal {journal.path}: damaged: {damage[0]}") from error


def _account(
    journal: Journal, eras: Sequence[EraBounds], recorded: bool, damage: list[str]
) -> Audit:
    drawn = journal.cursors()
    if recorded:  # the cursors belong to the run that drew the groups
        drawn = dict(journal.query("SELECT task, COUNT(*) FROM groups GROUP BY task"))
    tasks = {name: TaskAudit(drawn=number) for name, number in sorted(drawn.items(), key=str)}
    trained = journal.query(
        "SELECT substr(value, 1, instr(value, ':') - 1), COUNT(*) FROM steps, json_each(group_ids)"
        " WHERE committed GROUP BY 1"
    )
    for name, number in trained:
        tasks.setdefault(name, TaskAudit()).trained = number
    places = journal.query(
        "SELECT task, CASE state WHEN 'taken' THEN 'buffered' ELSE state END, COUNT(*) FROM groups"
        " WHERE state IN ('buffered', 'taken', 'in_flight') GROUP BY 1, 2"
    )
    for name, place, number in places:
        setattr(tasks[name], place, number)
    for name, drops in journal.drops().items():
        tasks[name].dropped = {str(reason): number for reason, number in drops.items()}
    first = journal.query(
        "SELECT task, AVG(seen.num_tokens), AVG(seen.reward) FROM"
        " (SELECT group_id, num_tokens, reward, MIN(at) FROM events"
        " WHERE kind IN ('landed', 'filtered') AND status IN ('completed', 'filtered')"
        " GROUP BY group_id) AS seen JOIN groups USING(group_id) GROUP BY task"
    )
    for name, length, reward in first:
        tasks[name].length_drawn, tasks[name].reward_drawn = length, reward
    trained = journal.query(
        "SELECT task, AVG(num_tokens), AVG(reward) FROM groups WHERE state = 'trained' GROUP BY task"
    )
    for name, length, reward in trained:
        tasks[name].length_trained, tasks[name].reward_trained = length, reward
    contents = read_contents(journal)
    unbalanced = [(name, task) for name, task in tasks.items() if not task.balanced]
    return Audit(
        tasks={str(name): task for name, task in tasks.items()},
        max_staleness_trained=max((value for _, _, value in staleness(journal)), default=0),
        max_staleness_allowed=max((n for era in eras for n in era.allowed.values()), default=0),
        committed_steps=journal.last_committed_step(),
        faults=[
            *(f"task {name}: does not balance: {task}" for name, task in unbalanced),
            *row_faults(journal, eras, recorded=recorded),
            *chain_faults(journal, recorded=recorded),
            *damage,
            *contents.faults,
        ],
        warnings=[
            *redone_versions(journal),
            *_doubtful_steps(journal),
            *(line for name, task in tasks.items() for line in _bias(name, task)),
        ],
        proved=contents.lines(),
    )


def _doubtful_steps(journal: Journal) -> Iterator[str]:
    """Yield a line about steps whose bits may not repeat, that have no record, or no tokens any more."""
    for arithmetic in journal.arithmetic_since(1):
        if arithmetic.doubt:
            yield f"the steps' bits may not repeat on {arithmetic.device}: {arithmetic.doubt}"
    ((count, first, last),) = journal.query(
        "SELECT COUNT(*), MIN(step), MAX(step) FROM steps WHERE committed AND trained IS NULL"
    )
    if count:
        yield (
            f"{count} of steps {first} to {last} have no record by the trainer of what it trained, so "
            "their rollouts cannot be compared with one"
        )
    if pruned := journal.pruned_to():
        yield (
            f"steps 1 to {pruned}: their tokens were removed (journal.keep_payloads), so they are not "
            "compared with the trainer's record; replay begins at the oldest checkpoint, forks cannot begin"
        )


def _bias(name: str, task: TaskAudit) -> Iterator[str]:
    if task.trained < _ENOUGH or not task.length_drawn or task.length_trained is None:
        return
    ratio = task.length_trained / task.length_drawn
    if abs(ratio - 1) > _BIAS_LIMIT:
        yield (
            f"task {name}: trained responses are {abs(ratio - 1):.0%} "
            f"{'shorter' if ratio < 1 else 'longer'} than drawn ones "
            f"({task.length_trained:.1f} against {task.length_drawn:.1f} tokens per group)"
        )


def _print(result: Audit, console: Console) -> None:
    counts = Table("task", "drawn", "trained", "buffered", "in flight", "dropped", "balance")
    means = Table("task", "mean tokens drawn", "trained", "mean reward drawn", "trained")
    for name, task in result.tasks.items():
        drops = ", ".join(f"{reason} {number}" for reason, number in sorted(task.dropped.items()))
        numbers = (task.drawn, task.trained, task.buffered, task.in_flight)
        counts.add_row(name, *map(str, numbers), drops or "0", "yes" if task.balanced else "NO")
        values = (task.length_drawn, task.length_trained, task.reward_drawn, task.reward_trained)
        means.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    console.print(counts)
    console.print(means)
    console.print(
        f"{files.count(result.committed_steps, 'step')} committed; largest staleness trained: "
        f"{result.max_staleness_trained}, allowed: {result.max_staleness_allowed}",
        highlight=False,
    )
    for line in result.proved:
        console.print(line, highlight=False, soft_wrap=True)
    for line in result.warnings:
        console.print(f"warning: {line}", highlight=False, soft_wrap=True)
    for line in result.faults:
        console.print(f"FAULT: {line}", highlight=False, soft_wrap=True)
    console.print("balanced" if result.balanced else "NOT balanced", highlight=False)
