"""The official SDK, unchanged, against a server that is killed under it. Run by scripts/test_agents.sh."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.service.audit import audit_service
from stages import either_loop
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


REFUSED = {  # by what it is about: the SDK's class, and what is in the text
    "loss": ("RequestFailedError", "loss_fn: got 'gspo', allowed: cross_entropy"),
    "shape": (
        "RequestFailedError",
        "data[0].weights: got shape [3], allowed: that of target_tokens",
    ),
    "optimizer": ("RequestFailedError", "adam_params.learning_rate: got -1.0, allowed: from 0"),
    "name": ("RequestFailedError", "path: got 'a/b', allowed: letters"),
    "model": ("RequestFailedError", "base_model: got 'other', allowed: 'demo'"),
    "rank": ("RequestFailedError", "lora_config.rank: got 1000000, allowed: 0 (all weights) to "),
    "too long": ("RequestFailedError", "prompt + 1000000 new tokens, allowed: "),
    "foreign": ("NotFoundError", "allowed: a checkpoint of this key"),
}


def test_the_sdk_trains_samples_and_loads_and_notices_no_kill(tmp_path: Path) -> None:
    undisturbed = loop(tmp_path / "undisturbed")
    assert undisturbed["losses"][-1] < undisturbed["losses"][0]
    assert undisturbed["loaded"][0] == undisturbed["loaded"][1]
    assert undisturbed["listed"] == [["a", True]]  # with a time to live
    assert (undisturbed["full"], undisturbed["tokenizer"]) == (0, 0)
    for name, (kind, text) in REFUSED.items():
        told = undisturbed["refused"][name]
        assert (told[0], text in told[1]) == (kind, True), told
    disturbed = loop(tmp_path / "disturbed", kill_after=(2, 7))
    for name in ("tokens", "logprobs", "loaded", "losses"):
        assert len(disturbed[name]) == len(undisturbed[name])
    assert audit_service(tmp_path / "disturbed" / "service") == 0
    assert disturbed["losses"] == undisturbed["losses"]  # the seed is the same, and so is every bit
    assert disturbed["loaded"] == undisturbed["loaded"]


def test_a_loop_tells_the_same_over_http_and_in_process(tmp_path: Path) -> None:
    """With its seeds, every number of the SDK's client is that of `penstock.Service`, bit for bit."""
    with serving(tmp_path / "http") as server:
        address = f"http://127.0.0.1:{server.port}"
        variables = {
            "TINKER_BASE_URL": address,
            "TINKER_API_KEY": "tml-me",
            "TINKER_TELEMETRY": "0",
        }
        printed = subprocess.run(
            [PYTHON, either_loop.__file__],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        ).stdout
    with penstock.Service("demo", folder=tmp_path / "in process") as service:
        own = asyncio.run(either_loop.train(service, penstock, list))
    assert json.loads(printed.splitlines()[-1]) == own


REQUESTS = """
import json, sys, tinker, torch
from tinker import types
service = tinker.ServiceClient(user_metadata={"who": "me"})
try:
    tinker.ServiceClient(api_key="tml-unknown").get_server_capabilities()
except tinker.AuthenticationError as error:
    told = [str(error)]
trainer = service.create_lora_training_client(base_model="demo", rank=0)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([1, 5, 6]),
    loss_fn_inputs={"target_tokens": [5, 6, 7], "weights": [1.0] * 3},
)
try:
    trainer.save_weights_external("a").result()
except tinker.RequestFailedError as error:
    told.append(str(error))
path = trainer.save_state("a").result().path
rest = tinker.RestClient()
try:
    rest.publish_checkpoint_from_tinker_path(path).result()
except tinker.NotFoundError as error:
    told.append(str(error))
again = service.create_training_client_from_state_with_optimizer(path)
told += [c.forward([datum], "cross_entropy").result().metrics for c in (trainer, again)]
[session] = rest.list_sessions().result().sessions
listed = rest.get_session(session).result()
told += [len(listed.training_run_ids), listed.user_metadata]
wide = torch.full((2, 40), -1)
wide[0, 3] = 5
sampler = service.create_sampling_client(base_model="demo")
scored = sampler.sample(
    types.ModelInput.from_ints([1, 5, 6]),
    1,
    types.SamplingParams(max_tokens=1),
    include_prompt_logprobs=True,
    target_prompt_logprobs=types.TensorData.from_torch_sparse(wide, pad_value=-1),
).result()
told += [scored.target_prompt_logprobs.to_torch()[0, 3].item(), scored.prompt_logprobs[1]]
print(json.dumps(told))
"""


def test_requests_of_the_sdk_are_served_or_refused_and_the_client_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, keys="tml-me") as server:
        address = f"http://127.0.0.1:{server.port}"
        variables = {"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-me"}
        printed = subprocess.run(
            [PYTHON, "-c", REQUESTS],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables},
        ).stdout
    key, external, publish, first, again, runs, metadata, target, other = json.loads(
        printed.splitlines()[-1]
    )
    assert "X-API-Key: got an unknown key, allowed: a key of this service" in key
    assert "save_weights_external: not served here, allowed: save_weights" in external
    assert "/publish: not served here, allowed: what docs/service.md names" in publish
    assert (first, runs, metadata) == (again, 2, {"who": "me"})
    assert target == pytest.approx(other, abs=1e-5)
