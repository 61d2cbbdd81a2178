"""The official SDK, unchanged, against a server that is killed under it. Run by scripts/test_agents.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.service.audit import audit_service
from stages.service_client import serving

PYTHON = os.environ.get("PENSTOCK_TEST_TINKER", "")
if not PYTHON:
    pytest.skip("run by scripts/test_agents.sh", allow_module_level=True)
LOOP = Path(__file__).parents[1] / "stages" / "tinker_loop.py"


def loop(folder: Path, kill_after: tuple[int, ...] = ()) -> dict[str, Any]:
    """What the SDK's user saw; the server is killed after these steps, and started again."""
    with serving(folder) as server:
        process = subprocess.Popen(
            [PYTHON, str(LOOP)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TINKER_BASE_URL": f"http://127.0.0.1:{server.port}",
                "TINKER_API_KEY": "tml-me",
                "TINKER_TELEMETRY": "0",
            },
        )
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line
            if line.startswith("step") and int(line.split()[1]) in kill_after:
                server.kill()
                server.start()
        assert process.wait() == 0, last
        seen: dict[str, Any] = json.loads(last)
        return seen


def test_the_sdk_trains_samples_and_loads_and_notices_no_kill(tmp_path: Path) -> None:
    undisturbed = loop(tmp_path / "undisturbed")
    assert undisturbed["losses"][-1] < undisturbed["losses"][0]
    assert undisturbed["loaded"][0] == undisturbed["loaded"][1]
    assert "loss_fn: got 'gspo', allowed: cross_entropy" in undisturbed["refused"]
    assert undisturbed["listed"] == ["a"]
    disturbed = loop(tmp_path / "disturbed", kill_after=(2, 7))
    for name in ("tokens", "logprobs", "loaded", "losses"):
        assert len(disturbed[name]) == len(undisturbed[name])
    assert audit_service(tmp_path / "disturbed" / "service") == 0
    assert disturbed["losses"] == undisturbed["losses"]  # the seed is the same, and so is every bit
    assert disturbed["loaded"] == undisturbed["loaded"]
