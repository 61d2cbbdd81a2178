"""Who can connect to what Penstock opens: every listening socket is bound to one address."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from penstock.compat.producers import join_group
from penstock.errors import UserError
from penstock.training.parallel import ranks
from penstock.weights.broadcast import WeightGroup, connect_store, is_loopback, open_store
from penstock.weights.distributor import Distributor
from penstock.workers.control import Control
from penstock.workers.supervise.trainer import port_of, reserve_port


def listening() -> set[str]:
    """Return the addresses, as the kernel writes them, on which this process listens."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the descriptor of this list
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


LOOPBACK = "0100007F"  # 127.0.0.1


def test_a_store_and_its_group_listen_on_their_address_alone() -> None:
    before = listening()
    store = open_store("127.0.0.1", 30.0)
    assert listening() - before == {LOOPBACK}
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(WeightGroup.join, 1, 2, "127.0.0.1", store.port, 30.0)
        sender = WeightGroup(0, 2, store, 30.0)
        receiver = joining.result()
        assert listening() - before == {LOOPBACK}
        receiving = threads.submit(receiver.receive, [("w", "float32", [3])])
        sender.send([torch.ones(3)])
        assert torch.equal(receiving.result()["w"], torch.ones(3))


def test_a_distributor_listens_on_its_address_and_serves_nobody_without_its_token() -> None:
    before = listening()
    distributor = Distributor("", "", "127.0.0.1", False)
    assert listening() - before == {LOOPBACK}
    endpoint = asyncio.run(distributor.endpoint())
    for token in ("", endpoint.token[:-1], "ü"):
        with socket.create_connection((endpoint.address, endpoint.port), 30.0) as link:
            link.sendall(f"{token} {{}}\n".encode())
            assert link.recv(1) == b""
    asyncio.run(distributor.remove())
    assert listening() == before


def test_trainer_ranks_of_one_machine_listen_on_its_loopback_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserve_port("127.0.0.1") as reserved:
        _join_as_rank_0(monkeypatch, port_of(reserved))


def _join_as_rank_0(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = listening()
    ranks._join(0, 1, "gloo")
    try:
        assert listening() - before == {LOOPBACK}
    finally:
        torch.distributed.destroy_process_group()


def test_a_reserved_port_is_taken_by_nobody_but_rank_0() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = port_of(reserved)
        for address in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((address, port))
        store = open_store("127.0.0.1", 30.0, port, is_reserved=True)
        connect_store("127.0.0.1", port, 30.0).set("key", "value")
        assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))


def test_two_reservations_have_two_ports() -> None:
    reserved = [reserve_port("127.0.0.1") for _ in range(200)]
    try:
        assert len({port_of(one) for one in reserved}) == len(reserved)
    finally:
        for one in reserved:
            one.close()


def test_a_group_of_ones_own_listens_on_the_address_that_it_names() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    before = listening()
    first = join_group(1, 0, where=where, timeout_s=30)
    second = join_group(1, 0, name="another", where=where, timeout_s=30)
    assert listening() - before == {LOOPBACK}
    assert (first, second) != (None, None)


def test_a_port_that_somebody_else_has_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match="free port"):
            join_group(1, 0, where=where, timeout_s=30)


def test_a_store_on_another_port_is_reached_by_its_address() -> None:
    store = open_store("127.0.0.1", 30.0)
    connect_store("127.0.0.1", store.port, 30.0).set("key", "value")
    assert store.get("key") == b"value"


def test_the_control_socket_is_its_users_alone(tmp_path: Path) -> None:
    async def look() -> int:
        control = Control(tmp_path / "control", {})
        await control.start()
        try:
            folder = Path((tmp_path / "control").read_text()).parent
            return stat.S_IMODE(folder.stat().st_mode)
        finally:
            await control.close()

    assert asyncio.run(look()) == 0o700


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("node-1", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
