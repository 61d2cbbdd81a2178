"""One calculator agent in five frameworks, over every API: equal trees of calls, equal weights. Run by scripts/test_agents.sh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout.agent.tools import make
from penstock.rollout.agent.tree import text_of
from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.agent_parts import play, tool_call
from stages.tiny_run import CrashServer, digests

if os.environ.get("PENSTOCK_TEST_AGENTS") != "1":
    pytest.skip("run by scripts/test_agents.sh", allow_module_level=True)

ROOT = Path(__file__).parents[3]
STEPS = 3
SMALL = [
    "launch.kind=inline",
    "engine.max_slots=16",
    f"train.steps={STEPS}",
    "train.groups_per_step=2",
    "track.trackers=[]",
    "tasks.sums.agent_options.processes=1",
]
# the same agent without a framework, a process or HTTP
PLAIN = """
import json

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]

async def rollout(task, model):
    messages = list(task.messages)
    while True:
        said = await model.chat(messages, TOOLS)
        if "tool_calls" not in said:
            return float(said["content"].strip() == task.gt_answer)
        messages.append(said)
        for call in said["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            result = {"role": "tool", "content": str(given["a"] + given["b"])}
            messages.append({**result, "tool_call_id": call["id"]})
"""
SDK_SERVER = """
import sys
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

server.run(transport="streamable-http", port=int(sys.argv[1]))
"""
OVER = {
    "openai": ("chat", "responses"),
    "langgraph": ("chat", "responses"),
    "openai_agents": ("chat", "responses"),
    "pydantic_ai": ("chat", "responses", "messages"),
    "anthropic": ("messages",),
}
CASES = [
    pytest.param(name, api, stream, id=f"{name}-{api}{'-stream' * stream}")
    for name, apis in OVER.items()
    for api in apis
    for stream in (False, True)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    """Return a server in a folder with the examples, their data and their environments."""
    folder = tmp_path_factory.mktemp("frameworks")
    hidden = shutil.ignore_patterns(".venv", "*.jsonl")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=hidden)
    for requirements in (ROOT / "examples").glob("*/requirements.txt"):
        own = requirements.with_name(".venv")
        (folder / own.relative_to(ROOT)).symlink_to(own)
    subprocess.run([sys.executable, folder / "examples/calculator/make_data.py"], check=True)
    (folder / "plain.py").write_text(PLAIN)
    made = CrashServer(folder)
    yield made
    made.close()


def train(
    server: CrashServer, name: str, recipe: str = "frameworks/calculator.toml", **task: Any
) -> RunFolder:
    """Train with the documented config; return the run's folder."""
    words = [f"tasks.sums.{key.replace('__', '.')}={value}" for key, value in task.items()]
    given = ["train", f"examples/{recipe}", f"run.name={name}", *SMALL, *words]
    assert server.run(*given) == 0, server.output()
    return RunFolder(server.folder / "runs" / name)


def trees(run: RunFolder) -> dict[tuple[str, int], list[Any]]:
    """Return the calls of every rollout: all of them but the schemas of tools, which frameworks word."""
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        groups = {
            row[0].rpartition(".")[0] for row in journal.query("SELECT rollout_id FROM calls")
        }
        return {
            rollout: [
                (
                    call.parent,
                    call.context_ids.tolist(),
                    call.token_ids.tolist(),
                    call.logprobs.tolist(),
                    call.finish_reason,
                    [(message["role"], text_of(message)) for message in call.messages],
                    call.answer,
                )
                for call in calls
            ]
            for group in groups
            for rollout, calls in journal.calls(group).items()
        }


@pytest.fixture(scope="module")
def plain(server: CrashServer) -> RunFolder:
    return train(server, "plain", agent="plain.py:rollout", agent_options="{max_turns=3}")


@pytest.mark.parametrize(("name", "api", "stream"), CASES)
def test_an_agent_of_a_framework_trains_to_the_same_weights(
    server: CrashServer, plain: RunFolder, name: str, api: str, stream: bool
) -> None:
    options = {"stream": str(stream).lower()} | ({"api": api} if name != "anthropic" else {})
    run = train(
        server,
        f"{name}-{api}-{stream}",
        agent=f"examples/frameworks/with_{name}.py:rollout",
        **{f"agent_options__{key}": value for key, value in options.items()},
    )
    assert_equal(run, plain)


def assert_equal(run: RunFolder, plain: RunFolder) -> None:
    """Assert that two runs made the same calls and have the same weights after every step."""
    expected = trees(plain)
    assert any(call[0] == 0 for calls in expected.values() for call in calls)  # a tool was called
    assert trees(run) == expected
    assert digests(run) == digests(plain)
    assert len(set(digests(run))) == STEPS  # every step changed the weights


def own_python(server: CrashServer, example: str, *words: str) -> list[str]:
    """Return a command under the Python of an example."""
    folder = server.folder / "examples" / example
    return [str(folder / ".venv/bin/python"), str(folder / words[0]), *words[1:]]


def test_a_taskset_of_verifiers_trains_to_the_same_weights(
    server: CrashServer, plain: RunFolder
) -> None:
    subprocess.run(own_python(server, "verifiers", "agent.py"), check=True)
    assert_equal(train(server, "verifiers", "verifiers/sums.toml"), plain)


def test_an_environment_of_openenv_trains_to_the_same_weights(
    server: CrashServer, plain: RunFolder
) -> None:
    command = own_python(server, "openenv", "sums_server.py", "0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as world:
        try:
            assert world.stderr is not None
            said = next(line for line in world.stderr if "running on" in line)
            (url,) = re.findall(r"http://\S+", said)
            run = train(server, "openenv", "openenv/sums.toml", agent_options__url=url)
        finally:
            world.kill()
    assert_equal(run, plain)


def test_a_server_of_the_mcp_sdk_trains_to_the_same_weights(
    server: CrashServer, plain: RunFolder
) -> None:
    command = [f"{os.environ['PENSTOCK_TEST_MCP']}/python", "-c", SDK_SERVER, "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as world:
        try:
            assert world.stderr is not None
            said = next(line for line in world.stderr if "running on" in line)
            (url,) = re.findall(r"http://\S+", said)
            options = f'{{mcp=[{{url="{url}/mcp"}}], max_turns=3}}'
            right = '[{type="examples/calculator/calc.py:right"}]'
            run = train(server, "mcp", agent="tools", agent_options=options, rewards=right)
        finally:
            world.kill()
    assert_equal(run, plain)


def test_a_reference_server_of_mcp_is_called_over_its_pipes() -> None:
    command = [f"{os.environ['PENSTOCK_TEST_MCP']}/mcp-server-time", "--local-timezone", "UTC"]
    noon = {"time": "12:00", "source_timezone": "Asia/Tokyo", "target_timezone": "UTC"}
    said = [tool_call("convert_time", **noon), tool_call("convert_time", time="noon"), "3 o'clock"]
    rollout, kept, prompts = play(make("o", {"mcp": [{"command": command}]}), *said, reward=True)
    assert (rollout.error, rollout.text) == ("", "3 o'clock")
    assert '"description": "Convert time between timezones"' in prompts[0]
    assert [what for what, _ in kept.tools] == ["begun", "done", "begun", "failed"]
    assert json.loads(kept.tools[1][1])["target"]["datetime"].endswith("T03:00:00+00:00")
    assert "source_timezone" in kept.tools[3][1]  # what the server says of the argument left out


@pytest.mark.parametrize("name", ["textarena", "gem", "skyrl_gym"])
def test_a_game_of_another_package_is_played_through_the_gym(name: str) -> None:
    """By halves: every observation says only what is new, and the last step has the reward."""
    python = os.environ["PENSTOCK_TEST_GAMES"]
    if subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode:
        pytest.skip(f"{name} is not offered for this Python")
    command = [python, str(ROOT / "tests/stages/real_games.py"), name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, *steps = json.loads(done.stdout.splitlines()[-1])
    assert [end for _, _, end in steps] == [*(False for _ in steps[1:]), True]
    assert [reward for _, reward, _ in steps[:-1]] == [0.0] * (len(steps) - 1)
    if name == "skyrl_gym":
        assert (first, steps) == ([], [["", 1.0, True]])  # one turn: the answer is right
        return
    assert "Guess The Number" in first[0]["content"]
    assert len(steps) > 1
    assert all(text.count("target number is") == 1 for text, _, end in steps if not end)
    assert steps[-1][1] == 1.0
