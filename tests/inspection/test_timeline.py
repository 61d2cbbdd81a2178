"""The timeline adds up: busy time is a union, idle shares follow, page and trace are whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.inspection.timeline import (
    _COLOURS,
    chrome_trace,
    lanes,
    read_events,
    summary_lines,
    write_png,
    write_timeline,
)
from penstock.run_folder import RunFolder
from penstock.watch.timeline_log import TimelineLog
from penstock.watch.waits import WaitKind, Waits


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


def test_page_and_trace_are_written_and_text_is_escaped(run: RunFolder) -> None:
    page = write_timeline(run)
    text = page.read_text()
    assert "<svg" in text
    assert "80.0%" in text
    assert "<1>" not in text
    assert "<script" not in text
    assert json.loads(page.with_name("trace.json").read_text())["traceEvents"]


def test_the_picture_shows_who_was_busy(run: RunFolder, tmp_path: Path) -> None:
    image_of = pytest.importorskip("PIL.Image").open
    path = write_png(run, tmp_path / "timeline.png")
    assert path is not None
    with image_of(path) as image:
        pixels = image.convert("RGB")
        assert pixels.width > 2000
        colours = {pixels.getpixel((x, 2 * (34 + 13))) for x in range(400, 2700)}  # the first lane
    assert (0xC2, 0x57, 0x1A) in colours  # training
    assert (0x2A, 0x78, 0xB5) not in colours  # generating is the engine's


def test_without_pillow_there_is_no_picture(run: RunFolder, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert write_png(run, run.path / "timeline.png") is None
    assert not (run.path / "timeline.png").exists()


def test_every_kind_of_wait_has_a_colour_of_its_own() -> None:
    assert set(_COLOURS) == set(WaitKind)
    assert len(set(_COLOURS.values())) == len(WaitKind)


def test_a_cut_off_last_line_is_left_out(run: RunFolder) -> None:
    path = run.path / "timeline" / "events.jsonl"
    path.write_text(path.read_text() + '{"lane": "tr')
    assert len(read_events(run)) == 4


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"got no events\.jsonl"):
        read_events(RunFolder(tmp_path))
