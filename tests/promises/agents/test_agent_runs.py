"""Whole runs of agents, from `penstock train` to the audit; killed and resumed to the same weights."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.store.journal import Journal
from penstock.store.run_folder import RunFolder
from stages.browser import BROWSER, open_page
from stages.chat_policy import NO_END, TEMPLATE, save_chat_policy
from stages.tiny_run import KILLED, SEED, CrashServer, assert_sound, digests

DATA = Path(__file__).parents[2] / "stages" / "sums.jsonl"
AGENT = """
async def rollout(task, model, question="more?"):
    messages = list(task.messages)
    for _ in range(3):
        said = await model.chat(messages)
        messages += [said, {"role": "user", "content": question}]
    call = {"id": "count", "function": {"name": "count", "arguments": {"text": said["content"]}}}
    number = await model.tool(call, count, unknown="retry")
    return float(number) % 3

def count(text):
    return len(text)
"""


@pytest.fixture(scope="module")
def server(server: CrashServer, tmp_path_factory: pytest.TempPathFactory) -> CrashServer:
    folder = tmp_path_factory.mktemp("agents")
    for name, template in (("policy", TEMPLATE), ("endless", NO_END)):
        save_chat_policy(folder / name, template)
    (folder / "agent.py").write_text(AGENT)
    return server.at(folder)


def overrides(server: CrashServer, policy: str = "policy", **more: str) -> list[str]:
    values = {
        "model.path": server.folder / policy,
        "tasks.train.agent": f"{server.folder / 'agent.py'}:rollout",
        "tasks.train.agent_options": '{question="and?", max_turns=3, timeout_s=60}',
        "tasks.train.max_prompt_tokens": "300",
        "sampling.max_tokens": "60",
        "sampling.stop": json.dumps(list("abcdefghijklmnopqrst")),  # a random policy seldom ends
        "produce.strategy": "sync",
        **more,
    }
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def whole(server: CrashServer) -> RunFolder:
    run, code = server.train("whole", *overrides(server))
    assert code == 0, server.output()
    (server.folder / "commits").write_text(str(server.counts()["before journal commit"]))
    return run


@pytest.mark.slow
def test_an_agents_run_trains_its_sampled_tokens_and_balances(
    server: CrashServer, whole: RunFolder
) -> None:
    assert_sound(whole)
    assert server.run("audit", str(whole.path)) == 0, server.output()
    proved = [line for line in server.output().splitlines() if line.startswith(("agents:", "tool"))]
    assert proved[0].startswith("agents: 16 rollouts, 16 rows: every id was given to an engine (")
    assert proved[1] == "tool calls: 16 begun = 16 done + 0 failed + 0 unknown"
    with closing(Journal.open(whole.journal, readonly=True)) as journal:
        batch = journal.batch(1)
        for rollout in batch.rollouts:
            (row,) = rollout.rows  # three turns, one row
            assert 0 < rollout.num_sampled < len(rollout.response_ids)
            calls = journal.calls(rollout.rollout_id.rpartition(".")[0])
            made = calls[rollout.rollout_id, rollout.seed]
            assert [call.parent for call in made] == [None, 0, 1]
            ids = [part for call in made for part in (call.context_ids, call.token_ids)]
            whole_row = np.concatenate([row.prompt_ids, rollout.response_ids])
            assert whole_row.tolist() == np.concatenate(ids).tolist()
        tools = journal.query("SELECT outcome, count(*) FROM tools GROUP BY 1")
        assert [outcome for outcome, _ in tools] == ["done"]
    metrics = [json.loads(line) for line in whole.metrics.read_text().splitlines()]
    assert max(step["mismatch/kl"] for step in metrics) < 1e-4  # trained on what was sampled


IMPATIENT = """
import asyncio, json, urllib.parse

async def rollout(task, model):
    body = json.dumps({"messages": [{"role": "user", "content": "lost"}], "max_tokens": 1})
    where = urllib.parse.urlsplit(model.base_url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nAuthorization: Bearer {model.api_key}\\r\\n"
    writer.write(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    writer.close()  # hangs up before the answer, which is one token and comes first
    messages = list(task.messages)
    for _ in range(2):
        said = await model.chat(messages)
        messages += [said, {"role": "user", "content": "and?"}]
    return float(len(said["content"]) % 3)
"""


def test_an_answer_whose_client_hung_up_is_not_trained_and_the_audit_says_so(
    server: CrashServer,
) -> None:
    (server.folder / "impatient.py").write_text(IMPATIENT)
    agent = f"{server.folder / 'impatient.py'}:rollout"
    words = overrides(server, tasks__train__agent=agent, tasks__train__agent_options="{}")
    run, code = server.train("impatient", *words, "train.steps=1")
    assert code == 0, server.output()
    assert server.run("audit", str(run.path)) == 0, server.output()
    (line,) = [line for line in server.output().splitlines() if line.startswith("agents:")]
    assert line.startswith("agents: 4 rollouts, 4 rows: every id was given to an engine")
    assert line.endswith("; 4 calls never reached their agent and are not trained")
    assert server.run("rollouts", str(run.path), "--limit", "8") == 0
    assert "lost" not in server.output()


def test_the_rollouts_of_an_agent_are_shown_as_turns(server: CrashServer, whole: RunFolder) -> None:
    assert server.run("rollouts", str(whole.path), "--limit", "1") == 0
    shown = server.output()
    assert shown.count("user: and?") == 2
    assert shown.count("assistant: ") == 3
    assert server.run("rollouts", str(whole.path), "--limit", "1", "--json") == 0
    (sample,) = [json.loads(line) for line in server.output().splitlines()]
    assert [turn["role"] for turn in sample["turns"]] == ["user", "assistant"] * 3
    assert [turn["parent"] for turn in sample["turns"][::2]] == [None, 0, 1]


@pytest.mark.slow
def test_an_agent_is_evaluated_in_training_and_by_the_command(server: CrashServer) -> None:
    agent = f"{server.folder / 'agent.py'}:rollout"
    held = f'{{data="{DATA}", agent="{agent}", agent_options={{max_turns=3, timeout_s=60}}}}'
    words = [*overrides(server), "train.steps=1", f"eval.tasks.held={held}", "eval.max_problems=3"]
    run, code = server.train("judged", *words)
    assert code == 0, server.output()
    lines = [
        json.loads(text) for text in (run.evaluations / "summary.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["turns"], line["failures"]) for line in lines] == [
        (0, 3, 0),
        (1, 3, 0),
    ]
    assert server.run("rollouts", str(run.path), "--task", "eval/held", "--limit", "1") == 0
    shown = server.output()
    assert shown.count("user: more?") == 2
    assert "evaluated after step 1" in shown
    assert server.run("rollouts", str(run.path), "--task", "eval/other") == 2
    assert "allowed: eval/held" in server.output()
    assert server.run("eval", str(run.path)) == 0, server.output()
    assert "turns" in server.output()
    assert server.run("eval", str(run.path), f"eval.tasks.held.agent={agent}s") == 2
    assert "eval.tasks.held.agent" in server.output()


def scores(run: RunFolder) -> dict[str, float]:
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        return dict(journal.query("SELECT rollout_id, reward FROM rollouts"))


@pytest.mark.slow
def test_a_fork_scores_the_recorded_trees_again_and_samples_nothing(
    server: CrashServer, whole: RunFolder
) -> None:
    other = server.folder / "other.py"
    other.write_text(AGENT.replace("% 3", "% 3 + 10").replace("len(text)", "1 / 0"))
    agent = f"tasks.train.agent={other}:rollout"
    assert server.run("replay", str(whole.path), "run.name=played", agent) == 0, server.output()
    fork = RunFolder(server.folder / "played")
    before = scores(whole)
    trained = {name: reward - 10 for name, reward in scores(fork).items()}
    assert trained == {name: before[name] for name in trained}  # `count` was not called again
    assert server.run("audit", str(fork.path)) == 0, server.output()
    assert "agents: 16 rollouts, 16 rows: every id was given to an engine" in server.output()
    assert server.run("rollouts", str(fork.path), "--limit", "1") == 0
    assert server.output().count("user: and?") == 2

    other.write_text("def odd(response, prompt):\n    return float(len(response) % 2)\n")
    rewards = f'tasks.train.rewards=[{{type="{other}:odd"}}]'
    words = ["run.name=judged-again", rewards, "--algo", "rloo"]
    assert server.run("replay", str(whole.path), *words) == 0, server.output()
    assert set(scores(RunFolder(server.folder / "judged-again")).values()) <= {0.0, 1.0}

    options = 'tasks.train.agent_options={question="why?", max_turns=3, timeout_s=60}'
    assert server.run("replay", str(whole.path), "run.name=asks", options) == 2
    assert "got 0 recorded groups" in server.output()
    assert "16 rollouts could not be scored: agent: EngineError: the agent asks" in server.output()


TALKER = """
async def rollout(task, model, payload):
    call = {"id": payload, "type": "function", "function": {"name": payload, "arguments": payload}}
    messages = [
        *task.messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": payload, "content": payload},
    ]
    said = await model.chat(messages)
    model.reward(0.25)
    await model.chat([*messages, said, {"role": "user", "content": "and?"}])
    await model.chat(task.messages)
    return 0.5
"""
PAYLOAD = "</script><img src=x onerror=document.documentElement.dataset.pwned=1>"


@pytest.fixture(scope="module")
def talked(server: CrashServer) -> RunFolder:
    """A run of an agent with tool calls, a reward of a turn and a branch, all of them hostile."""
    (server.folder / "talker.py").write_text(TALKER)
    more = {
        "tasks.train.agent": f"{server.folder / 'talker.py'}:rollout",
        "tasks.train.agent_options": json.dumps({"payload": PAYLOAD}).replace('":', '" ='),
        "tasks.train.max_prompt_tokens": "400",
        "train.steps": "1",
    }
    run, code = server.train("talked", *overrides(server, **more))
    assert code == 0, server.output()
    return run


def test_a_conversation_shows_tool_calls_rewards_and_branches(
    server: CrashServer, talked: RunFolder
) -> None:
    assert server.run("rollouts", str(talked.path), "--limit", "1") == 0
    shown = [line.strip() for line in server.output().splitlines()]
    assert f"assistant calls {PAYLOAD}({PAYLOAD})" in shown
    assert f"tool: {PAYLOAD}" in shown
    reward, branch = (
        shown.index("-- reward 0.25 so far"),
        shown.index("-- call 2: a new conversation"),
    )
    assert shown[reward + 1] == "user: and?"
    assert reward < branch


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_report_draws_a_conversation_as_turns_and_runs_nothing_of_it(
    server: CrashServer, talked: RunFolder, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    assert server.run("report", str(talked.path), "--out", str(out)) == 0, server.output()
    page = open_page(out, tmp_path / "profile")
    assert (page.root.get("data-ready"), page.root.get("data-error")) == ("yes", None)
    assert "data-pwned" not in page.root
    assert not page.all("img")
    assert set(page.texts["tool-call"]) == {f"{PAYLOAD}({PAYLOAD})"}
    assert page.texts["said"].count(PAYLOAD) == len(page.texts["tool-call"])  # the tool's result
    assert set(page.texts["earned"]) == {"reward 0.25 so far"}
    assert set(page.texts["branch"]) == {"call 2: a new conversation"}
    kinds = [given["class"] for given in page.all("li", call="0")][:4]
    assert kinds == ["turn user", "turn assistant", "turn tool", "turn assistant"]


def test_a_template_that_cannot_be_bridged_trains_a_row_per_turn(server: CrashServer) -> None:
    run, code = server.train("rows", *overrides(server, "endless"), "train.steps=1")
    assert code == 0, server.output()
    assert "rendered whole, each trained as a row of its own" in (run.logs / "run.log").read_text()
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        assert {len(rollout.rows) for rollout in journal.batch(1).rollouts} == {3}
    (step,) = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert step["mismatch/kl"] < 1e-4


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 25))]
)
def test_a_killed_run_ends_with_the_same_weights_and_samples_no_call_twice(
    server: CrashServer, whole: RunFolder, number: int
) -> None:
    choice = random.Random(SEED + number)
    most = int((server.folder / "commits").read_text()) // 2  # records may share a commit
    where = choice.choice(["before journal commit", "after journal commit"])
    run, code = server.train(
        f"killed-{number}", *overrides(server), point=where, number=choice.randint(2, most)
    )
    assert code == KILLED
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        before = journal.query("SELECT rollout_id, seed, number, at FROM calls")
    assert server.run("resume", str(run.path)) == 0, server.output()
    with closing(Journal.open(run.journal, readonly=True)) as journal:
        assert set(before) <= set(journal.query("SELECT rollout_id, seed, number, at FROM calls"))
    assert_sound(run)
    assert digests(run) == digests(whole)
    assert server.run("audit", str(run.path)) == 0, server.output()


def test_a_mistake_in_the_agent_is_one_line_before_anything_starts(server: CrashServer) -> None:
    for more, words in (
        ({"tasks.train.agent": f"{server.folder / 'agent.py'}:missing"}, "has no 'missing'"),
        ({"tasks.train.agent_options": "{colour=1}"}, "unexpected keyword argument 'colour'"),
        ({"sampling.min_tokens": "2"}, "sampling.min_tokens got 2 with an agent"),
    ):
        _, code = server.train("mistake", *overrides(server, **more))
        assert code == 2
        assert words in server.output()
        assert len(server.output().strip().splitlines()) == 1


SHARED = """
turns = []

async def rollout(task, model):
    said = await model.chat(task.messages)
    turns.append(said)
    await model.chat([*task.messages, said, {"role": "user", "content": str(len(turns))}])
    return float("nan") if len(turns) == 3 else 1.0
"""


def test_a_check_passes_a_good_agent_and_names_what_a_bad_one_does(server: CrashServer) -> None:
    settings = overrides(server, **{"tasks.train.data": str(DATA)})
    assert server.run("agent", "check", *settings) == 0, server.output()
    assert server.output().count("ok   train: ") == 9
    (server.folder / "shared.py").write_text(SHARED)
    bad = f"tasks.train.agent={server.folder / 'shared.py'}:rollout"
    assert server.run("agent", "check", *settings, bad, "tasks.train.agent_options={}") == 1
    said = server.output()
    assert "FAIL train: the same seed and answers give the same observations" in said
    assert "FAIL train: two rollouts share nothing" in said
    assert "got the reward nan, allowed: a finite number" in said
    (server.folder / "raises.py").write_text("async def rollout(task, model):\n    1 / 0")
    words = [f"tasks.train.agent={server.folder / 'raises.py'}:rollout"]
    words += [f"model.path={server.folder / 'endless'}", "tasks.train.agent_options={}"]
    assert server.run("agent", "check", *settings, *words) == 1, server.output()
    said = server.output()
    assert said.count("note train: turns (user, tool, tool after words) are rendered whole") == 1
    assert said.count("FAIL train: ") == 1  # every check fails for the same reason
    assert server.run("agent", "check") == 2
    assert "got no task with an agent" in server.output()
