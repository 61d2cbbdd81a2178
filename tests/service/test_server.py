"""The service over HTTP, in a process of its own: kills, repeated requests, keys and bad input."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.service.audit import audit_service
from penstock.store.command_log import FILE
from penstock.store.wire import decode
from stages.service_client import ServerProcess, WireClient, forward_backward, serving
from stages.warm_services import WarmServices

IDS = [1, 5, 6, 7, 8, 9, 10, 11]
STEP = {"learning_rate": 3e-3, "eps": 1e-8}
KILLS = int(os.environ.get("PENSTOCK_SERVICE_KILLS", "10"))  # 100 take three minutes


class Patient:
    """A client that asks again when the server died, as the official one does; `heard` counts the answers of all."""

    def __init__(
        self, client: WireClient, alive: threading.Event, heard: threading.Semaphore
    ) -> None:
        self._client, self._alive, self.heard = client, alive, heard

    def __call__(self, call: Callable[[WireClient], Any]) -> Any:
        while True:
            self._alive.wait(60)
            try:
                return call(self._client)
            except (OSError, http.client.HTTPException):
                continue


def train(patient: Patient, rank: int, steps: int) -> list[bytes]:
    """Create a model, train and save it; the answers to all commands."""
    model_id = json.loads(patient(lambda c: c.create(rank=rank)))["model_id"]
    seq, answers = itertools.count(1), []

    def command(path: str, body: Any) -> None:
        promise = patient(lambda c: c.json(path, body))
        answers.append(patient(lambda c: c.answer(promise["request_id"])))
        patient.heard.release()

    for step in range(steps):
        for part in (IDS, IDS[step % 3 :]):
            command("forward_backward", forward_backward(model_id, next(seq), part))
        command("optim_step", {"model_id": model_id, "seq_id": next(seq), "adam_params": STEP})
    fields = {"model_id": model_id, "seq_id": next(seq), "sampling_session_seq_id": 0}
    command("save_weights_for_sampler", fields)
    session = model_id.partition(":")[0]
    chunk = {"type": "encoded_text", "tokens": IDS[:3]}
    command(
        "asample",
        {
            "sampling_session_id": f"{session}:sample:0",
            "seq_id": 0,
            "num_samples": 2,
            "prompt": {"chunks": [chunk]},
            "sampling_params": {"max_tokens": 6},
            "prompt_logprobs": True,
        },
    )
    return answers


def log_of(folder: Path) -> list[tuple[Any, ...]]:
    """What every command was answered, and the digests of weights, in the order of the models."""
    columns = "line, seq, kind, outcome, result, digest"
    with sqlite3.connect(folder / "service" / FILE) as database:
        return database.execute(f"SELECT {columns} FROM commands ORDER BY line, seq").fetchall()


def trained(
    server: ServerProcess, steps: int, alive: threading.Event, heard: threading.Semaphore
) -> list[list[bytes]]:
    """Two clients with models of different ranks train at once."""
    results: list[list[bytes]] = [[], []]

    def work(number: int) -> None:
        client = WireClient(server, key=f"tml-{number}")
        results[number] = train(Patient(client, alive, heard), rank=2 + number, steps=steps)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = ",".join(f"tml-{name}" for name in "01ab")
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder, keys=keys, forked=True) as server:
        yield server


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmServices]:
    warm = WarmServices()
    yield warm
    warm.close()


def chat(server: ServerProcess, body: Any, *, key: str = "tml-a") -> tuple[int, Any]:
    """Ask for a chat completion as OpenAI's clients do."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


SUM = {"messages": [{"role": "user", "content": "12+34"}], "temperature": 0, "model": "demo"}


@pytest.mark.slow
def test_chats_are_answered_by_the_base_whatever_is_trained_and_leave_no_trace(
    server: ServerProcess,
) -> None:
    before = len(log_of(server.folder))
    status, first = chat(server, SUM)
    assert (status, first["choices"][0]["finish_reason"]) == (200, "stop")
    text = first["choices"][0]["message"]["content"]
    assert "<answer>" in text
    assert len(log_of(server.folder)) == before
    client = WireClient(server, key="tml-0")
    model_id = json.loads(client.create(rank=0))["model_id"]

    def command(path: str, body: Any) -> None:
        client.answer(client.json(path, body)["request_id"])

    command("forward_backward", forward_backward(model_id, 1, IDS))
    command("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 1}})
    fields = {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 0}
    command("save_weights_for_sampler", fields)
    sampler = f"{model_id.partition(':')[0]}:sample:0"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]}
    asked = {"sampling_session_id": sampler, "num_samples": 1, "prompt": prompt}
    for seq in range(2):  # the engine has other weights in between
        command("asample", {**asked, "seq_id": seq, "sampling_params": {"max_tokens": 4}})
        assert chat(server, SUM)[1]["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, "model: got 'other', allowed: 'demo'"),
        ({"messages": [{"role": "user", "content": "1" * 999}]}, "got a context of 1001 tokens"),
        ({"temperature": "hot"}, "allowed: numbers"),
        ({"temperature": -1}, "allowed: temperature >= 0"),
        ({"messages": []}, "messages: got list"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
    ],
)
def test_a_wrong_chat_is_refused_in_one_line(
    server: ServerProcess, changes: dict[str, Any], said: str
) -> None:
    status, answer = chat(server, SUM | changes)
    assert status == 400
    assert said in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_a_chat_needs_a_key(server: ServerProcess) -> None:
    assert chat(server, SUM, key="tml-z")[0] == 401


def runs_of(folder: Path) -> int:
    """How often commands were begun, beyond once each."""
    with sqlite3.connect(folder / "service" / FILE) as database:
        [(runs,)] = database.execute("SELECT sum(runs - 1) FROM commands")
    return runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "steps"),
    [(1, 2), (KILLS, 4 + KILLS // 4)],
)
def test_two_clients_and_kills_leave_the_answers_and_weights_of_an_undisturbed_server(
    warm: WarmServices, tmp_path: Path, kills: int, steps: int
) -> None:
    """Each number of each model is answered once, and what was begun again gave the same bits."""
    alive, killed, chance = threading.Event(), 0, random.Random(kills)
    alive.set()
    with serving(tmp_path / "quiet", warm=warm) as server:
        wanted = trained(server, steps, alive, threading.Semaphore(0))
    heard = threading.Semaphore(0)
    with serving(tmp_path / "killed", warm=warm) as server:

        def disturb() -> None:
            """Kill soon after an answer; now and then before there is one, amidst what is done again."""
            nonlocal killed
            while killed < kills:
                if chance.random() < 0.7:
                    heard.acquire()
                time.sleep(chance.uniform(0.0, 0.1))
                alive.clear()
                server.kill()
                server.start()
                alive.set()
                killed += 1

        killer = threading.Thread(target=disturb, daemon=True)
        killer.start()
        answers = trained(server, steps, alive, heard)
        assert killed == kills
        killer.join()
        server.stop()  # and once more: what the last kill left is swept by a start
        server.start()
    assert answers == wanted
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "quiet")
    assert runs_of(tmp_path / "quiet") == 0
    assert audit_service(tmp_path / "killed" / "service") == 0
    assert not list((tmp_path / "killed").rglob(".*.draft-*"))


def test_a_repeated_request_gets_the_same_answer(server: ServerProcess) -> None:
    client = WireClient(server)
    model_id = json.loads(client.create())["model_id"]
    assert json.loads(client.create())["model_id"] == model_id
    body = forward_backward(model_id, 1, IDS)
    first, again = (client.json("forward_backward", body) for _ in range(2))
    assert first == again
    answer = client.answer(first["request_id"])
    assert client.answer(first["request_id"]) == answer
    with sqlite3.connect(server.folder / "service" / FILE) as database:
        [runs] = database.execute("SELECT runs FROM commands WHERE line = ?", (model_id,))
    assert runs == (1,)


def test_a_foreign_key_sees_nothing(server: ServerProcess) -> None:
    client = WireClient(server)
    model_id = json.loads(client.create())["model_id"]
    session = model_id.partition(":")[0]
    asked = [
        ("forward_backward", forward_backward(model_id, 9, IDS)),
        ("retrieve_future", {"request_id": f"{session}:train#0"}),
        ("get_info", {"model_id": model_id}),
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {}),
        ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": "demo"}),
    ]
    for path, fields in asked:
        assert client.ask(path, fields, key="tml-b")[0] == 404, path
        assert client.ask(path, fields, key="tml-c")[0] == 401, path
    for path in (f"training_runs/{model_id}", f"training_runs/{model_id}/checkpoints"):
        status, data = client.ask(path, method="GET", key="tml-b")
        assert status == 404 or json.loads(data)["checkpoints"] == [], path


def test_bad_input_is_the_answer_of_its_future_and_leaves_no_gap(server: ServerProcess) -> None:
    client = WireClient(server, key="tml-b")
    model_id = json.loads(client.create())["model_id"]
    client.json("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"beta1": 2}})
    wrong = forward_backward(model_id, 1, IDS, loss="nonsense")
    told = json.loads(client.answer(client.json("forward_backward", wrong)["request_id"]))
    assert told["category"] == "user"
    assert told["error"].startswith("loss_fn: got 'nonsense', allowed: ")
    told = json.loads(client.answer(f"{model_id}#2"))
    assert told["error"] == "adam_params.beta1: got 2, allowed: from 0, below 1"
    saved = client.json("save_weights", {"model_id": model_id, "seq_id": 3, "path": "../a"})
    assert "path: got '../a', allowed: " in json.loads(client.answer(saved["request_id"]))["error"]
    other = json.loads(client.create(number=1, base_model="other"))
    assert other["error"] == "base_model: got 'other', allowed: 'demo'"
    large = json.loads(client.create(number=2, rank=100_000))
    assert "lora_config.rank: got 100000, allowed: 0 (all weights) to " in large["error"]
    for number, ttl in enumerate(("soon", -1, 1e300), 4):
        fields = {"model_id": model_id, "seq_id": number, "path": "b", "ttl_seconds": ttl}
        saved = client.json("save_weights", fields)
        told = json.loads(client.answer(saved["request_id"]))
        assert told["error"] == f"ttl_seconds: got {ttl!r}, allowed: seconds above 0"
    for body in (b"\xff", b"[]", b"{", b"[" * 100_000):
        assert client.ask("optim_step", body)[0] == 400
        assert client.ask("retrieve_future", body)[0] == 400
    assert client.ask("forward_backward", b"\xff")[0] == 400
    for name in ("#" + "9" * 5000, "#-1", "a", "#\u0663"):
        assert client.ask("retrieve_future", {"request_id": model_id + name})[0] == 404
    session = model_id.partition(":")[0]
    fields = {"session_id": session, "sampling_session_seq_id": "x", "base_model": "demo"}
    assert client.ask("create_sampling_session", fields)[0] == 400


def test_a_prompt_that_fills_the_context_is_scored_though_nothing_fits_behind_it(
    server: ServerProcess,
) -> None:
    client = WireClient(server, key="tml-b")
    session = client.json("create_session", {"tags": []})["session_id"]
    made = {"session_id": session, "sampling_session_seq_id": 10, "base_model": "demo"}
    sampler = client.json("create_sampling_session", made)["sampling_session_id"]
    [served] = client.json("get_server_capabilities", method="GET")["supported_models"]
    longest = served["max_context_length"]

    def sample(seq: int, length: int, **fields: Any) -> bytes:
        tokens = [IDS[place % len(IDS)] for place in range(length)]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, **fields}
        return client.answer(client.json("asample", asked)["request_id"])

    one = {"sampling_params": {"max_tokens": 1}}  # as the SDK's compute_logprobs asks
    scored = [
        decode("SampleResponse", sample(number, length, prompt_logprobs=True, **one))
        for number, length in enumerate((longest, longest - 1))
    ]
    full, shorter = (np.frombuffer(answer["prompt_logprobs"], "<f4") for answer in scored)
    assert full[1:-1] == pytest.approx(shorter[1:], abs=1e-5)
    assert scored[0]["sequences"] == [{"stop_reason": 1, "tokens": b"", "logprobs": b""}]
    for seq, fields in enumerate(
        (one, {}, {"sampling_params": {"max_tokens": 2}, "prompt_logprobs": True}), 2
    ):
        assert b'"category": "user"' in (refused := sample(seq, longest, **fields))
        assert f"allowed: {longest} together".encode() in refused
    assert f"allowed: {longest} together".encode() in sample(9, longest + 1, prompt_logprobs=True)


def test_a_sampler_names_a_base_whose_tokenizer_can_be_loaded(server: ServerProcess) -> None:
    client = WireClient(server, key="tml-b")
    session = client.json("create_session", {"tags": []})["session_id"]
    made = {"session_id": session, "sampling_session_seq_id": 11, "base_model": "demo"}
    sampler = client.json("create_sampling_session", made)["sampling_session_id"]
    base = client.json(f"samplers/{sampler}", method="GET")["base_model"]
    assert (Path(base) / "tokenizer.json").is_file()  # the SDK's get_tokenizer has only this name
    assert client.json("create_sampling_session", {**made, "base_model": base})


def sampling_from(client: WireClient, session: str, number: int) -> Callable[..., str]:
    """Ask a sampler of the base for samples; the request id of each."""
    made = {"session_id": session, "sampling_session_seq_id": number, "base_model": "demo"}
    sampler = client.json("create_sampling_session", made)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]}

    def ask(seq: int, **fields: Any) -> str:
        asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, **fields}
        return str(client.json("asample", asked)["request_id"])

    return ask


def test_fields_of_other_types_are_a_mistake_of_the_client_and_harm_nobody(
    server: ServerProcess,
) -> None:
    """Token ids in lists of lists once killed the engine, and the server with it."""
    client = WireClient(server, key="tml-b")
    session = client.json("create_session", {"tags": []})["session_id"]
    ask, few = sampling_from(client, session, 33), {"sampling_params": {"max_tokens": 2}}
    odd: list[dict[str, Any]] = [
        *({"prompt": {"chunks": [{"tokens": ids}]}} for ids in ([[1, 2]], [1.5], [True], "12", 5)),
        *({"prompt": prompt} for prompt in ([1], "a", {"chunks": 5}, {"chunks": ["a"]})),
        *({"sampling_params": params} for params in ("a", {"stop": 5}, {"seed": "a"})),
        {"sampling_params": {"max_tokens": float("nan")}},
        {"sampling_params": {"top_k": float("nan")}},
        {"prompt_logprobs_last_n": "a"},
        {"target_prompt_logprobs": {"data": [1, 2], "shape": [2.0, 1.0]}},
    ]
    asked = [ask(seq, **{**few, **fields}) for seq, fields in enumerate(odd)]
    lora = [5, {"rank": True}, {"rank": 1, "seed": "a"}, {"rank": 1, "seed": 10**30}]
    made = {"session_id": session, "base_model": "demo"}
    for number, config in enumerate(lora, 40):
        fields = {**made, "model_seq_id": number, "lora_config": config}
        asked.append(client.json("create_model", fields)["request_id"])
    client.json("create_model", {**made, "model_seq_id": 50, "lora_config": {"rank": 1}})
    model = {"model_id": f"{session}:train:50"}
    client.answer(f"{session}:train#50")
    wrong = {**model, "seq_id": 1, "adam_params": 5}
    asked.append(client.json("optim_step", wrong)["request_id"])
    wrong = {**model, "seq_id": 2, "sampling_session_seq_id": "\ud800"}  # which no log takes
    asked.append(client.json("save_weights_for_sampler", wrong)["request_id"])
    for request_id in asked:
        told = json.loads(client.answer(request_id))
        assert (told["category"], "allowed: " in told["error"]) == ("user", True), told
    for path in ("retrieve_future", "get_info", "session_heartbeat"):
        half = dict.fromkeys(("request_id", "model_id", "session_id"), "\ud800#1")
        assert client.ask(path, half)[0] in (400, 404)
    assert decode("SampleResponse", client.answer(ask(99, **few)))["sequences"]


def test_a_number_stands_for_one_request(server: ServerProcess) -> None:
    """Another request with a number that was used once got the answer of the first; number 0 got none."""
    client = WireClient(server, key="tml-b")
    model_id = json.loads(client.create(number=22))["model_id"]
    body = forward_backward(model_id, 1, IDS)
    client.answer(client.json("forward_backward", body)["request_id"])
    step = {"model_id": model_id, "seq_id": 1, "adam_params": STEP}
    for path, other in (
        ("optim_step", step),
        ("forward_backward", forward_backward(model_id, 1, IDS[1:])),
    ):
        status, data = client.ask(path, other)
        assert (status, b"seq_id: got 1 again for another request" in data) == (400, True)
    for seq in (0, 10**18):
        status, data = client.ask("optim_step", {**step, "seq_id": seq})
        assert (status, f"seq_id: got {seq}, allowed: an integer from 1" in data.decode()) == (
            400,
            True,
        )
    session = model_id.partition(":")[0]
    saved = {"model_id": model_id, "seq_id": 2, "path": "a"}
    path = json.loads(client.answer(client.json("save_weights", saved)["request_id"]))["path"]
    made = {"session_id": session, "sampling_session_seq_id": 34, "base_model": "demo"}
    assert client.json("create_sampling_session", made) == client.json(
        "create_sampling_session", made
    )
    status, data = client.ask("create_sampling_session", {**made, "model_path": path})
    assert (status, b"got 34 again for other weights" in data) == (400, True)


def test_a_request_that_is_not_served_is_refused_in_a_sentence_and_leaves_no_gap(
    server: ServerProcess,
) -> None:
    client = WireClient(server, key="tml-b")
    model_id = json.loads(client.create(number=20))["model_id"]
    promise = client.json("save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "a"})
    saved = client.json("save_weights", {"model_id": model_id, "seq_id": 2, "path": "a"})
    assert json.loads(client.answer(saved["request_id"]))["path"].endswith("/weights/a")
    told = json.loads(client.answer(promise["request_id"]))
    assert (told["category"], "save_weights_external: not served" in told["error"]) == (
        "user",
        True,
    )
    checkpoint = f"training_runs/{model_id}/checkpoints/weights/a"
    for method, path in (
        ("POST", f"{checkpoint}/publish"),
        ("DELETE", f"{checkpoint}/publish"),
        ("GET", f"{checkpoint}/external_weights_urls"),
        ("POST", "copy_weights"),
        ("GET", "sessions/a/trace_export"),
    ):
        status, data = client.ask(path, method=method)
        assert (status, json.loads(data)["error"]) == (
            404,
            f"{method} /api/v1/{path}: not served here, allowed: what docs/service.md names",
        )
    [listed] = client.json(f"training_runs/{model_id}/checkpoints", method="GET")["checkpoints"]
    assert listed["checkpoint_id"] == "weights/a"


def test_sessions_are_listed_with_their_models_and_samplers(server: ServerProcess) -> None:
    client = WireClient(server, key="tml-1")
    about = {"tags": [], "user_metadata": {"who": "me"}, "display_name": "first"}
    session = client.json("create_session", about)["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": "demo"}
    client.answer(client.json("create_model", made)["request_id"])
    wrong = {**made, "model_seq_id": 1, "base_model": "other"}
    client.answer(client.json("create_model", wrong)["request_id"])
    sampling_from(client, session, 0)
    assert client.json("sessions", method="GET") == {"sessions": [session]}
    assert client.json("sessions?limit=5&offset=1", method="GET") == {"sessions": []}
    assert client.json(f"sessions/{session}", method="GET") == {
        "training_run_ids": [f"{session}:train:0"],
        "sampler_ids": [f"{session}:sample:0"],
        "user_metadata": {"who": "me"},
        "display_name": "first",
    }
    assert client.ask(f"sessions/{session}", method="GET", key="tml-a")[0] == 404
    assert (
        session not in json.loads(client.ask("sessions", method="GET", key="tml-a")[1])["sessions"]
    )


@pytest.mark.slow
def test_a_client_with_few_samples_does_not_wait_for_those_of_a_client_with_many(
    server: ServerProcess,
) -> None:
    many, few = WireClient(server, key="tml-a"), WireClient(server, key="tml-b")
    asks = [
        sampling_from(client, client.json("create_session", {"tags": []})["session_id"], 30)
        for client in (many, few)
    ]
    params = {"max_tokens": 40, "stop": []}
    asked = [asks[0](seq, num_samples=16, sampling_params=params) for seq in range(40)]
    few.answer(asks[1](0, num_samples=1, sampling_params=params))
    with sqlite3.connect(server.folder / "service" / FILE) as database:
        [(done,)] = database.execute(
            "SELECT COUNT(*) FROM commands WHERE line = ? AND outcome IS NOT NULL",
            (asked[0].partition("#")[0],),
        )
    assert done < len(asked) / 2
    for request_id in asked:
        client_answer = many.answer(request_id)
        assert len(decode("SampleResponse", client_answer)["sequences"]) == 16


def test_a_model_with_all_weights_can_be_made_from_its_checkpoint(server: ServerProcess) -> None:
    """The SDK makes a model from a checkpoint only if the server calls it LoRA, with a rank."""
    client = WireClient(server, key="tml-b")
    model_id = json.loads(client.create(number=21, rank=0))["model_id"]
    saved = client.json("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})
    path = json.loads(client.answer(saved["request_id"]))["path"]
    info = client.json("weights_info", {"tinker_path": path})
    assert (info["is_lora"], info["lora_rank"]) == (True, 0)


def test_targets_in_a_prompt_may_be_sparse(server: ServerProcess) -> None:
    client = WireClient(server, key="tml-b")
    session = client.json("create_session", {"tags": []})["session_id"]
    ask, one = sampling_from(client, session, 31), {"sampling_params": {"max_tokens": 1}}
    targets = [5, -1, -1, 7]  # of a prompt of three tokens
    whole = {"data": targets, "shape": [2, 2], "dtype": "int64"}
    sparse = {
        "data": [5, 7],
        "shape": [2, 2],
        "dtype": "int64",
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 1],
    }
    answers = [
        decode("SampleResponse", client.answer(ask(seq, target_prompt_logprobs=given, **one)))
        for seq, given in enumerate((whole, sparse))
    ]
    full = np.frombuffer(answers[0]["target_prompt_logprobs"]["dense"], "<f4").reshape(2, 2)
    csr = answers[1]["target_prompt_logprobs"]["sparse_csr"]
    assert np.frombuffer(csr["values"], "<f4").tolist() == [full[0, 0], full[1, 1]]
    assert np.frombuffer(csr["crow_indices"], "<i8").tolist() == [0, 1, 2]
    assert np.frombuffer(csr["col_indices"], "<i8").tolist() == [0, 1]
    wrong = {**sparse, "sparse_col_indices": [0, 2]}
    told = json.loads(client.answer(ask(2, target_prompt_logprobs=wrong, **one)))
    assert "target_prompt_logprobs: got indices that do not fit its shape [2, 2]" in told["error"]


def test_the_most_likely_tokens_are_those_of_the_last_places_that_were_asked_for(
    server: ServerProcess,
) -> None:
    client = WireClient(server, key="tml-b")
    session = client.json("create_session", {"tags": []})["session_id"]
    fields = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2}
    asked = sampling_from(client, session, 32)(0, **fields, sampling_params={"max_tokens": 1})
    table = decode("SampleResponse", client.answer(asked))["topk_prompt_logprobs"]
    logprobs = np.frombuffer(table["logprobs"], "<f4").reshape(3, 2)
    assert (logprobs == -99999.0).all(axis=1).tolist() == [True, True, False]


@pytest.mark.slow
def test_checkpoints_are_listed_sampled_from_and_deleted(server: ServerProcess) -> None:
    client = WireClient(server, key="tml-b")
    model_id = json.loads(client.create(number=7))["model_id"]
    saved = client.json(
        "save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "first"}
    )
    path = json.loads(client.answer(saved["request_id"]))["path"]
    assert path == f"tinker://{model_id}/sampler_weights/first"
    listing = f"training_runs/{model_id}/checkpoints"
    [listed] = client.json(listing, method="GET")["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_id"]) == (path, "sampler_weights/first")
    assert client.json("weights_info", {"tinker_path": path})["lora_rank"] == 2
    session = model_id.partition(":")[0]
    answers = []
    for number, fields in enumerate(({"model_path": path}, {"base_model": "demo"})):
        made = {"session_id": session, "sampling_session_seq_id": number, **fields}
        sampler = client.json("create_sampling_session", made)["sampling_session_id"]
        asked = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]},
            "sampling_params": {"max_tokens": 4, "seed": 5, "stop": []},
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 1,
        }
        promise = client.json("asample", asked)
        assert len(promise["sample_sequence_ids"]) == 2
        answers.append(decode("SampleResponse", client.answer(promise["request_id"])))
    assert [len(s["tokens"]) for s in answers[0]["sequences"]] == [
        16,
        16,
    ]  # not even its end stops it
    assert answers[0] == answers[1]  # adapters that were not trained add nothing
    assert (
        answers[0]["topk_prompt_logprobs"]["k"],
        answers[0]["topk_prompt_logprobs"]["length"],
    ) == (2, 3)
    for ttl in (3600, None):  # the time to live can be changed, and taken away
        kept = f"{listing}/sampler_weights/first/ttl"
        assert client.json(kept, {"ttl_seconds": ttl}, method="PUT") == {}
        [listed] = client.json(listing, method="GET")["checkpoints"]
        assert (listed["expires_at"] is None) == (ttl is None)
    status, data = client.ask(kept, {"ttl_seconds": -1}, method="PUT")
    assert (status, "ttl_seconds: got -1, allowed" in data.decode()) == (400, True)
    assert client.json(f"{listing}/sampler_weights/first", method="DELETE") == {}
    assert client.json(listing, method="GET")["checkpoints"] == []
    missing = {"session_id": session, "sampling_session_seq_id": 2, "model_path": path}
    status, data = client.ask("create_sampling_session", missing)
    assert (status, "allowed: a checkpoint of this key" in data.decode()) == (404, True)
