"""The adversarial suite: none of the attempts succeeds, none outlives its limit, nothing is left."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.reward.sandbox.inside import kernel
from penstock.reward.sandbox.pool import SandboxPool
from penstock.reward.sandbox.settings import job_limits
from stages.sandbox_attempts import ATTEMPTS, NUMBERS
from stages.sandbox_pools import left_over, make_pool

TIMEOUT_S = 0.4
SLACK_S = 20.0  # of a busy test machine; the sandbox's own limit is TIMEOUT_S
LASTING = {"recursion", "spinning", "spinning in C", "memory bit by bit"}  # others last as long


@pytest.fixture(
    scope="module",
    params=[pytest.param("bubblewrap", marks=pytest.mark.slow), "namespaces", "filtered"],
)
def pool(request: pytest.FixtureRequest, host: dict[str, Any]) -> Iterator[SandboxPool]:
    pool = make_pool(request.param, memory_mb=512, scratch_mb=4, output_kb=512)
    yield pool
    pool.close()
    assert left_over() == []
    assert os.listdir(host["folder"]) == ["secret"]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return the targets of the attempts."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("the secret")
    os.environ["PENSTOCK_TEST_SECRET"] = "swordfisher"
    assert kernel.ARCH is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "port": server.getsockname()[1],
            "host_pid": os.getpid(),
            "secret_file": str(folder / "secret"),
            "secret_name": "PENSTOCK_TEST_SECRET",
            "secret_half": "swordfish",
            "folder": str(folder),
            **NUMBERS[kernel.ARCH],
        }
    del os.environ["PENSTOCK_TEST_SECRET"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LASTING else []) for name in ATTEMPTS],
)
def test_attempt_fails(pool: SandboxPool, host: dict[str, Any], name: str) -> None:
    source = ATTEMPTS[name].format(**host)
    with pool.sandbox() as sandbox:
        job = {"job": "program", "source": source, "stdin": ""}
        outcome = sandbox.run(job, job_limits(pool.settings, TIMEOUT_S))
        assert b"ESCAPED" not in outcome.stdout
        assert len(outcome.stdout) <= pool.settings.output_kb << 10
        assert outcome.wall_s < TIMEOUT_S + SLACK_S
        seen = not pool.isolation.mode.bubblewrap  # there its number is one of another namespace
        ended = os.pidfd_open(sandbox.pid) if seen else None
        if seen:  # no process of the program is alive when its outcome is known
            assert children_of(sandbox.pid) == ""
    if ended is not None:  # the sandbox's own process ends beside the next submission
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)


def children_of(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_there_are_enough_attempts() -> None:
    assert len(ATTEMPTS) >= 90


def test_the_sandbox_still_works_after_all_that(pool: SandboxPool) -> None:
    with pool.sandbox() as sandbox:
        job = {"job": "program", "source": "print(input()[::-1])", "stdin": "abc"}
        outcome = sandbox.run(job, job_limits(pool.settings, 30.0))
        assert (outcome.status, outcome.stdout) == (0, b"cba\n")


def test_root_without_user_namespaces_is_isolated_as_well() -> None:
    pool = make_pool("root namespaces")
    source = "import os\nprint(os.getuid(), os.listdir('.'))\nos.setuid(0)"
    try:
        with pool.sandbox() as sandbox:
            job = {"job": "program", "source": source, "stdin": ""}
            outcome = sandbox.run(job, job_limits(pool.settings, 30.0))
        uid, files = outcome.stdout.split()
        assert int(uid) > 1000
        assert (files, outcome.status) == (b"[]", 1)
    finally:
        pool.close()
