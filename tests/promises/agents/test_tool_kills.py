"""Runs with tools, killed at random moments: balanced, certified, and no tool called twice.

A small policy that calls its calculator in a quarter of its rollouts; the calculator is a function in the
loop, or an MCP server. Each call notes its key in a file outside the run.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import closing
from pathlib import Path

import pytest

from penstock.store.journal import Journal
from stages import mcp_server
from stages.tiny_run import KILLED, SEED, CrashServer, assert_sound

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "calculator"
STEPS, GROUPS, ROLLOUTS = 2, 2, 8
QUICK = ("function", 0)
FUNCTION = '''
def add(a: int, b: int, idempotency_key: str) -> int:
    """
    Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    with open(NOTE, "a") as file:
        file.write(idempotency_key + "\\n")
    return a + b
'''


@pytest.fixture(scope="module")
def server(server: CrashServer, tmp_path_factory: pytest.TempPathFactory) -> CrashServer:
    return server.at(tmp_path_factory.mktemp("tools"))


def words(server: CrashServer, kind: str, name: str) -> tuple[list[str], Path]:
    """Return the settings of a run, and the file where its tool notes each call."""
    note = server.folder / f"{name}.keys"
    note.touch()
    if kind == "function":
        file = server.folder / f"{name}_tool.py"
        file.write_text(FUNCTION.replace("NOTE", repr(str(note))))
        options = f'{{functions=["{file}:add"], max_turns=3, timeout_s=60}}'
    else:
        command = json.dumps([sys.executable, mcp_server.__file__, str(note)])
        options = f"{{mcp=[{{command={command}}}], max_turns=3, timeout_s=60}}"
    data = server.folder / "sums.jsonl"
    if not data.exists():
        sums = [(100 + 7 * n, 200 + 11 * n) for n in range(16)]
        lines = [
            {"messages": [{"role": "user", "content": f"{a}+{b}"}], "gt_answer": str(a + b)}
            for a, b in sums
        ]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        f"model.path={EXAMPLE / 'policy'}",
        "model.dtype=float32",
        f"tasks.train.data={data}",
        "tasks.train.agent=tools",
        f"tasks.train.agent_options={options}",
        f"tasks.train.rewards=[{{type='{EXAMPLE / 'calc.py'}:right'}}]",
        "tasks.train.max_prompt_tokens=60",
        "sampling.max_tokens=16",
        f"sampling.num_generations={ROLLOUTS}",
        f"train.groups_per_step={GROUPS}",
        f"train.steps={STEPS}",
        "produce.strategy=sync",
    ], note


@pytest.fixture(scope="module")
def commits(server: CrashServer) -> int:
    """Return the commits of a run that is not killed."""
    settings, note = words(server, "function", "whole")
    run, code = server.train("whole", *settings)
    assert code == 0, server.output()
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        (done,) = journal.query("SELECT count(*) FROM tools WHERE outcome = 'done'")[0]
    assert len(note.read_text().split()) == done > 4  # it calls in a quarter of its rollouts
    return server.counts()["before journal commit"]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(kind, number, marks=[] if (kind, number) == QUICK else [pytest.mark.slow])
        for number in range(13)
        for kind in ("function", "mcp")
    ],
)
def test_a_killed_run_calls_no_tool_twice(
    server: CrashServer, commits: int, kind: str, number: int
) -> None:
    name = f"{kind}-{number}"
    settings, note = words(server, kind, name)
    choice = random.Random(f"{SEED} {name}")
    point = choice.choice(["before journal commit", "after journal commit"])
    most = commits // 2  # records may share a commit
    run, code = server.train(name, *settings, point=point, number=choice.randint(2, most))
    assert code == KILLED
    assert server.run("resume", str(run.path)) == 0, server.output()
    assert_sound(run, steps=STEPS, groups=GROUPS)
    assert server.run("audit", str(run.path)) == 0, server.output()
    assert f"agents: {STEPS * GROUPS * ROLLOUTS} rollouts" in server.output()
    keys = note.read_text().split()
    assert len(keys) == len(set(keys))  # at most once
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        counts = dict(journal.query("SELECT outcome, count(*) FROM tools GROUP BY 1"))
        done = {key for (key,) in journal.query("SELECT call_id FROM tools WHERE outcome='done'")}
    assert done <= set(keys)
    begun, unknown = sum(counts.values()), counts.get(None, 0)
    ended = " + ".join(f"{counts.get(one, 0)} {one}" for one in ("done", "failed"))
    assert f"tool calls: {begun} begun = {ended} + {unknown} unknown" in server.output()
