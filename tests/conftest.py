"""The environment of every test, and runs that several test files compare with.

Without `-m gpu` every test runs on the CPU, on a machine with GPUs too: most of them compare bits.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main

if TYPE_CHECKING:
    from penstock.store.run_folder import RunFolder
    from stages.tiny_run import CrashServer

# read when torch and Triton are imported, here and in every process that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores

# a run under nohup ignores it, and the runs of tests would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# counting takes 30 ms, and a run asks only whether anything is frozen: everything imported is
COUNT_FROZEN = gc.get_freeze_count
gc.get_freeze_count = lambda: 1

# the command line is made once for all the commands that tests call in this process
typer.main.get_command = functools.cache(typer.main.get_command)

MEMORY, ROOM = Path("/dev/shm"), 4 << 30  # bytes; a session writes less than one GiB
_ALL_RAY = re.compile(r"^pytestmark = \[?pytest\.mark\.ray\b", re.MULTILINE)
LONGEST_FIRST = (  # so that neither test process is left with one of these while the other is idle
    "promises/agents/test_learning.py",
    "training/test_layouts.py",
    "training/test_learning.py",
    "promises/docs/test_docs.py",
    "promises/durability/test_worker_faults.py",
    "promises/agents/test_tool_kills.py",
    "promises/durability/test_crashes.py",
    "promises/durability/test_power_loss.py",
    "training/test_parallel.py",
    "training/test_architectures.py",
    "promises/agents/test_agent_runs.py",
    "rollout/test_conservation.py",
    "promises/exactness/test_exactness.py",
    "promises/exactness/test_updates_against_trl.py",
    "promises/docs/test_notebooks.py",
    "service/test_server.py",
    "promises/durability/test_imitation.py",
    "promises/durability/test_taught_runs.py",
    "service/test_client.py",
    "engine/test_cuda_ops.py",
    "engine/test_cuda_runner.py",
    "model/test_train_ops.py",
    "rollout/test_taught.py",
    "training/test_offload.py",
    "training/test_sweep.py",
    "engine/test_openai_engine.py",
    "promises/durability/test_disk_faults.py",
    "promises/durability/test_identity.py",
    "training/test_consumer.py",
    "reward/sandbox/test_escapes.py",
    "workers/test_ranks.py",
    "promises/durability/test_several_ranks.py",
    "workers/test_layouts.py",
    "engine/test_transformers_engine.py",
    "promises/test_end_to_end.py",
    "reward/sandbox/test_verify.py",
    "reward/sandbox/test_server.py",
    "store/test_trust.py",
    "reward/sandbox/test_isolation.py",
    "weights/test_shared_memory.py",
    "inspection/test_dashboard_browser.py",
    "promises/simulation/test_simulation.py",
    "rollout/agent/test_processes.py",
    "reward/sandbox/test_judge.py",
    "promises/durability/test_evaluation.py",
    "promises/durability/test_replay_run.py",
    "promises/durability/test_changed_settings.py",
    "model/test_decode_kernels.py",
    "promises/docs/test_examples.py",
    "workers/pool/test_pool.py",
    "test_cli.py",
    "data/test_dataset.py",
    "inspection/test_report_browser.py",
    "workers/test_faults.py",
    "workers/test_process_worker.py",
    "training/test_packing.py",
    "rollout/agent/test_mcp.py",
    "training/test_adapters.py",
    "training/test_router_replay.py",
    "inspection/findings/test_live.py",
    "test_api.py",
    "training/test_distillation.py",
    "rollout/agent/test_endpoint.py",
    "workers/supervise/test_supervise.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="2/3: the second third of the tests")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until everything is imported: what imports make is not garbage
    with contextlib.suppress(ImportError):  # the environment of `make test-vllm` has no hypothesis
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("untimed")
    if _has_room(MEMORY):  # runs sync their files after every step
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if (
        "PENSTOCK_TEST_HOME" not in os.environ
    ):  # one state folder for all test processes, not the user's
        home = os.environ["PENSTOCK_TEST_HOME"] = tempfile.mkdtemp(prefix="penstock-test-home-")
        os.environ["XDG_STATE_HOME"] = home
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    asks = _asks_for("gpu", config) or "PENSTOCK_TEST_VLLM" in os.environ
    if not (asks and _has_gpu()):
        if shutil.which("nvidia-smi"):  # elsewhere Ray's tests count GPUs that are made up
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    if "triton.runtime.interpreter" in sys.modules:
        from stages import quick_interpreter

        quick_interpreter.install()
    if "transformers.configuration_utils" in sys.modules:
        from stages import quick_transformers

        quick_transformers.install()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as in a run
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest replaces anything for the tests
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork the process that starts servers for the tests, if what they import was imported here."""
    if "torch" in sys.modules and not _asks_for("gpu", session.config):
        from stages import nursery

        folder = Path(os.environ["PENSTOCK_TEST_HOME"])
        nursery.OF_TESTS = nursery.Nursery(folder / f"nursery-{os.getpid()}")
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # else extension modules tell of leaks at the end of the process; pytest collects garbage before
    atexit.register(gc.unfreeze)


def _has_room(folder: Path) -> bool:
    """Return whether the folder can hold the files of all tests, programs too."""
    if not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize > ROOM and not found.f_flag & os.ST_NOEXEC


def _freeze() -> None:
    """Keep modules out of later collections: every run in this process begins with a collection."""
    gc.collect()
    gc.freeze()


def _asks_for(mark: str, config: pytest.Config) -> bool:
    return mark in config.option.markexpr and not _leaves_out(mark, config)


def _leaves_out(mark: str, config: pytest.Config) -> bool:
    return f"not {mark}" in config.option.markexpr


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a test to run: they cost time, and may need what is not installed.

    With `-m gpu`, `ray` or `slow`, files without such tests; with `not ray`, files whose tests all need Ray.
    """
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text()
    if any(
        _asks_for(mark, config) and f"mark.{mark}" not in text for mark in ("gpu", "ray", "slow")
    ):
        return True
    if _leaves_out("ray", config) and _ALL_RAY.search(text):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Make no items of a function that is left out whole: a long sweep has hundreds, a millisecond each."""
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    left_out = any(_leaves_out(mark, collector.config) for mark in marks & {"ray", "slow"})
    return [] if left_out else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("gpu")
    if mark is not None and not mark.kwargs.get("stand_in") and not _has_gpu():
        pytest.skip("needs a GPU: make test-gpu")


@pytest.hookimpl(trylast=True)  # what the marks leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, parts = map(int, config.option.part.split("/"))
    left: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        # the tests of a file with Ray use one cluster, in their order
        name = item.path.name if item.get_closest_marker("ray") else item.nodeid
        is_in_part = zlib.crc32(name.encode()) % parts == number - 1
        (left if is_in_part else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = left
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: places.get(item.path.relative_to(root).as_posix(), len(places)))


@pytest.fixture
def count_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `gc` count frozen objects in this test."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return an undisturbed sync run in this process, to compare disturbed runs with."""
    from stages.disturbed_run import config_of, run

    folder = tmp_path_factory.mktemp("quiet")
    return run(config_of(folder, "quiet", "produce.strategy=sync", "launch.kind=inline"))[0]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    """Return one crash server for all tests, so that imports are done once."""
    from stages.tiny_run import CrashServer

    server = CrashServer(tmp_path_factory.mktemp("runs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def warm_workers(server: CrashServer) -> Iterator[None]:
    """Fork the workers of this module's runs from a warm process instead of starting them."""
    from penstock.workers.processes import process_worker
    from stages.warm_workers import install

    start = process_worker._spawn
    install(server.nursery)
    yield
    process_worker._spawn = start


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """Return the folder of a float32 model, as a config names it."""
    import torch

    from stages.training_data import tiny_model

    folder = tmp_path / "policy"
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    return folder
