"""Code of the user's that blocks the driver's event loop is named, with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workers import watchdog
from stages import blocking_code
from stages.command_runs import train

RULE = "produce.is_valid_sample=stages.blocking_code:keep"


@pytest.mark.parametrize(
    ("words", "function"), [(["Hears", RULE], "keep"), (["Blocks"], "log_step")]
)
def test_code_that_blocks_the_driver_is_named_while_it_does(
    words: list[str], function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.5)
    trackers = f"track.trackers=['stages.blocking_code:{words[0]}']"
    run = train(tmp_path, "blocked", trackers, *words[1:], "launch.kind=inline", "train.steps=1")
    assert (run.code, blocking_code.NAMED.is_set()) == (0, True), run.told
    lines = [line for line in run.told.splitlines() if "stands still" in line]
    (line,) = lines
    assert line.startswith(f"the run stands still: {blocking_code.__file__}:")
    assert line.endswith(f" in {function} has blocked its event loop for 0.5 s")
