"""Every way into a run starts its worker processes before it checks the settings, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from subprocess import Popen

import pytest

import penstock
from penstock import cli
from penstock.compat import launch_distributed
from penstock.config.source import load_config
from penstock.errors import JournalDamaged, UserError
from penstock.store.journal import Journal
from penstock.store.run_folder import create
from penstock.workers.processes.process_worker import WorkerProcess
from stages.made_run import make_run

ROWS = [{"prompt": "1+1", "gt_answer": "2"}] * 4
REWARDS = "tasks.train.rewards"
Enter = Callable[..., None]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Popen[bytes]]]:
    """The worker processes that a test has started."""
    found, spawn = list[Popen[bytes]](), WorkerProcess.spawn

    def noted(log: Path, threads: int, imports: Sequence[str] = ()) -> WorkerProcess:
        made = spawn(log, threads, imports)
        found.append(made.process)
        return made

    monkeypatch.setattr(WorkerProcess, "spawn", noted)
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def old_run(**settings: str) -> str:
    """Make a run that was killed before its first step."""
    words = ["train.steps=1", "run.dir=old", "run.name=run"]
    create(load_config(None, [*words, *(f"{k}={v}" for k, v in settings.items())]).config)
    return "old/run"


def command(*words: str) -> None:
    """Run a command; raise what a user would see."""
    if cli.app(list(words), prog_name="penstock", standalone_mode=False) == 130:
        raise KeyboardInterrupt


def train_by_command(reward: str, kind: str) -> None:
    command("train", "train.steps=1", f"{REWARDS}=[{{type='{reward}'}}]", f"launch.kind={kind}")


def train_by_call(reward: str, kind: str) -> None:
    penstock.train("demo", ROWS, reward, steps=1, settings={"launch.kind": kind})


def train_in_a_notebook(reward: str, kind: str) -> None:
    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel has it
        train_by_call(reward, kind)

    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)


def train_distributed(reward: str, kind: str) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1+1", "gt_answer": "2"}\n' * 4)
    launch_distributed(
        num_producers=1,
        num_consumer_procs=1,
        num_episodes=1,
        train_batch_size=2,
        train_dataset_config={"path": "rows.jsonl"},
        model_config={"pretrained": "demo"},
        generate_config={"max_new_tokens": 6},
        grpo_config={"reward_fn_type": reward},
        overrides={"launch": {"kind": kind}},
    )


def resume_by_command(reward: str, kind: str) -> None:
    command("resume", old_run(**settings_of(reward, kind)))


def resume_by_call(reward: str, kind: str) -> None:
    penstock.resume(old_run(**settings_of(reward, kind)))


def settings_of(reward: str, kind: str) -> dict[str, str]:
    return {REWARDS: f"[{{type='{reward}'}}]", "launch.kind": kind}


ENTRIES: list[Enter] = [
    train_by_command,
    train_by_call,
    train_in_a_notebook,
    train_distributed,
    resume_by_command,
    resume_by_call,
]


@pytest.mark.parametrize("enter", ENTRIES)
def test_a_mistake_that_the_checks_find_ends_the_workers_that_are_there_already(
    enter: Enter, spawned: list[Popen[bytes]]
) -> None:
    with pytest.raises(UserError, match="no_such_reward") as caught:
        enter("no_such_reward", "local")
    assert len(str(caught.value).splitlines()) == 1
    assert len(spawned) == 2  # the trainer and the engine
    assert all(process.poll() is not None for process in spawned)
    assert not Path("runs").exists()


@pytest.mark.parametrize("enter", ENTRIES)
def test_an_interrupt_of_the_checks_ends_the_workers(
    enter: Enter, spawned: list[Popen[bytes]], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    own = tmp_path / "own.py"
    own.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    # A shell's background job ignores interrupts, and so do the tests in it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises((KeyboardInterrupt, penstock.StopRequested)):
        enter(f"{own}:score", "local")
    assert len(spawned) == 2
    assert all(process.poll() is not None for process in spawned)
    assert not Path("runs").exists()


@pytest.mark.parametrize("enter", ENTRIES)
@pytest.mark.parametrize("kind", ["inline", "ray"])
def test_a_run_without_processes_of_this_machine_starts_none(
    enter: Enter, kind: str, spawned: list[Popen[bytes]]
) -> None:
    with pytest.raises(UserError):
        enter("no_such_reward", kind)
    assert not spawned


def test_a_mistake_in_the_words_starts_nothing(spawned: list[Popen[bytes]]) -> None:
    run = old_run()
    for words in (
        ["train", "trian.lr=1"],
        ["train", "train.steps=0"],
        ["resume", "no-such-run"],
        ["resume", run, "trian.lr=1"],
        ["resume", run, "model.path=other"],  # must not change
    ):
        with pytest.raises(UserError):
            command(*words)
    for call in (
        lambda: penstock.train("demo", ROWS, settings={"trian.lr": 1}),
        lambda: penstock.resume(run, settings={"trian.lr": 1}),
    ):
        with pytest.raises(UserError):
            call()
    assert not spawned


def test_a_run_that_is_not_trusted_or_not_free_starts_nothing(
    spawned: list[Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def score(response):\n    return 1.0\n")
    run = old_run(**settings_of("own.py:score", "local"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(UserError, match=r"you did not make it .* execute .*own.py"):
        penstock.resume(run)
    with (
        penstock.open_run(run)._folder.lock(),
        pytest.raises(UserError, match=f"being trained by process {os.getpid()}"),
    ):
        penstock.resume(run, trust=True)
    assert not spawned


def test_a_fork_trains_without_processes_and_starts_none(spawned: list[Popen[bytes]]) -> None:
    run = old_run(**settings_of("no_such_reward", "local"))
    (Path(run) / "origin.json").write_text('{"run": "nowhere", "steps": 1, "digest": "d"}')
    with pytest.raises(UserError, match="fork of nowhere: got no journal"):
        penstock.resume(run)
    assert not spawned


@pytest.mark.parametrize("text", ["{", "[]", '{"train": {"steps": -1}}', '{"tasks": 5}'])
def test_damaged_settings_are_named_before_anything_is_started(
    text: str, spawned: list[Popen[bytes]], tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "made", steps=2, groups_per_step=2)
    with closing(Journal.open(folder.journal)) as journal:
        journal.record_identity({"config": folder.config().model_dump_json()})
    with closing(sqlite3.connect(folder.journal)) as database, database:
        database.execute("UPDATE identity_rows SET value = ? WHERE name = 'config'", (text,))
    with pytest.raises(JournalDamaged, match=r"identity config.*; there is no good checkpoint"):
        command("resume", str(folder.path))
    assert not spawned


@pytest.mark.slow
@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_run_and_its_resume_take_the_processes_that_wait_for_them(
    in_a_loop: bool, spawned: list[Popen[bytes]]
) -> None:
    begun = list[int]()

    def reward(response: str) -> float:
        begun.append(len(spawned))
        return float(len(response))

    async def cell(call: Callable[[], penstock.Run]) -> penstock.Run:
        return call()

    def entered(call: Callable[[], penstock.Run]) -> penstock.Run:
        return asyncio.run(cell(call)) if in_a_loop else call()

    tiny = {"groups_per_step": 2, "num_generations": 2, "max_tokens": 6}
    run = entered(lambda: penstock.train("demo", ROWS, reward, steps=1, name="mine", **tiny))
    more = {"train.steps": 2}
    later = entered(lambda: penstock.resume(run, reward=reward, settings=more))
    assert [row["step"] for row in later.metrics] == [1, 2]
    assert len(spawned) == 4  # two for each: no worker was started a second time
    assert set(begun) == {2, 4}
    assert all(process.poll() is not None for process in spawned)
