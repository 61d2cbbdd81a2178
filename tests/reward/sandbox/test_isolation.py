"""Layers and levels, the system-call filter, and what happens when the host or the factory dies."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SandboxError
from penstock.reward import sandbox
from penstock.reward.sandbox import host as host_side
from penstock.reward.sandbox.host import Isolation, Mode, Sandbox, SandboxFactory, find_isolation
from penstock.reward.sandbox.inside import kernel, landlock, seccomp, wire
from penstock.reward.sandbox.self_check import check
from penstock.reward.sandbox.settings import ACCEPT_WEAKER, SandboxSettings, job_limits
from penstock.reward.sandbox.verify import verify
from stages.own_children import own_children
from stages.sandbox_pools import MODES, factories, left_over, make_pool

PLAIN = Mode(bubblewrap=False, namespaces=False, user_namespace=False)
TESTS = {"inputs": ["a"], "outputs": ["a"]}
ALLOW, KILL = 0x7FFF0000, 0x80000000


def run_filter(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """The kernel's side of a filter: the few BPF instructions that ours consist of."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("iIQ6Q", number, audit, 0, *(word & (1 << 64) - 1 for word in words))
    position, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("HBBI", program, 8 * position)
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            position += if_true if accumulator == value else if_false
        else:
            assert code == 0x06
            return int(value)


def denied(number: int) -> int:
    return 0x00050000 | number


THREAD = 0x00010000
CASES: list[tuple[dict[str, bool], str, tuple[int, ...], int]] = [
    ({}, "read", (), ALLOW),
    ({}, "clone", (THREAD | 0x100,), ALLOW),
    ({}, "clone", (17,), denied(errno.EPERM)),
    ({"threads": False}, "clone", (THREAD,), denied(errno.EPERM)),
    ({}, "clone3", (), denied(errno.ENOSYS)),
    ({}, "openat2", (), denied(errno.ENOSYS)),
    ({}, "kill", (77, 9), ALLOW),
    ({}, "kill", (1, 9), denied(errno.EPERM)),
    ({}, "kill", (-1, 9), denied(errno.EPERM)),
    ({}, "tgkill", (77, 77, 9), ALLOW),
    ({}, "tgkill", (1, 1, 9), denied(errno.EPERM)),
    ({}, "prlimit64", (0,), ALLOW),
    ({}, "prlimit64", (1,), denied(errno.EPERM)),
    ({}, "prctl", (15,), ALLOW),
    ({}, "prctl", (22,), denied(errno.EPERM)),
    ({}, "fcntl", (3, 2), ALLOW),
    ({}, "fcntl", (3, 1030), ALLOW),
    *(({}, "fcntl", (3, c), denied(errno.EPERM)) for c in (5, 6, 8, 10, 37, 1024, 1026, 1031)),
    ({}, "ioctl", (0, 0x5401), ALLOW),
    ({}, "ioctl", (0, 0x5412), denied(errno.EPERM)),
    ({}, "socketpair", (1,), ALLOW),
    ({}, "socketpair", (2,), denied(errno.EPERM)),
    ({}, "sendto", (3, 0, 0, 0, 0), ALLOW),
    ({}, "sendto", (3, 0, 0, 0, 5), denied(errno.EPERM)),
    ({}, "sendto", (3, 0, 0, 0, 5 << 32), denied(errno.EPERM)),
    ({}, "openat", (3, 0, os.O_RDWR | os.O_CREAT), ALLOW),
    ({"scratch": False}, "openat", (3, 0, os.O_RDWR), denied(errno.EROFS)),
    ({"scratch": False}, "openat", (3, 0, os.O_CREAT), denied(errno.EROFS)),
    ({"scratch": False}, "openat", (3, 0, os.O_RDONLY), ALLOW),
    ({"scratch": False}, "unlinkat", (), denied(errno.EPERM)),
]
TABLE = seccomp.ALWAYS | seccomp.WITH_SCRATCH | seccomp.CONDITIONAL | seccomp.ABSENT


@pytest.mark.parametrize(
    ("arch", "column", "audit"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]
)
@pytest.mark.parametrize(("settings", "name", "arguments", "verdict"), CASES)
def test_the_filter_decides_as_meant(
    arch: str,
    column: int,
    audit: int,
    settings: dict[str, bool],
    name: str,
    arguments: tuple[int, ...],
    verdict: int,
) -> None:
    program = seccomp.build_filter(arch, 77, **settings)
    number = TABLE[name][column]
    assert number is not None
    assert run_filter(program, audit, number, *arguments) == verdict


@settings(deadline=None)
@given(number=st.integers(0, 2**31 - 1), arch=st.sampled_from(["x86_64", "aarch64"]))
def test_what_is_not_named_is_not_allowed(number: int, arch: str) -> None:
    column, audit = (0, 0xC000003E) if arch == "x86_64" else (1, 0xC00000B7)
    named = {numbers[column] for numbers in TABLE.values()}
    program = seccomp.build_filter(arch, 77)
    if number not in named:
        assert run_filter(program, audit, number) == denied(errno.EPERM)
    assert run_filter(program, audit, number | 1 << 30) == denied(errno.EPERM)  # x32's number
    assert run_filter(program, 0x40000003, number) == KILL  # another architecture's numbers


def test_dangerous_calls_are_in_no_list() -> None:
    dangerous = "socket connect bind ptrace execve execveat mount unshare setns bpf io_uring_setup"
    dangerous += " flock inotify_init1 fanotify_init sysinfo fadvise64 memfd_create process_vm_readv pidfd_open tkill mknod link chroot sendmsg keyctl"
    dangerous += (
        " sched_setscheduler sched_setattr sched_setparam sched_setaffinity setpriority ioprio_set"
    )
    assert not set(dangerous.split()) & set(TABLE)


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers(), inner)
            | st.sets(st.integers())
            | st.frozensets(st.text())
        ),
        max_leaves=10,
    )
)
def test_plain_data_passes_unchanged(value: Any) -> None:
    passed = wire.decode(wire.encode(value))
    assert passed == value
    assert type(passed) is type(value)


def test_only_plain_data_passes() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert type(wire.decode(wire.encode(Sly(5)))) is int
    with pytest.raises(wire.NotPlain):
        wire.encode(object())
    with pytest.raises(wire.NotPlain):
        wire.decode({"object": 1})


def test_check_tells_what_is_active_and_tries_to_break_out() -> None:
    make_pool("filtered").close()
    report = check(SandboxSettings(minimum="filtered"))
    assert report.ok
    assert all(report.attempts.values())
    text = "\n".join(report.lines())
    assert "code would run" in text
    assert "active   seccomp" in text
    for word in ("installed package", "lock that others see", "forged built-ins", "hash alike"):
        assert word in text


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"namespaces": ["user", "mnt", "pid", "net", "ipc"]}, "full"),
        ({"namespaces": ["user", "mnt", "pid", "net", "ipc"], "landlock": False}, "full"),
        ({"namespaces": ["mnt", "pid", "net", "ipc"]}, "full"),
        ({"namespaces": ["user", "mnt", "pid"]}, "filtered"),
        ({"namespaces": []}, "filtered"),
        ({"namespaces": [], "landlock": False}, "weak"),
        ({"namespaces": ["user", "mnt", "pid", "net", "ipc"], "arch": None}, "weak"),
        ({"namespaces": ["mnt", "pid", "net", "ipc"], "uid": 0}, "weak"),
    ],
)
def test_levels(facts: dict[str, Any], level: str) -> None:
    everything = {"landlock": True, "arch": "x86_64", "uid": 54321}
    assert host_side._describe(PLAIN, everything | facts).level == level


def test_code_is_refused_below_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = Isolation(PLAIN, "weak", ("resource limits",))
    monkeypatch.setattr(host_side, "_best", lambda bubblewrap: (weak, "the moon is wrong"))
    for minimum in ("full", "filtered"):
        settings = SandboxSettings.model_validate({"minimum": minimum})
        message = f"isolation here is 'weak'.*allowed: '{minimum}'.*missing: the moon is wrong"
        with pytest.raises(SandboxError, match=message):
            find_isolation(settings)
    told = SandboxSettings(minimum="weak", accept_weaker=ACCEPT_WEAKER)
    assert find_isolation(told) is weak


@pytest.mark.parametrize(
    ("lacks", "line"),
    [
        ("namespaces", "isolation: filtered (minimum: full): code would be refused"),
        pytest.param(
            "namespaces,landlock",
            "isolation: weak (minimum: full): code would be refused",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "seccomp",
            "no level of isolation can be had here: seccomp filters are refused",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "one-id", "  because  only one user id is mapped, root's", marks=pytest.mark.slow
        ),
        pytest.param(
            "no-root", "isolation: full (minimum: full): code would run", marks=pytest.mark.slow
        ),
    ],
)
def test_where_the_kernel_offers_less_one_line_says_what_is_missing(lacks: str, line: str) -> None:
    if os.geteuid() != 0 or find_isolation(SandboxSettings(minimum="filtered")).level != ("full"):
        pytest.skip("takes a machine that offers everything")
    check = [sys.executable, "-m", "penstock.cli", "sandbox", "check"]
    folders = [str(Path(__file__).parents[2]), str(Path(sandbox.__file__).parents[3])]
    ran = subprocess.run(
        [sys.executable, "-m", "stages.lesser_kernel", lacks, *check],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
    )
    assert line in ran.stdout + ran.stderr
    assert ran.returncode == (0 if "would run" in line else 1)
    if lacks == "namespaces":
        assert "  because  new namespaces are refused" in ran.stdout


def test_landlock_alone_hides_installed_packages(tmp_path: Path) -> None:
    if not landlock.version():
        pytest.skip("the kernel offers no Landlock")
    for name in ("lib/python/os.py", "lib/python/site-packages/pip.py", "lib/other/x.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = (
        "import os, sys\n"
        "from penstock.reward.sandbox.inside import landlock\n"
        "top = sys.argv[1]\n"
        "rules = landlock.prepare([top + '/lib'], [top + '/lib/python/site-packages'])\n"
        "landlock.restrict(rules)\n"
        "assert 'site-packages' in os.listdir(top + '/lib/python')\n"
        "print(open(top + '/lib/python/os.py').read(), open(top + '/lib/other/x.so').read())\n"
        "try: open(top + '/lib/python/site-packages/pip.py')\n"
        "except PermissionError: print('hidden')\n"
    )
    command = [sys.executable, "-c", source, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "lib/python/os.py lib/other/x.so\nhidden\n", ran.stderr


def test_a_factory_that_dies_is_replaced() -> None:
    others = set(factories().values())
    pool = make_pool("namespaces")
    try:
        assert verify(pool, TESTS, "print(input())", 30).passed
        processes = {pid: name for pid, name in factories().items() if name not in others}
        (factory,) = set(processes) & set(own_children())  # its sandboxes are its own children
        ended = os.pidfd_open(factory)
        os.kill(factory, signal.SIGKILL)
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
        assert verify(pool, TESTS, "print(input())", 30).passed
        assert factory not in own_children()
    finally:
        pool.close()
    assert left_over(others) == []


def test_a_factory_may_be_closed_twice() -> None:
    """By a thread that finds it dead, and by the thread that closes the pool."""
    pool = make_pool("namespaces")
    factory = SandboxFactory(pool.isolation.mode, pool.settings)
    factory.close()
    factory.close()
    assert left_over() == []


def test_a_thread_that_waits_for_a_factory_keeps_its_socket_until_it_is_woken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool("namespaces")
    factory = SandboxFactory(pool.isolation.mode, pool.settings)
    waiting, open_sockets = threading.Event(), list[bool]()

    def receive_after_the_end(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
        poller = select.poll()
        poller.register(link, select.POLLRDHUP)  # a reply does not wake it
        waiting.set()
        poller.poll()
        open_sockets.append(link.fileno() != -1)
        raise wire.Closed

    def spawn() -> None:
        with pytest.raises(SandboxError, match="has ended"):
            factory.spawn()

    monkeypatch.setattr(wire, "receive", receive_after_the_end)
    thread = threading.Thread(target=spawn)
    thread.start()
    waiting.wait()
    factory.close()
    thread.join()
    assert open_sockets == [True]
    assert left_over() == []


HOST = """
import sys
sys.path.insert(0, {tests!r})
from stages.sandbox_pools import factories, make_pool
from penstock.reward.sandbox.settings import job_limits
pool = make_pool({mode!r})
with pool.sandbox() as sandbox:
    job = dict(job="program", source="import time\\ntime.sleep(600)", stdin="")
    sandbox.start(job, job_limits(pool.settings, 600.0))
    print(*factories(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["namespaces", pytest.param("filtered", marks=pytest.mark.slow)])
def test_nothing_survives_a_host_that_is_killed(mode: str) -> None:
    make_pool(mode).close()
    source = HOST.format(tests=str(Path(__file__).parents[2]), mode=mode)
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        pids = [int(word) for word in host.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        host.send_signal(signal.SIGKILL)
        for descriptor in watched:  # readable when the process has ended
            assert select.select([descriptor], [], [], 60)[0]
            os.close(descriptor)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("bubblewrap", marks=pytest.mark.slow),
        "namespaces",
        pytest.param("filtered", marks=pytest.mark.slow),
    ],
)
def test_no_process_of_ours_inside_has_the_terminal(mode: str) -> None:
    make_pool(mode).close()  # skips where the mode does not work
    words = [sys.executable, "-m", "stages.sandbox_terminal", mode]
    done = subprocess.run(
        [sys.executable, "-c", f"import pty; pty.spawn({words!r})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    _, told, names = done.stdout.partition("with a terminal:")
    assert told, done.stdout + done.stderr
    assert set(names.split()) <= {"bwrap"}


@pytest.mark.parametrize("mode", ["bubblewrap", "namespaces"])
def test_nothing_else_of_the_package_is_inside(mode: str) -> None:
    if shutil.which("bwrap") and host_side.try_mode(MODES["namespaces"], SandboxSettings()):
        host_side.try_mode(MODES[mode], SandboxSettings())  # works wherever its parts do
    pool = make_pool(mode)
    source = "import sys\nprint(*sorted(m for m in sys.modules if m.startswith('penstock')))"
    try:
        with pool.sandbox() as one:
            job = {"job": "program", "source": source}
            names = one.run(job, job_limits(pool.settings, 30)).stdout.decode().split()
    finally:
        pool.close()
    outer = {name for name in names if not name.startswith("penstock.reward.sandbox.inside")}
    assert outer == {"penstock", "penstock.reward.sandbox"}  # stand-ins without code


def test_this_machine_is_known() -> None:
    assert kernel.ARCH in (None, "x86_64", "aarch64")


def test_a_verdict_does_not_wait_for_the_end_of_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, ended = threading.Event(), []
    end = Sandbox.end

    def slow_end(self: Sandbox) -> None:
        gate.wait(60)
        end(self)
        ended.append(self.pid)

    monkeypatch.setattr(Sandbox, "end", slow_end)
    pool = make_pool("namespaces", workers=1)
    assert verify(pool, TESTS, "print(input())").passed
    assert ended == []
    gate.set()
    pool.close()
    assert ended
    assert left_over() == []
