"""Agents outside the driver: sync functions, another Python and command lines, ended on every exit."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SamplingConfig, TaskConfig, plugins
from penstock.errors import RunError, UserError
from penstock.rollout.agent.build import check_agent
from penstock.rollout.agent.endpoint import Endpoint
from penstock.rollout.agent.function import Command, Pool
from penstock.run.twin.virtual_time import VirtualClock
from penstock.store.journal.calls import ToolResult
from penstock.types import Status
from stages.agent_parts import make_agent, make_group
from stages.chat_policy import Kept

FILE = """
import asyncio, os, subprocess, sys, time

def sync(task, model, bonus=0.0):
    print("a word that is no answer")
    said = model.chat(task.messages)
    model.reward(bonus)
    return float(said["content"] == "yes")

async def later(task, model):
    said = await model.chat(task.messages)
    return float(said["content"] == "yes")

loops = []

async def keeps(task, model):  # as client libraries keep connections, which belong to a loop
    await model.chat(task.messages)
    tasks = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    assert not tasks, "a task of another rollout"
    asyncio.create_task(asyncio.sleep(1000))
    loops.append(asyncio.get_running_loop())
    return float(not loops[0].is_closed() and loops[0] is loops[-1])

def imports(task, model):
    model.chat(task.messages)
    import gym, mcp, tools
    return float(gym.mine + mcp.mine + tools.mine)

def names_python(task, model):
    model.chat(task.messages)
    return float(sys.executable.endswith("python-of-its-own"))

def imports_helper(task, model):
    model.chat(task.messages)
    import helper
    return 1.0

def raises(task, model):
    model.chat(task.messages)
    raise OSError("the browser is gone")

def dies(task, model):
    os._exit(3)

def hangs(task, model):
    model.chat(task.messages)
    child = subprocess.Popen(["sleep", "1000"])
    with open(task.extra["note"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)

CALL = {"id": "c1", "function": {"name": "buy", "arguments": '{"what": "tea"}'}}

def buy(what, idempotency_key):
    return {"bought": what, "key": idempotency_key}

def broken(what):
    raise LookupError("no " + what)

def endless(what):
    while True:
        time.sleep(0.01)

def use(model, tool, unknown):
    try:
        text = model.tool(CALL, globals()[tool], unknown=ask if unknown == "ask" else unknown)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text

def ask(key):
    return "asked for " + key if ANSWERS.pop(0) else None

ANSWERS = [True, False]

def buys(task, model, tool="buy", unknown="fail"):
    model.chat(task.messages)
    text = use(model, tool, unknown)
    return {"value": 1.0, "note": text}

async def buys_later(task, model, tool="buy", unknown="fail"):
    await model.chat(task.messages)
    try:
        text = await model.tool(CALL, globals()[tool], unknown=ask if unknown == "ask" else unknown)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"value": 1.0, "note": text}
"""
SCRIPT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print("thinking")
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"].count("y"))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(FILE)
    return path


def run(
    function: Any,
    size: int = 2,
    extra: dict[str, Any] | None = None,
    before: Sequence[ToolResult] = (),
    **parts: Any,
) -> list:
    async def main() -> list:
        endpoint = Endpoint()
        await endpoint.start()
        agent = make_agent(function, endpoint=endpoint, **parts)
        group = make_group(size)
        for rollout in group.rollouts:
            agent._interrupted.tools[rollout.rollout_id, rollout.seed] = list(before)
        group.prompt.extra.update(extra or {})
        try:
            return await agent.generate_group(group.rollouts)
        finally:
            await agent.close()
            await endpoint.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["sync", "later"])
def test_a_function_runs_in_processes_of_its_own(file: Path, name: str) -> None:
    options = {"bonus": 0.5} if name == "sync" else {}
    rollouts = run(Pool(f"{file}:{name}", 2), 3, own=options)
    assert [rollout.error for rollout in rollouts] == [""] * 3
    assert {rollout.reward for rollout in rollouts} == {1.0 + options.get("bonus", 0.0)}


def test_rollouts_of_a_process_share_its_event_loop_and_no_task(file: Path) -> None:
    for rollout in run(Pool(f"{file}:keeps", 1), 3):
        assert rollout.reward == 1.0, rollout.error


def test_an_agent_imports_its_own_modules_and_none_of_ours(file: Path) -> None:
    """Penstock's files beside inside.py have names that agents' packages have too."""
    for name in ("gym", "mcp", "tools"):
        file.with_name(f"{name}.py").write_text("mine = 1")
    (rollout,) = run(Pool(f"{file}:imports", 1), 1)
    assert (rollout.error, rollout.reward) == ("", 3.0)
    for name in ("gym", "mcp"):
        file.with_name(f"{name}.py").unlink()
    (rollout,) = run(Pool(f"{file}:imports", 1), 1)
    assert "No module named 'gym'" in rollout.error


def test_another_python_runs_the_function(file: Path, tmp_path: Path) -> None:
    own = tmp_path / "python-of-its-own"
    own.symlink_to(sys.executable)
    (rollout,) = run(Pool(f"{file}:names_python", 1, str(own)), 1)
    assert (rollout.error, rollout.reward) == ("", 1.0)
    task = TaskConfig(agent="nowhere.py:f", agent_options={"python": "/no/python"})
    with pytest.raises(UserError, match="python: got '/no/python'"):
        check_agent("tasks.t", task, SamplingConfig())


def test_another_python_does_not_import_what_the_drivers_path_names(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's packages would take the place of other versions that the agent's Python has."""
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    (drivers / "helper.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(drivers))
    target = f"{file}:imports_helper"
    (rollout,) = run(Pool(target, 1, sys.executable), 1)
    assert "No module named 'helper'" in rollout.error
    (rollout,) = run(Pool(target, 1), 1)  # the driver's own Python
    assert (rollout.error, rollout.reward) == ("", 1.0)


def test_a_command_line_gives_its_reward_as_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh.py"
    script.write_text(SCRIPT)
    (rollout,) = run(Command([sys.executable, str(script)], 2), 1)
    assert (rollout.error, rollout.reward, len(rollout.rows)) == ("", 1.0, 1)
    (rollout,) = run(Command([sys.executable, "-c", "print('none')"], 2), 1)
    assert "last line: got 'none', allowed: a number" in rollout.error
    (rollout,) = run(Command([sys.executable, "-c", "raise SystemExit('bad')"], 2), 1)
    assert "the command ended with code 1: bad" in rollout.error


@pytest.mark.parametrize("name", ["buys", "buys_later"])
def test_a_tool_of_a_process_is_journalled_before_and_after(file: Path, name: str) -> None:
    for tool, said, ended in (
        ("buy", '{"bought": "tea", "key": "c1"}', "done"),
        ("broken", "LookupError: no tea", "failed"),
        ("endless", "TimeoutError: no result after 0.2 s (tool_timeout_s)", "failed"),
    ):
        kept = Kept()
        times = {"timeout_s": 60, "tool_timeout_s": 0.2}
        (rollout,) = run(Pool(f"{file}:{name}", 1), 1, recorder=kept, own={"tool": tool}, **times)
        assert (rollout.error, rollout.score.note) == ("", said)
        assert kept.tools == [("begun", "buy"), (ended, said)]


@pytest.mark.parametrize(
    ("outcome", "unknown", "said", "recorded"),
    [
        ("done", "fail", "before", []),
        ("failed", "retry", "KeyError: 'before'", []),
        (None, "fail", "ToolUnknown: tool buy: call c1 was begun before a crash, its end", []),
        (None, "retry", '{"bought": "tea"', ["begun", "done"]),
        (None, "ask", "asked for c1", ["done"]),
    ],
)
@pytest.mark.parametrize("where", ["loop", "process"])
def test_a_tool_is_called_at_most_once_over_a_crash(
    file: Path, where: str, outcome: str | None, unknown: str, said: str, recorded: list[str]
) -> None:
    result = "KeyError: 'before'" if outcome == "failed" else "before"
    before = ToolResult(call_id="c1", name="buy", outcome=outcome, result=result)
    kept = Kept()
    target = f"{file}:buys_later"
    function = Pool(target, 1) if where == "process" else plugins.load("agent", target, {})
    own = {"unknown": unknown}
    (rollout,) = run(function, 1, before=[before], recorder=kept, own=own, timeout_s=60)
    assert rollout.error == ""
    assert rollout.score.note.startswith(said)
    assert [what for what, _ in kept.tools] == recorded


def test_a_tool_that_nobody_knows_of_is_called_again_if_the_user_says_it_was_not(
    file: Path,
) -> None:
    before = ToolResult(call_id="c1", name="buy", outcome=None, result=None)
    kept = Kept()
    own = {"unknown": "ask"}
    rollouts = run(Pool(f"{file}:buys", 1), 2, before=[before], recorder=kept, own=own)
    said = sorted(rollout.score.note for rollout in rollouts)
    assert said == ["asked for c1", '{"bought": "tea", "key": "c1"}']
    assert sorted(what for what, _ in kept.tools) == ["begun", "done", "done"]


def test_a_pause_does_not_call_a_tool_twice(tmp_path: Path) -> None:
    called: list[str] = []

    def buy() -> str:
        called.append("tea")
        return "tea"

    async def rollout(task: Any, model: Any) -> float:
        first = not called
        got = await model.tool({"id": "c1", "function": {"name": "buy", "arguments": {}}}, buy)
        if first:
            await agent.pause()
            await asyncio.Event().wait()
        await model.chat(task.messages)
        return float(got == "tea")

    agent, group = make_agent(rollout, timeout_s=60), make_group(1)

    async def main() -> None:
        await agent.generate_group(group.rollouts, enable_partial_rollout=True)
        assert group.rollouts[0].status is Status.ABORTED
        await agent.generate_group(group.rollouts, enable_partial_rollout=True)
        await agent.close()

    asyncio.run(main())
    assert (group.rollouts[0].error, group.rollouts[0].reward) == ("", 1.0)
    assert called == ["tea"]


def test_the_start_of_a_process_is_no_part_of_a_rollouts_time() -> None:
    class SlowToStart:
        async def __call__(self, task: Any, model: Any) -> float:
            raise RunError("ready")

        @asynccontextmanager
        async def lend(self) -> AsyncIterator[Any]:
            await asyncio.sleep(1000)
            yield self

    clock, group = VirtualClock(), make_group(2)
    agent = make_agent(SlowToStart(), timeout_s=60)
    clock.run(agent.generate_group(group.rollouts))
    clock.close()
    assert all("RunError: ready" in rollout.error for rollout in group.rollouts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "agent: OSError: the browser is gone (FILE:"),
        ("dies", "the agent's process ended"),
        ("gone", "no attribute"),
    ],
)
def test_a_process_that_fails_costs_its_rollout_and_says_why(
    file: Path, name: str, words: str
) -> None:
    (rollout,) = run(Pool(f"{file}:{name}", 1), 1)
    assert rollout.status is Status.FAILED
    assert words.replace("FILE", str(file)) in rollout.error


def test_a_process_that_hangs_is_killed_with_its_children(file: Path, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    os.mkfifo(note)

    async def main() -> list[int]:
        endpoint = Endpoint()
        await endpoint.start()
        agent, group = make_agent(Pool(f"{file}:hangs", 1), endpoint=endpoint), make_group(1)
        group.prompt.extra["note"] = str(note)
        running = asyncio.create_task(agent.generate_group(group.rollouts))
        words = await asyncio.to_thread(note.read_text)  # waits until the agent has written
        handles = [os.pidfd_open(int(word)) for word in words.split()]
        await agent.pause()
        await running
        await agent.close()
        await endpoint.close()
        return handles

    for handle in asyncio.run(main()):
        assert select.select([handle], [], [], 60)[0]  # it has ended
        os.close(handle)


DRIVER = """
import asyncio, sys
from penstock.rollout.agent.function import Command

async def main():
    words = [sys.executable, "-c", "import os, subprocess, sys, time\\nc = subprocess.Popen(['sleep', '1000'])\\n"
             "open(sys.argv[1], 'w').write(f'{os.getpid()} {c.pid}')\\ntime.sleep(1000)", sys.argv[1]]
    class Model:
        base_url = api_key = name = seed = ""
    from penstock.rollout.agent.session import Task
    await Command(words, 1)(Task(prompt_id="p", messages=[]), Model())

asyncio.run(main())
"""


def test_a_killed_driver_takes_its_agents_and_their_children_along(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    os.mkfifo(note)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(note)])
    handles = [os.pidfd_open(int(word)) for word in note.read_text().split()]
    driver.kill()
    driver.wait()
    for handle in handles:
        assert select.select([handle], [], [], 60)[0]  # it has ended
        os.close(handle)
