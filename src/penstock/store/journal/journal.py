"""The journal as a run and its recovery use it.

A group is durable (`await landed()`) before it can be taken, a batch (`await begin_step()`) before the
trainer sees it, a step (`await commit_step()`) before its weights are published. Other records are
queued and written in order. A query sees every record that was submitted before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.errors import JournalDamaged, RunError
from penstock.files import free_name
from penstock.store.journal import records
from penstock.store.journal.calls import (
    CallMade,
    ToolBegun,
    ToolEnded,
    ToolResult,
    read_calls,
    select_calls,
)
from penstock.store.journal.codec import (
    CHECKED,
    damaged_calls,
    damaged_payloads,
    damaged_rows,
    decode_prompt,
    decode_rollout,
    rollout_key,
)
from penstock.store.journal.schema import named_errors, open_database
from penstock.store.journal.writer import OpenFiles, Writer
from penstock.types import Arithmetic, Batch, Group, ModelCall, Prompt, Rollout, Status, StepReport
from penstock.waits import WaitInOrder, WaitKind, Waits

_STEPS_PRUNED_AT_ONCE = 16
_INTERRUPTED = (
    "group_id IN (SELECT group_id FROM groups WHERE state = 'in_flight'"
    " OR (state = 'buffered' AND status = 'aborted'))"
)


@dataclass(slots=True, frozen=True, kw_only=True)
class InFlightRecord:
    """A group that was being generated when the journal ended."""

    group_id: str
    task: str
    cursor: int
    prompt: Prompt
    tries: int  # tries at the time the group was issued
    group: Group | None  # with the tokens of an earlier try; None: nothing was generated yet


@dataclass(slots=True, frozen=True, kw_only=True)
class Unfinished:
    """Every group that was drawn and is neither taken nor dropped."""

    buffered: list[Group]
    in_flight: list[InFlightRecord]


class Journal:
    """Consumes records of the run, makes them durable, and answers queries about them."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        brief: bool = False,
        threaded: bool = True,
        waits: Waits | None = None,
    ) -> None:
        """readonly: reads a live run's journal. waits: where the waits for the disk are opened."""
        self.path = path
        self._waits = waits or Waits()
        self._landings = WaitInOrder(self._waits, "journal", WaitKind.SEND, responder="journal")
        self._writer: Writer | None = None
        self._submit: Callable[[records.Record], None] = self._refuse
        self._durable: Callable[[], asyncio.Future[None]] = self._refuse
        if not readonly:
            self._writer = Writer(open_database(path), path, threaded=threaded)
            self._submit, self._durable = self._writer.submit, self._writer.durable
        self._reader = open_database(path, readonly=True, brief=brief)
        self._files = None if readonly else OpenFiles(path)
        self._taken_away: RunError | None = None  # once the files are not where they were

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        readonly: bool = False,
        threaded: bool = True,
        waits: Waits | None = None,
    ) -> Journal:
        """Open the journal in that file, creating it if needed."""
        return cls(Path(path), readonly=readonly, threaded=threaded, waits=waits)

    @classmethod
    def look(cls, path: str | Path) -> Journal:
        """Open the journal for a moment, also that of a live run; writes no file beside it."""
        return cls(Path(path), readonly=True, brief=True)

    # -- the life of a group ---------------------------------------------------------------------

    def drawn(self, group: Group) -> None:
        self._submit(
            records.Drawn(time.time(), group.group_id, group.task, group.cursor, group.prompt)
        )

    def landed(
        self, group: Group, place: str = "buffered", drop_reason: str | None = None
    ) -> asyncio.Future[None]:
        """Record that the group came back and goes to the buffer; durable when the future is done.

        A future, not a coroutine: many groups can land without an asyncio task for each.
        """
        self._submit(records.Landed(time.time(), group, place, drop_reason))
        self._landings.asked(group.group_id, self._durable)
        return self._durable()

    def retried(self, group: Group, reason: str) -> None:
        """Record that the group is issued again, with its present `tries` and partial responses."""
        self._move(group, "retried", "in_flight", Status.INIT, reason)

    def expired(self, group: Group) -> None:
        """Record that a buffered group is too old; it stays in the buffer to be generated again."""
        self._move(group, "expired", "buffered", Status.EXPIRED, "older than the staleness bound")

    def filtered(self, group: Group) -> asyncio.Future[None]:
        """Record that a filter refused a finished group; its payload is kept for inspection."""
        return self.landed(group, "dropped", "filtered")

    def failed(self, group: Group) -> asyncio.Future[None]:
        """Record a failed attempt; the group stays in flight and keeps its finished rollouts."""
        return self.landed(group, "in_flight")

    def dropped(self, group: Group, reason: str, *, detail: str = "") -> None:
        """Record that the group ends untrained. `reason` is one word to count by; `detail` explains it."""
        self._move(group, "dropped", "dropped", Status.ARCHIVED, detail or reason, reason)

    def _move(
        self,
        group: Group,
        kind: str,
        place: str,
        status: Status,
        reason: str,
        drop_reason: str | None = None,
    ) -> None:
        self._submit(
            records.Moved(
                time.time(),
                group.group_id,
                kind,
                place,
                status.value,
                group.tries,
                reason,
                drop_reason,
            )
        )

    # -- steps and weights -----------------------------------------------------------------------

    async def begin_step(self, step: int, groups: Sequence[Group]) -> None:
        """Record the batch of a step, in order; durable when this returns."""
        record = records.StepBegun(time.time(), step, [group.group_id for group in groups])
        await self._write_step(record, f"batch of step {step}")

    async def commit_step(self, report: StepReport) -> None:
        """Record what the step did; durable when this returns."""
        record = records.StepCommitted(time.time(), report)
        await self._write_step(record, f"step {report.step}")

    async def redo_step(self, report: StepReport) -> None:
        """Record that a committed step was trained again and gave other bits."""
        record = records.StepRedone(time.time(), report)
        await self._write_step(record, f"step {report.step}, redone")

    async def _write_step(self, record: records.Record, detail: str) -> None:
        self._submit(record)
        with self._waits.wait("loop", WaitKind.JOURNAL, detail, responder="journal"):
            await self._durable()
        self.check_place()

    def record_published(self, version: int, digest: str) -> None:
        self._submit(records.WeightsSeen(time.time(), "published", None, version, digest))

    def record_confirmed(self, engine: str, version: int, digest: str) -> None:
        self._submit(records.WeightsSeen(time.time(), "confirmed", engine, version, digest))

    def record_identity(self, values: Mapping[str, str]) -> None:
        """Record facts that identify the run (data, config, code); a name's newer value replaces the old."""
        self._submit(records.Identified(dict(values)))

    async def record_call(self, rollout: Rollout, call: ModelCall) -> None:
        """Record a model call of an agent's rollout; durable when this returns."""
        record = CallMade(time.time(), rollout.rollout_id, rollout.seed, call)
        await self._record_of_agent(rollout, record)

    async def begin_tool(self, rollout: Rollout, call_id: str, name: str) -> None:
        """Record that a tool is about to be called; durable when this returns."""
        record = ToolBegun(time.time(), rollout.rollout_id, rollout.seed, call_id, name)
        await self._record_of_agent(rollout, record)

    async def end_tool(self, rollout: Rollout, call_id: str, outcome: str, result: str) -> None:
        """Record the end of a tool call (done | failed | unknown); durable when this returns."""
        record = ToolEnded(time.time(), rollout.rollout_id, rollout.seed, call_id, outcome, result)
        await self._record_of_agent(rollout, record)

    async def _record_of_agent(self, rollout: Rollout, record: records.Record) -> None:
        self._submit(record)
        with self._waits.wait("journal", WaitKind.SEND, rollout.rollout_id, responder="journal"):
            await self.flush()

    def prune_payloads(self, last_step: int, *, keep_text: bool) -> None:
        """Remove the tokens of steps up to `last_step`, some steps per commit; safe in any thread."""
        with closing(open_database(self.path, readonly=True)) as database:
            select = "SELECT step FROM steps WHERE committed AND pruned_at IS NULL AND step <= ?"
            steps = [step for (step,) in database.execute(f"{select} ORDER BY step", (last_step,))]
        for number, step in enumerate(steps, start=1):
            self._submit(records.StepPruned(time.time(), step, keep_text))
            if number % _STEPS_PRUNED_AT_ONCE == 0 or number == len(steps):
                self._wait_durable()

    def flush(self) -> asyncio.Future[None]:
        """A future that is done when every record submitted so far is durable."""
        return self._durable()

    def sync(self) -> None:
        """Wait until every record submitted so far would also survive the death of the machine.

        After a fault of the disk nothing more is written: a later sync would say what it cannot know.
        """
        if self._writer is None or self._files is None:
            return
        self._writer.wait_durable()
        try:
            self._files.sync()
        except RunError as error:
            self._writer.fail(error)
            raise
        self.check_place()

    def check_place(self) -> None:
        """Raise if the files were removed, replaced or moved under the run; save what would be lost."""
        if self._writer is None or self._files is None:
            return
        if self._taken_away is None and (what := self._files.taken_away()):
            saved = free_name(
                self.path.parent.with_name(f"{self.path.parent.name}-journal-rescued.db")
            )
            self._taken_away = RunError(self._files.way_on(what, saved))
            self._writer.fail(self._taken_away)  # first: no later record is said to be durable
            if what != "moved":
                self.copy_to(saved)
        if self._taken_away is not None:
            raise self._taken_away

    def close(self) -> None:
        """Write the queued records and close; raise what stopped the writer, or a loss of the files."""
        with contextlib.ExitStack() as closing:
            if self._files is not None:
                closing.callback(self._files.close)
            if self._writer is not None:
                closing.callback(self._writer.close)
            closing.callback(self._reader.close)
            self.check_place()

    def _refuse(self, record: records.Record | None = None) -> NoReturn:
        raise RunError(f"journal {self.path}: it was opened read-only")

    def _wait_durable(self) -> None:
        """Wait until every record submitted so far is committed; a read-only journal has none."""
        if self._writer is not None:
            self._writer.wait_durable()

    # -- queries ---------------------------------------------------------------------------------

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        """The rows of a SELECT over the public views."""
        self._wait_durable()
        return self._select(sql, parameters)

    def _select(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        with named_errors(self.path, "read"):
            return self._reader.execute(sql, parameters).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all queries inside see the same moment of a live run."""
        self._wait_durable()
        self._select("BEGIN")
        try:
            self._select("SELECT 1 FROM sqlite_master LIMIT 1")  # the first read fixes the moment
            yield
        finally:
            self._select("ROLLBACK")

    def damaged(self) -> list[str]:
        """The names of rows and payloads that are not what was written; reads all of them."""
        self._wait_durable()
        with named_errors(self.path, "read"):
            payloads = (*damaged_payloads(self._reader), *damaged_calls(self._reader))
            rows = (damaged_rows(self._reader, table) for table in CHECKED)
            return list(dict.fromkeys([*itertools.chain.from_iterable(rows), *payloads]))

    def check_file(self, table: str | None = None) -> None:
        """Raise JournalDamaged if the structure of the file, or of one table, is damaged; reads all of it."""
        for (finding,) in self.query(f"PRAGMA integrity_check({table or 1})"):
            if finding != "ok":
                words = " ".join(finding.split())
                raise JournalDamaged(f"journal {self.path}: damaged: {words}")

    def check_for_resume(self) -> None:
        """Raise JournalDamaged if a row that a resume reads is damaged; reads no rollout, event or call.

        Rollouts and calls are checked as they are read. The audit checks all of them.
        """
        tables = [table for table in CHECKED if table not in ("event_rows", "call_rows")]
        for table in tables:
            self.check_file(table)
        rows = (damaged_rows(self._reader, table) for table in tables)
        with named_errors(self.path, "read"):
            first = next(itertools.chain.from_iterable(rows), "")
        if first:
            raise JournalDamaged(f"journal {self.path}: damaged: {first} is not what was written")

    def read_identity(self) -> dict[str, str]:
        """The facts that identify the run, by name; empty in a journal that has none."""
        return dict(self.query("SELECT name, value FROM identity ORDER BY name"))

    def arithmetic_since(self, step: int) -> list[Arithmetic]:
        """Every arithmetic with which that step or a later one was trained, in order."""
        return records.arithmetic_since(self.read_identity(), step)

    def copy_to(self, path: Path) -> None:
        """Copy the journal as it is at one moment, also while a run writes to it."""
        with named_errors(self.path, "be copied"), closing(sqlite3.connect(path)) as target:
            self._reader.backup(target)

    def last_committed_step(self) -> int:
        """The number of the last committed step; 0 before the first."""
        return self.query("SELECT MAX(step) FROM steps WHERE committed")[0][0] or 0

    def pending_step(self) -> int | None:
        """The step whose batch is journalled but whose update is not, if there is one."""
        return self.query("SELECT MIN(step) FROM steps WHERE NOT committed")[0][0]

    def steps(self, first: int = 1, last: int | None = None) -> list[StepReport]:
        """The reports of the committed steps from `first` to `last` (None: the newest), in order."""
        rows = self.query(
            "SELECT step, policy_version, digest, metrics, trained FROM steps WHERE committed"
            " AND step >= ? AND (? IS NULL OR step <= ?) ORDER BY step",
            (first, last, last),
        )
        return [
            StepReport(
                step=step,
                policy_version=version,
                digest=digest,
                metrics=json.loads(metrics),
                trained=tuple(map(tuple, json.loads(trained or "[]"))),
            )
            for step, version, digest, metrics, trained in rows
        ]

    def pruned_to(self) -> int:
        """The last step whose tokens were removed; 0: none."""
        return self.query("SELECT MAX(step) FROM steps WHERE pruned_at IS NOT NULL")[0][0] or 0

    def batch(self, step: int) -> Batch:
        """The groups of a begun step in their order, with all their tokens."""
        rows = self.query(
            "SELECT pruned_at FROM steps WHERE step = ? AND begun_at IS NOT NULL", (step,)
        )
        if not rows:
            raise RunError(f"journal {self.path}: has no batch of step {step}")
        if rows[0][0] is not None:
            raise RunError(
                f"journal {self.path}: the tokens of step {step} were removed "
                f"(journal.keep_payloads); only a checkpoint of step {step} or later leads past it"
            )
        groups = self._groups("step = ? ORDER BY position", (step,))
        return Batch(step=step, groups=tuple(groups))

    def unfinished_groups(self) -> Unfinished:
        """The buffered groups (with tokens) and those in flight, in cursor order, for a resume."""
        in_flight = self._groups(
            "state = 'in_flight' AND num_tokens IS NOT NULL ORDER BY task, cursor"
        )
        kept = {group.group_id: group for group in in_flight}
        rows = self.query(
            "SELECT group_id, task, cursor, prompt_id, tries FROM groups WHERE state = 'in_flight'"
            " ORDER BY task, cursor"
        )
        return Unfinished(
            buffered=self._groups("state = 'buffered' ORDER BY task, cursor"),
            in_flight=[
                InFlightRecord(
                    group_id=group_id,
                    task=task,
                    cursor=cursor,
                    prompt=self._prompt(task, prompt_id),
                    tries=tries,
                    group=kept.get(group_id),
                )
                for group_id, task, cursor, prompt_id, tries in rows
            ],
        )

    def calls(self, group_id: str | None = None) -> dict[tuple[str, int], list[ModelCall]]:
        """The calls of a group's rollouts by (rollout, seed), those of every try.

        None: the calls of all rollouts that a resume continues.
        """
        where, values = _of(group_id)
        return read_calls(self.query(select_calls(where), values))

    def tools(self, group_id: str | None = None) -> dict[tuple[str, int], list[ToolResult]]:
        """The tool calls of the same rollouts as `calls`."""
        where, values = _of(group_id)
        results: dict[tuple[str, int], list[ToolResult]] = {}
        for rollout_id, seed, call_id, name, outcome, result in self.query(
            "SELECT rollout_id, seed, call_id, name, outcome, result FROM tools"
            f" WHERE {where} ORDER BY begun_at",
            values,
        ):
            tool = ToolResult(call_id=call_id, name=name, outcome=outcome, result=result)
            results.setdefault((rollout_id, seed), []).append(tool)
        return results

    def cursors(self) -> dict[str, int]:
        """The cursor of each task after its last drawn group."""
        return dict(self.query("SELECT task, MAX(cursor) + 1 FROM groups GROUP BY task"))

    def outcomes(self, task: str, after: int, upto: int) -> list[tuple[int, str, float, int]]:
        """(cursor, prompt, mean reward, rollouts) of the groups that were scored in these steps.

        A step ends with its commit. Groups come in the order of the steps `after` + 1 to `upto`, then of their
        cursors; filtered ones too, and a group that was generated twice has two outcomes.
        """
        ends = self.query(
            "SELECT num_events FROM steps WHERE committed AND step BETWEEN ? AND ? ORDER BY step",
            (after, upto),
        )
        bounds = [0] * (after == 0) + [num_events for (num_events,) in ends]
        outcomes = []
        for first, last in itertools.pairwise(bounds):
            outcomes += self._select(
                "SELECT cursor, prompt_id, event_rows.reward, num_rollouts FROM event_rows"
                " JOIN group_rows USING(group_id) WHERE number > ? AND number <= ? AND task = ?"
                " AND event_rows.status IN ('completed', 'filtered')"
                " AND event_rows.reward IS NOT NULL ORDER BY cursor, number",
                (first, last, task),
            )
        return outcomes

    def taken(self) -> dict[str, int]:
        """For each task, the number of groups that some step took, committed or not."""
        return dict(
            self.query(
                "SELECT task, COUNT(*) FROM groups WHERE state IN ('taken', 'trained') GROUP BY task"
            )
        )

    def counts(self) -> dict[str, dict[str, int]]:
        """For each task, the groups by state (in_flight, buffered, taken, trained, dropped), and drawn."""
        by_state = self._count_by("state", "1")
        return {task: {"drawn": sum(row.values()), **row} for task, row in by_state.items()}

    def drops(self) -> dict[str, dict[str, int]]:
        """For each task, the dropped groups by reason."""
        return self._count_by("drop_reason", "state = 'dropped'")

    def _count_by(self, column: str, where: str) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for task, value, number in self.query(
            f"SELECT task, {column}, COUNT(*) FROM groups WHERE {where} GROUP BY 1, 2"
        ):
            counts.setdefault(task, {})[value] = number
        return counts

    def group(self, group_id: str) -> Group:
        """One group with the payload of its last landing; pruned log-probs are NaN."""
        groups = self._groups("group_id = ?", (group_id,))
        if not groups:
            raise RunError(f"journal {self.path}: has no payload of group {group_id}")
        return groups[0]

    def _groups(self, where: str, parameters: Sequence[object] = ()) -> list[Group]:
        rows = self.query(
            "SELECT group_id, task, cursor, prompt_id, tries, error, state, status, num_rollouts,"
            f" num_tokens FROM groups WHERE {where}",
            parameters,
        )
        prompts: dict[tuple[str, str], Prompt] = {}
        groups = []
        for group_id, task, cursor, prompt_id, tries, error, state, status, *landed in rows:
            key = (task, prompt_id)
            if key not in prompts:
                prompts[key] = self._prompt(task, prompt_id)
            rollouts = [
                decode_rollout(
                    data,
                    rollout_id,
                    prompts[key],
                    text=text,
                    key=rollout_key(group_id, number, rollout_id),
                )
                for number, rollout_id, text, data in self._select(
                    "SELECT number, rollout_id, text, data FROM rollout_rows"
                    " WHERE group_id = ? ORDER BY number",
                    (group_id,),
                )
            ]
            if not rollouts and landed[1] is None:
                continue  # nothing of it was ever generated
            stored = len(rollouts), sum(len(rollout.response_ids) for rollout in rollouts)
            if stored != tuple(landed):
                raise JournalDamaged(
                    f"journal {self.path}: damaged: group {group_id} has {stored[0]} rollouts with "
                    f"{stored[1]} tokens, but {landed[0]} with {landed[1]} tokens landed"
                )
            group = Group(
                group_id=group_id,
                task=task,
                cursor=cursor,
                prompt=prompts[key],
                rollouts=rollouts,
                tries=tries,
                error=error or "",
            )
            if state == "buffered" and status == Status.EXPIRED:
                group.move_to(Status.EXPIRED)  # it expired after its payload was written
            groups.append(group)
        return groups

    def _prompt(self, task: str, prompt_id: str) -> Prompt:
        rows = self._select(
            "SELECT data FROM prompt_rows WHERE task = ? AND prompt_id = ?", (task, prompt_id)
        )
        if not rows:
            raise JournalDamaged(f"journal {self.path}: damaged: it has no prompt {prompt_id}")
        return decode_prompt(rows[0][0])


def _of(group_id: str | None) -> tuple[str, Sequence[object]]:
    """The condition on a group's rows, or on those of every rollout that a resume continues."""
    return (_INTERRUPTED, ()) if group_id is None else ("group_id = ?", (group_id,))
