"""A Ray cluster that asks for a token says so at once; a small gRPC server stands for its head node."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.config.launch import LaunchConfig
from penstock.errors import UserError
from penstock.workers.ray.cluster import connect

pytest.importorskip("ray")
grpc = pytest.importorskip("grpc")


class AsksForToken(grpc.GenericRpcHandler):
    """Refuses every call, as Ray's head node does without a token."""

    def service(self, details):
        def refuse(request, context) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is missing or incorrect")

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(max_workers=1), handlers=[AsksForToken()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


def test_a_cluster_that_asks_for_a_token_says_so_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(UserError) as refused:
        connect(LaunchConfig(kind="ray", address=address))
    told = str(refused.value)
    assert f"launch.address: got '{address}', a cluster that asks for a token" in told
    assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in told
    assert "\n" not in told
