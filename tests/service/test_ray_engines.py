"""The engines of a service as actors of a Ray cluster: the bits of one engine, also when one is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.service_client import WireClient, serving
from stages.service_engines import IDS, Asking

ray = pytest.importorskip("ray")
from stages.ray_nodes import Nodes  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Two nodes with a CPU each: an engine on each, and the service on the first."""
    nodes = Nodes(1, 1)
    yield nodes
    nodes.close()


def test_engines_on_two_nodes_answer_as_one_and_a_killed_one_loses_nothing(
    cluster: Nodes, tmp_path: Path
) -> None:
    one = Asking(tmp_path / "one")
    wanted = one.answers()
    one.service.close()
    two = Asking(tmp_path / "two", kind="ray", num_producers=2)
    with two.service:
        nodes = {two.engine(f"engine-{n}").worker.node for n in range(2)}
        assert len(nodes) == 2
        assert two.answers() == wanted
        assert two.holding() == {"engine-0", "engine-1"}
        assert two.answers_with_a_kill() == [a for n, a in enumerate(wanted) if n % 4 != 2]
        assert two.until_back() == 1
        assert two.answers() == wanted
        assert two.holding() == {"engine-0", "engine-1"}  # it was given them again


def test_the_command_serves_with_engines_of_a_cluster_and_refuses_what_no_node_has(
    cluster: Nodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from penstock.cli import main

    address = f"launch.address={ray.get_runtime_context().gcs_address}"
    with serving(tmp_path / "served", "--ray", address) as server:
        client = WireClient(server)
        session = client.json("create_session")["session_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "demo"}
        name = client.json("create_sampling_session", sampler)["sampling_session_id"]
        fields = {
            "sampling_session_id": name,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
            "sampling_params": {"max_tokens": 4},
        }
        assert client.answer(client.json("asample", fields)["request_id"])
        server.stop()
        assert server.process is not None
        assert server.process.returncode == 0  # Ray has left SIGTERM to the server
    gpus = "launch.ray_options.producers={num_gpus=1}"
    words = ["penstock", "serve", "demo", "--port", "0", "--ray", gpus, f"run.dir={tmp_path}"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "launch.ray_options.producers: got 1 more of 1 CPU, 1 GPU than find a place" in told
