"""The journal: round trips, what is durable when, recovery queries, faults that do not hang."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.sampler import Sampler
from penstock.errors import RunError, UserError
from penstock.store.journal import Journal
from penstock.store.journal.codec import (
    check_sum,
    decode_prompt,
    decode_rollout,
    encode_prompt,
    encode_rollout,
)
from penstock.store.journal.schema import open_database
from penstock.types import (
    Choices,
    Group,
    Prompt,
    Rollout,
    Score,
    Status,
    StepReport,
    VersionSegment,
)
from stages.rollouts import finish_rollout, make_prompt, make_prompts


def assert_same(one: Group, two: Group) -> None:
    assert (one.group_id, one.task, one.cursor, one.tries, one.error) == (
        two.group_id,
        two.task,
        two.cursor,
        two.tries,
        two.error,
    )
    assert one.prompt.messages == two.prompt.messages
    assert (one.prompt.gt_answer, one.prompt.test_cases, one.prompt.extra) == (
        two.prompt.gt_answer,
        two.prompt.test_cases,
        two.prompt.extra,
    )
    for a, b in zip(one.rollouts, two.rollouts, strict=True):
        for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
            left, right = getattr(a, name), getattr(b, name)
            assert left.dtype == right.dtype
            assert np.array_equal(left, right), name
        for name in Rollout.__slots__:
            if name not in ("prompt_ids", "response_ids", "logprobs", "loss_mask", "prompt"):
                if name == "choices" and getattr(a, name) is not None:
                    for field in ("num_kept", "kept_ids", "experts"):
                        one, other = (getattr(x.choices, field) for x in (a, b))
                        assert one.dtype == other.dtype
                        assert np.array_equal(one, other)
                    continue
                assert getattr(a, name) == getattr(b, name), name


def some_choices(passes: int) -> Choices:
    counts = np.arange(passes, dtype=np.int32) % 3
    kept = [1000 * np.arange(1, count + 1) + 7 for count in counts]
    experts = (300 * np.arange(4 * passes) % 1000).astype(np.uint16).reshape(passes, 4)
    return Choices(counts, np.concatenate([[], *kept]).astype(np.int32), experts)


@st.composite
def rollouts(draw: st.DrawFn, rollout_id: str) -> Rollout:
    length = draw(st.integers(0, 9))
    cut = draw(st.integers(0, length))
    parts = [(1, cut), (3, length - cut)]
    passes = len(make_prompt().token_ids) + length - 1
    score = Score(
        draw(st.floats(allow_nan=False)), {"part": 0.1}, draw(st.sampled_from([None, True])), False
    )
    return Rollout(
        rollout_id=rollout_id,
        prompt_ids=make_prompt().token_ids,
        seed=draw(st.integers(0, 2**63 - 1)),
        response_ids=np.arange(length, dtype=np.int32),
        logprobs=np.linspace(-3, 0, length, dtype=np.float32),
        loss_mask=np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), bool),
        segments=tuple(VersionSegment(v, n) for v, n in parts if n),
        temperature=draw(st.floats(0.1, 2)),
        status=draw(st.sampled_from(list(Status))),
        finish_reason=draw(st.sampled_from(["", "stop", "abort"])),
        text=draw(st.text(max_size=5)),
        score=draw(st.sampled_from([None, score])),
        error=draw(st.text(max_size=5)),
        extra=draw(st.sampled_from([{}, {"turns": [1, 2], "note": "ä"}])),
        choices=draw(st.sampled_from([None, some_choices(passes)])),
        issued_version=draw(st.integers(0, 9)),
    )


def decoded(group: Group) -> Group:
    """The group as it comes back from the bytes of its prompt and rollouts."""
    prompt = decode_prompt(encode_prompt(group.prompt))
    members = [
        decode_rollout(
            encode_rollout(rollout, text=rollout.text, key="key"),
            rollout.rollout_id,
            prompt,
            text=rollout.text,
            key="key",
        )
        for rollout in group.rollouts
    ]
    return replace(group, prompt=prompt, rollouts=members)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_codec_gives_back_what_it_got(data: st.DataObject) -> None:
    group = Group(
        group_id="t:7",
        task="t",
        cursor=7,
        prompt=make_prompt(7),
        rollouts=[data.draw(rollouts(f"t:7.{n}")) for n in range(data.draw(st.integers(1, 3)))],
        tries=2,
        error="why",
    )
    read = decoded(group)
    assert_same(read, group)
    assert read.fingerprint() == group.fingerprint()


@pytest.mark.parametrize(
    "score",
    [
        Score(-0.0, {'a "quoted" term': 1e300, "none": float("-inf")}, True, False, 'why "so"\n'),
        Score(np.float32(0.1), {"whole": 3}, np.bool_(True), None, "\u2028 \udc80"),
        Score(1, {}, None, None, ""),
    ],
)
def test_the_tail_of_a_payload_is_the_json_of_its_values(score: Score) -> None:
    """A reader in another language parses it as JSON."""
    group = finished(0)
    group.rollouts[0].score = score
    read = decoded(group).rollouts[0].score
    expected = json.loads(json.dumps([score.value, score.parts], default=float))
    assert read is not None
    assert repr([read.value, read.parts]) == repr(expected)
    assert (read.format_ok, read.answer_ok, read.note) == (
        score.format_ok,
        score.answer_ok,
        score.note,
    )


IDS, ONES = np.arange(5, dtype=np.int32), np.ones(5, np.int32)


def test_the_fingerprint_covers_all_that_a_trainer_reads() -> None:
    changes: list[Callable[[Rollout], None]] = [
        lambda rollout: setattr(rollout, "rollout_id", "t:0.9"),
        lambda rollout: setattr(rollout, "prompt_ids", rollout.prompt_ids + 1),
        lambda rollout: setattr(rollout, "response_ids", rollout.response_ids + 1),
        lambda rollout: setattr(rollout, "logprobs", rollout.logprobs - 1),
        lambda rollout: setattr(rollout, "loss_mask", ~rollout.loss_mask),
        lambda rollout: setattr(rollout, "segments", (VersionSegment(5, 4),)),
        lambda rollout: setattr(rollout, "temperature", 0.5),
        lambda rollout: setattr(rollout, "finish_reason", "length"),
        lambda rollout: setattr(rollout, "min_tokens", 2),
        lambda rollout: setattr(rollout, "score", Score(0.25)),
        *(
            lambda rollout, value=value: setattr(rollout, "choices", Choices(*value))
            for value in (
                (ONES, IDS, ONES[:, None]),
                (ONES, IDS + 1, ONES[:, None]),
                (ONES, IDS, IDS[:, None]),
            )
        ),
    ]
    found = {finished(0).fingerprint(), finished(1).fingerprint()}
    for change in changes:
        group = finished(0)
        change(group.rollouts[1])
        found.add(group.fingerprint())
    shorter = finished(0)
    shorter.rollouts.pop()
    found.add(shorter.fingerprint())
    assert len(found) == len(changes) + 3


def test_a_newer_payload_format_is_refused() -> None:
    body = bytearray(encode_prompt(finished(0).prompt)[:-4])
    body[0] = 99
    with pytest.raises(RunError, match="format 99"):
        decode_prompt(bytes(body) + check_sum(bytes(body)))


def test_what_json_cannot_hold_is_a_clear_error() -> None:
    group = finished(0)
    group.rollouts[0].extra["bad"] = object()
    with pytest.raises(RunError, match="object"):
        decoded(group)
    group.rollouts[0].extra["bad"] = np.float32(1.5)
    assert decoded(group).rollouts[0].extra["bad"] == 1.5


SAMPLER = Sampler(make_prompts(4), task_name="t", prompt_repeat_k=2, seed=0)


def finished(cursor: int, version: int = 0) -> Group:
    group = SAMPLER.group_at(cursor)
    for rollout in group.rollouts:
        finish_rollout(rollout, version=version)
    group.tries = 1
    return group


async def land(journal: Journal, *groups: Group) -> None:
    for group in groups:
        journal.drawn(group)
        await journal.landed(group)


def report(step: int) -> StepReport:
    return StepReport(step=step, policy_version=step, digest=f"d{step}", metrics={"loss": 0.5})


@pytest.mark.parametrize("threaded", [True, False])
def test_a_run_can_be_read_back(tmp_path: Path, threaded: bool) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db", threaded=threaded)
        groups = [finished(cursor) for cursor in range(5)]
        await land(journal, *groups)
        in_flight = SAMPLER.group_at(5)
        journal.drawn(in_flight)
        await journal.begin_step(1, [groups[2], groups[0]])
        assert journal.pending_step() == 1
        await journal.commit_step(report(1))
        await journal.begin_step(2, [groups[1]])
        journal.record_published(1, "d1")
        journal.record_confirmed("engine", 1, "d1")
        journal.expired(groups[3])
        journal.dropped(groups[4], "failed", detail="why")
        assert journal.last_committed_step() == 1
        assert journal.pending_step() == 2
        assert journal.steps() == [report(1)]
        batch = journal.batch(1)
        assert_same(batch.groups[0], groups[2])
        assert_same(batch.groups[1], groups[0])
        assert [group.group_id for group in journal.batch(2).groups] == ["t:1"]
        unfinished = journal.unfinished_groups()
        assert [group.status for group in unfinished.buffered] == [Status.EXPIRED]
        assert [(r.cursor, r.tries, r.group) for r in unfinished.in_flight] == [(5, 0, None)]
        assert journal.cursors() == {"t": 6}
        assert journal.counts() == {
            "t": {"drawn": 6, "trained": 2, "taken": 1, "buffered": 1, "in_flight": 1, "dropped": 1}
        }
        assert journal.drops() == {"t": {"failed": 1}}
        journal.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [7, 8, 71, 137])
def test_many_groups_that_land_together_are_written_whole(tmp_path: Path, number: int) -> None:
    """Rows are inserted up to 64 in a statement."""

    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        groups = [finished(cursor) for cursor in range(number)]
        for group in groups:
            journal.drawn(group)
        await asyncio.gather(*map(journal.landed, groups))
        await journal.begin_step(1, groups)
        for written, read in zip(groups, journal.batch(1).groups, strict=True):
            assert_same(read, written)
        assert journal.query("SELECT COUNT(*) FROM events WHERE kind = 'landed'") == [(number,)]
        assert journal.damaged() == []
        journal.close()

    asyncio.run(main())


def test_what_was_awaited_survives_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def main() -> Journal:
        journal = Journal.open(path)
        await land(journal, finished(0))
        await journal.begin_step(1, [finished(0)])
        return journal  # never closed: as after kill -9

    abandoned = asyncio.run(main())
    again = Journal.open(path)
    assert [group.group_id for group in again.batch(1).groups] == ["t:0"]
    again.close()
    abandoned.close()


def test_views_can_be_read_by_any_sqlite_tool_during_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        await land(journal, finished(0, version=0), finished(1), finished(2))
        await journal.begin_step(1, [finished(2)])
        await journal.commit_step(report(1))
        await journal.begin_step(2, [finished(0)])
        await journal.commit_step(report(2))
        other = sqlite3.connect(tmp_path / "journal.db")
        assert other.execute(
            "SELECT state, staleness, num_tokens FROM groups WHERE group_id = 't:0'"
        ).fetchall() == [("trained", 1, 8)]
        assert other.execute(
            "SELECT DISTINCT text, reward, finish_reason FROM rollouts"
        ).fetchall() == [("text", 1.0, "stop")]
        assert other.execute("SELECT step, digest, committed FROM steps").fetchall() == [
            (1, "d1", 1),
            (2, "d2", 1),
        ]
        kinds = other.execute(
            "SELECT kind FROM events WHERE group_id = 't:0' ORDER BY at"
        ).fetchall()
        assert kinds == [("drawn",), ("landed",), ("trained",)]
        other.close()
        journal.close()

    asyncio.run(main())


def test_a_full_disk_is_one_clear_error_for_everybody_who_waits(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        pages = journal.query("PRAGMA page_count")[0][0]
        journal._writer._database.execute(f"PRAGMA max_page_count = {pages + 4}")
        results = await asyncio.gather(
            *(land(journal, finished(cursor)) for cursor in range(200)), return_exceptions=True
        )
        errors = [error for error in results if error is not None]
        assert errors
        assert all(isinstance(error, RunError) and "full" in str(error) for error in errors)
        with pytest.raises(RunError, match="full"):
            await journal.flush()
        with pytest.raises(RunError, match="full"):
            journal.close()

    asyncio.run(main())


def test_a_step_takes_only_what_is_completed_and_buffered(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db")
        await land(journal, finished(0))
        with pytest.raises(RunError, match="group t:1 is taken: got a group that was never drawn"):
            await journal.begin_step(1, [finished(0), finished(1)])
        with pytest.raises(RunError):
            journal.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [2, 99])
@pytest.mark.parametrize("readonly", [True, False])
def test_a_journal_of_another_format_is_refused(
    number: int, readonly: bool, tmp_path: Path
) -> None:
    database = open_database(tmp_path / "other.db")
    database.execute(f"PRAGMA user_version = {number}")
    database.close()
    with pytest.raises(RunError, match=f"got format {number}, allowed: 1; another version of Pens"):
        Journal.open(tmp_path / "other.db", readonly=readonly)


def test_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        Journal.open(tmp_path / "none.db", readonly=True)
    (tmp_path / "text.db").write_text("not a database, but long enough to look like one " * 20)
    with pytest.raises(RunError, match="damaged"):
        Journal.open(tmp_path / "text.db")
    journal = Journal.open(tmp_path / "good.db")
    journal.close()
    reading = Journal.open(tmp_path / "good.db", readonly=True)
    with pytest.raises(RunError, match="read-only"):
        reading.record_published(1, "d")
    reading.close()
    with pytest.raises(RunError, match="closed"):
        journal.record_published(1, "d")


LOOK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM groups").fetchone()[0])
connection.close()
"""


def test_a_look_from_another_process_after_a_sync_loses_nothing(tmp_path: Path) -> None:
    """The last connection to close deletes the write-ahead log; a reader must not be the last."""
    path = tmp_path / "journal.db"
    journal = Journal.open(path)

    def look() -> int:
        command = [sys.executable, "-c", LOOK, str(path)]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    sampler = Sampler(make_prompts(2), task_name="t", prompt_repeat_k=1, seed=0)
    journal.drawn(sampler.sample("t"))
    journal.sync()
    assert look() == 1
    assert path.with_name("journal.db-wal").exists()
    journal.drawn(sampler.sample("t"))
    journal.sync()
    assert look() == 2
    with closing(Journal.look(path)) as own:  # of the same process, while it writes
        assert len(own.query("SELECT 1 FROM groups")) == 2
    journal.drawn(sampler.sample("t"))
    journal.sync()
    assert look() == 3
    journal.close()
    assert look() == 3


def test_the_identity_of_a_run_is_kept_checked_and_replaced_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    assert journal.read_identity() == {}
    journal.record_identity({"data of train": "9 lines", "code": "1"})
    journal.record_identity({"code": "2"})
    journal.close()
    again = Journal.open(path, readonly=True)
    assert again.read_identity() == {"code": "2", "data of train": "9 lines"}
    again.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE identity_rows SET value = '8 lines' WHERE name = 'data of train'")
    again = Journal.open(path, readonly=True)
    assert again.damaged() == ["identity data of train"]
    again.close()


def test_a_writer_that_meets_an_unknown_fault_tells_everybody_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its thread ended and every waiter waited for ever."""

    async def main() -> None:
        journal = Journal.open(tmp_path / "journal.db")

        def fault(*args: Any) -> Any:
            raise MemoryError("no memory")

        monkeypatch.setattr(journal._writer, "_commit", fault)
        waiting = asyncio.gather(*(journal.flush() for _ in range(3)), return_exceptions=True)
        told = await asyncio.wait_for(waiting, 60)
        assert ["MemoryError: no memory" in str(error) for error in told] == [True] * 3
        with pytest.raises(RunError, match="MemoryError"):
            journal.close()

    asyncio.run(main())


def test_a_journal_whose_folder_is_gone_is_one_error(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        journal = Journal.open(tmp_path / "run" / "journal.db")
        journal._writer._database.close()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunError, match=r"cannot write: .*its folder: No such file"):
            await asyncio.wait_for(land(journal, finished(0)), 60)
        with pytest.raises(RunError):
            journal.close()

    (tmp_path / "run").mkdir()
    asyncio.run(main())


def test_prompts_that_were_forgotten_are_journalled_once_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of a run over millions of prompts remembers only so many of them."""
    monkeypatch.setattr("penstock.store.journal.codec.MOST_KNOWN_PROMPTS", 3)
    encoded: list[str] = []

    def encode(prompt: Prompt) -> bytes:
        encoded.append(prompt.prompt_id)
        return encode_prompt(prompt)

    monkeypatch.setattr("penstock.store.journal.records.encode_prompt", encode)
    journal = Journal.open(tmp_path / "journal.db", threaded=False)
    sampler = Sampler(make_prompts(5), task_name="t", prompt_repeat_k=1, seed=0)
    for cursor in range(20):
        journal.drawn(sampler.group_at(cursor))
    assert journal.query("SELECT COUNT(*) FROM prompt_rows") == [(5,)]
    assert journal.query("SELECT COUNT(*) FROM groups") == [(20,)]
    assert len(encoded) > 5  # some were forgotten, and encoded again
    journal.close()


def test_a_prompt_that_is_drawn_again_is_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    def encode(prompt: Prompt) -> bytes:
        encoded.append(prompt.prompt_id)
        return encode_prompt(prompt)

    monkeypatch.setattr("penstock.store.journal.records.encode_prompt", encode)
    journal = Journal.open(tmp_path / "journal.db", threaded=False)
    sampler = Sampler(make_prompts(5), task_name="t", prompt_repeat_k=1, seed=0)
    for cursor in range(20):
        journal.drawn(sampler.group_at(cursor))
    journal.close()
    assert len(encoded) == len(set(encoded)) == 5


def test_after_a_failed_sync_nothing_more_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have dropped what it could not write, and a second sync would not say so."""
    journal = Journal.open(tmp_path / "journal.db")
    sampler = Sampler(make_prompts(2), task_name="t", prompt_repeat_k=1, seed=0)
    journal.drawn(sampler.sample("t"))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RunError, match="the disk did not take it"):
            journal.sync()
    with pytest.raises(RunError, match="the disk did not take it"):
        journal.sync()
    with pytest.raises(RunError, match="the disk did not take it"):
        journal.drawn(sampler.sample("t"))
    with pytest.raises(RunError, match="the disk did not take it"):
        journal.close()


def test_another_program_that_writes_is_waited_for_up_to_ten_minutes(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        journal.record_published(1, "digest")
        with ThreadPoolExecutor(1) as pool:
            syncing = pool.submit(journal.sync)
            other.execute("ROLLBACK")
            syncing.result()
    assert journal.query("SELECT version FROM weights") == [(1,)]
    assert journal._writer is not None
    assert journal._writer._database.execute("PRAGMA busy_timeout").fetchone() == (600_000,)
    journal.close()


def test_a_log_that_an_open_reader_let_grow_is_emptied_after_the_reader(tmp_path: Path) -> None:
    path, megabyte = tmp_path / "journal.db", "x" * 2**20
    journal = Journal.open(path, threaded=False)
    log = path.with_name("journal.db-wal")

    def write(times: int) -> None:
        for number in range(times):
            journal.record_identity({f"fact {number}": megabyte})
            journal.sync()

    with closing(journal):
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM groups").fetchall()
        write(24)
        assert log.stat().st_size > 20 * 2**20
        reader.close()
        write(8)
        assert log.stat().st_size <= 16 * 2**20
