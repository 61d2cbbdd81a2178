"""The timeline adds up: busy time is a union, idle shares follow, the trace is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.inspection.dashboard.views import read_lanes
from penstock.inspection.timeline import (
    chrome_trace,
    lanes,
    read_events,
    summary_lines,
    worked_s,
    write_trace,
)
from penstock.inspection.track.logs import TimelineLog
from penstock.store.run_folder import RunFolder
from penstock.waits import WaitKind, Waits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two overlapping generations of 2 s in 10 s, one step of 4 s, a wait of 6 s before it."""
    clock = Clock()
    waits = Waits(clock)
    log = TimelineLog(tmp_path / "timeline", waits)
    with waits.wait("loop", WaitKind.WAIT, "groups of step <1>"):
        with waits.wait("engine-0", WaitKind.GENERATE, responder="engine-0"):
            clock.now += 1
            with waits.wait("engine-0", WaitKind.GENERATE, responder="engine-0"):
                clock.now += 1
        clock.now += 4
    with waits.wait("trainer", WaitKind.TRAIN, responder="trainer"):
        clock.now += 4
    log.flush()
    return RunFolder(tmp_path)


def test_busy_time_is_a_union_and_waits_are_idle(run: RunFolder) -> None:
    found = {lane.name: lane for lane in lanes(read_events(run))}
    assert list(found) == ["trainer", "engine-0", "loop"]
    assert found["engine-0"].busy_s == pytest.approx(2)
    assert found["engine-0"].idle_share == pytest.approx(0.8)
    assert found["trainer"].idle_share == pytest.approx(0.6)
    assert found["loop"].busy_s == 0
    assert summary_lines(run)[1].endswith("idle 80.0%")
    assert summary_lines(run)[2].endswith("waits 60.0%")


def test_the_trace_has_every_event_and_overlaps_get_rows_of_their_own(run: RunFolder) -> None:
    trace = chrome_trace(read_events(run))["traceEvents"]
    calls = [event for event in trace if event["ph"] == "X"]
    assert [event["name"] for event in calls] == ["wait", "generate", "generate", "train"]
    first, second = (event for event in calls if event["name"] == "generate")
    assert first["tid"] != second["tid"]
    assert (first["dur"], second["dur"]) == (2_000_000, 1_000_000)


def test_a_driver_that_is_killed_leaves_the_events_of_its_steps(tmp_path: Path) -> None:
    clock = Clock()
    waits = Waits(clock)
    log = TimelineLog(tmp_path / "timeline", waits)
    with waits.wait("trainer", WaitKind.TRAIN, responder="trainer"):
        clock.now += 4
    log.read_metrics()  # at the end of a step
    assert worked_s(RunFolder(tmp_path)) == pytest.approx(4)


def test_any_text_of_a_wait_is_read_back(tmp_path: Path) -> None:
    waits = Waits(Clock())
    log = TimelineLog(tmp_path, waits)
    texts = ['a "quoted" \\ name', "two\nlines\t\x00", "é, \u2028 and \U0001f600"]
    for text in texts:
        with waits.wait(text, WaitKind.WAIT, text):
            pass
    log.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["lane"], event["detail"]) for event in events[1:]] == [(t, t) for t in texts]


def test_the_pause_before_a_resume_is_nobody_s_time(run: RunFolder) -> None:
    path = run.path / "timeline" / "events.jsonl"
    begun = json.loads(path.read_text().splitlines()[0])["start"]
    later = begun + 86_400  # the run is resumed a day after its beginning
    lines = [
        {"lane": "run", "what": "session", "start": later, "end": later},
        {
            "lane": "trainer",
            "what": "restart",
            "start": later - 1,
            "end": later + 1,
        },  # its start-up
        {"lane": "trainer", "what": "train", "start": later + 1, "end": later + 9},
    ]
    path.write_text(path.read_text() + "".join(f"{json.dumps(line)}\n" for line in lines))
    trainer = next(lane for lane in lanes(read_events(run)) if lane.name == "trainer")
    assert trainer.total_s == pytest.approx(20)
    assert trainer.busy_s == pytest.approx(12)
    calls = [event for event in chrome_trace(read_events(run))["traceEvents"] if event["ph"] == "X"]
    (pause,) = (event for event in calls if event["name"] == "paused")
    assert pause["dur"] == pytest.approx((86_400 - 1 - 10) * 1e6, rel=1e-6)


def test_a_session_that_was_killed_before_its_first_call_is_none(tmp_path: Path) -> None:
    times = {"session": [(100.0, 100.0), (137.1, 137.1)], "train": [(138.1, 140.1)]}
    path = tmp_path / "timeline" / "events.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join(
            f"{json.dumps({'lane': 'trainer', 'what': what, 'start': start, 'end': end})}\n"
            for what, calls in times.items()
            for start, end in calls
        )
    )
    ((begun, ended),), (lane,) = read_lanes(RunFolder(tmp_path))
    assert ended - begun == pytest.approx(3)
    assert lane.busy_s == pytest.approx(2)


def test_the_trace_is_written_where_it_is_asked_for(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="timeline: cannot write /proc/nobody"):
        write_trace(run, Path("/proc/nobody/mine.json"))
    assert write_trace(run) == run.path / "timeline" / "trace.json"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"timeline: cannot write .*mine.json: .*, allowed: a file"):
        write_trace(run, tmp_path / "file" / "mine.json")
    other = write_trace(run, tmp_path / "new" / "mine.json")
    assert json.loads(other.read_text())["traceEvents"]


def test_a_line_that_is_cut_off_or_damaged_is_left_out(run: RunFolder) -> None:
    path = run.path / "timeline" / "events.jsonl"
    damaged = '{"lane": "a", "what": "x", "start": "1", "end": 2.0}\n'
    damaged += '{"lane": 1, "what": "x", "start": null, "end": 2.0}\n'
    path.write_text(path.read_text() + damaged + '{"lane": "tr')
    assert len(read_events(run)) == 5  # the session's mark and four calls


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"got no events\.jsonl"):
        read_events(RunFolder(tmp_path))
