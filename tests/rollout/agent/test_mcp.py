"""MCP servers as tools: processes and URLs, ended on every exit, called at most once."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SamplingConfig, TaskConfig
from penstock.errors import UserError
from penstock.rollout.agent.build import check_agent
from penstock.rollout.agent.tools import make
from penstock.store.journal.calls import ToolResult
from stages import mcp_server
from stages.agent_parts import play, tool_call

FILE = str(Path(mcp_server.__file__))
SERVER = {"command": [sys.executable, FILE]}


SDK_SERVER = [sys.executable, str(Path(FILE).with_name("sdk_server.py"))]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the SDK behind a URL."""
    monkeypatch.setenv("MCP_TOKEN", "secret")
    with subprocess.Popen([*SDK_SERVER, "0"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "running on" in line)
        yield re.findall(r"http://\S+", line)[0] + "/mcp"
        server.kill()


def test_the_tools_of_a_process_are_described_and_called() -> None:
    function = make("o", {"mcp": [SERVER]})
    said = [tool_call("add", a=2, b=3), tool_call("pid"), tool_call("fail"), "5"]
    rollout, kept, prompts = play(function, *said, reward=True)
    assert (rollout.error, rollout.text) == ("", "5")
    assert '"description": "Add two numbers."' in prompts[0]
    assert '"name": "die"' in prompts[0]  # of the second page
    assert prompts[1].endswith("<turn>tool\n5<eos><turn>assistant\n")
    assert '"error": "ToolRefused: it failed"' in prompts[3]
    assert [what for what, _ in kept.tools] == ["begun", "done", "begun", "done", "begun", "failed"]
    pid = int(kept.tools[3][1])
    assert not Path(f"/proc/{pid}").exists()  # it ended with the rollout


def test_a_process_gets_the_environment_variables_that_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "secret")
    function = make("o", {"mcp": [{**SERVER, "variables": ["SEARCH_KEY"]}]})
    _, kept, _ = play(function, tool_call("names"), "done", reward=True)
    names = str(kept.tools[1][1]).split()
    assert "SEARCH_KEY" in names
    assert "PATH" in names
    assert "OPENAI_API_KEY" not in names


def test_the_tools_of_a_url_are_called_with_its_token(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = make("o", {"mcp": [{"url": url, "token_variable": "MCP_TOKEN"}]})
    rollout, kept, _ = play(function, tool_call("add", a=2, b=3), "5", reward=True)
    assert (rollout.error, rollout.text) == ("", "5")
    assert kept.tools == [("begun", "add"), ("done", "5")]
    monkeypatch.setenv("MCP_TOKEN", "another")
    rollout, _, _ = play(function, "never said", reward=True)
    assert f"MCP server {url}: " in rollout.error


def test_a_url_that_ends_in_a_call_fails_the_rollout(url: str) -> None:
    function = make("o", {"mcp": [{"url": url, "token_variable": "MCP_TOKEN"}]})
    for _ in ("it dies", "it is dead"):
        rollout, kept, prompts = play(function, tool_call("die"), "never said", reward=True)
        assert f"ServerFault: MCP server {url}: " in rollout.error
        assert [what for what, _ in kept.tools] in ([], ["begun", "unknown"])  # no call stays begun
    assert not prompts


@pytest.mark.slow
def test_a_server_of_the_sdk_is_called_over_its_pipes() -> None:
    function = make("o", {"mcp": [{"command": SDK_SERVER}]})
    rollout, kept, prompts = play(
        function, tool_call("add", a=2, b=3), tool_call("add", a=2), "5", reward=True
    )
    assert (rollout.error, rollout.text) == ("", "5")
    assert '"description": "Add two numbers."' in prompts[0]
    assert [what for what, _ in kept.tools] == ["begun", "done", "begun", "failed"]
    assert "ToolRefused" in kept.tools[3][1]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'penstock\[mcp\]'"):
        make("o", {"mcp": [SERVER]})


def test_an_error_of_the_rollout_is_told_as_it_is() -> None:
    """The SDK's task groups do not wrap it."""
    rollout, _, _ = play(make("o", {"mcp": [SERVER]}), reward=True)  # the policy has nothing to say
    assert "IndexError: pop from empty list" in rollout.error


def test_functions_and_servers_work_together(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        'def double(a: int) -> int:\n    """Double.\n\n    Args:\n        a: it\n    """\n    return 2 * a\n'
    )
    function = make("o", {"functions": [f"{file}:double"], "mcp": [SERVER]})
    said = [tool_call("double", a=2) + tool_call("add", a=2, b=3), "done"]
    _, kept, _ = play(function, *said, reward=True)
    assert [result for what, result in kept.tools if what == "done"] == ["4", "5"]
    rollout, _, _ = play(make("o", {"mcp": [SERVER, SERVER]}), "done", reward=True)
    assert "got two tools with the name add, allowed: one" in rollout.error


def test_a_server_that_dies_fails_the_rollout_and_tells_the_policy_nothing() -> None:
    function = make("o", {"mcp": [SERVER]})
    rollout, _, prompts = play(function, tool_call("die"), "never said", reward=True)
    assert "it ended: no more" in rollout.error
    assert len(prompts) == 1
    rollout, _, _ = play(make("o", {"mcp": [{"command": ["false"]}]}), "never", reward=True)
    assert "MCP server false: it ended" in rollout.error


@pytest.mark.parametrize(("unknown", "called"), [("fail", 0), ("retry", 1), ("rebuild", 1)])
def test_after_a_crash_a_call_is_made_as_its_server_says(
    tmp_path: Path, unknown: str, called: int
) -> None:
    note = tmp_path / "keys"
    server = {"command": [sys.executable, FILE, str(note)], "unknown": unknown}
    said = [tool_call("add", a=2, b=3), "5"]
    play(make("o", {"mcp": [server]}), *said, reward=True)
    (key,) = note.read_text().split()
    note.write_text("")
    before = ToolResult(call_id=key, name="add", outcome=None, result=None)
    rollout, _, _ = play(make("o", {"mcp": [server]}), *said, reward=True, interrupted=[before])
    assert ("begun before a crash" in rollout.error) == (called == 0)
    assert note.read_text().split() == [key] * called


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("server.py", "got 'server.py', allowed: a list"),
        ([{}], "allowed: a command, a list of words, or a url"),
        ([{"command": ["a"], "url": "http://b"}], "allowed: a command, a list of words, or a url"),
        ([{"url": "ftp://b"}], "allowed: http://HOST:PORT or https://HOST"),
        ([{"command": ["a"], "colour": 1}], "mcp.colour: got 1, allowed: the keys command, url, "),
        (
            [{"command": ["a"], "unknown": "maybe"}],
            "got 'maybe', allowed: 'fail', 'retry' or 'rebuild'",
        ),
        ([{"command": ["a"], "token_variable": "HOME"}], "got 'HOME', allowed: only with a url"),
        ([{"url": "http://b", "variables": ["HOME"]}], "allowed: only with a command"),
        ([{"command": ["a"], "variables": ["NO_SUCH"]}], "got 'NO_SUCH', allowed: an environment"),
        (
            [{"url": "http://b", "token_variable": "NO_SUCH_TOKEN"}],
            "got 'NO_SUCH_TOKEN', allowed: an environment variable that is set",
        ),
    ],
)
def test_a_mistake_in_the_option_is_named(given: Any, words: str) -> None:
    task = TaskConfig(agent="tools", agent_options={"mcp": given})
    with pytest.raises(UserError) as raised:
        check_agent("tasks.t", task, SamplingConfig())
    assert words in str(raised.value)
    assert str(raised.value).startswith("tasks.t.agent_options.mcp")


DRIVER = """
import asyncio, sys
from penstock.rollout.agent.tools import ServerConfig, Tools, open_servers

async def main():
    servers = [ServerConfig(command=sys.argv[2:])]
    tools = Tools()
    async with open_servers(servers, 60, tools):
        pid = await tools.functions["pid"](idempotency_key="k")
        open(sys.argv[1], "w").write(pid)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_driver_takes_its_servers_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    os.mkfifo(note)
    words = [sys.executable, "-c", DRIVER, str(note), *SERVER["command"]]
    driver = subprocess.Popen(words)
    handle = os.pidfd_open(int(note.read_text()))
    driver.kill()
    driver.wait()
    assert select.select([handle], [], [], 60)[0]  # it has ended
    os.close(handle)
