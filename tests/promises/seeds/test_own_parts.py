"""Parts of the user's own in a run: the strategy and the rules of docs/async.md, a verifier by URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.reward.sandbox.serve import CheckRequest
from stages.command_runs import CommandRun, train
from stages.markdown_page import read_page
from stages.rewards import ODD_REWARD
from stages.tiny_run import GROUPS, STEPS

DOCS = Path(__file__).parents[3] / "docs"


def documented(name: str) -> str:
    """Return the Python block of docs/async.md that begins with the file's name."""
    blocks = read_page(DOCS / "async.md").of_language("python")
    return next(block.text for block in blocks if block.text.startswith(f"# {name}"))


def test_the_documented_strategy_trains_a_run(tmp_path: Path) -> None:
    own = tmp_path / "in_pairs.py"
    own.write_text(documented("in_pairs.py"))
    run = train(tmp_path, "own", f"produce.strategy={own}:InPairs", "produce.max_staleness=1")
    assert run.code == 0, run.told
    assert len(run.metrics) == STEPS
    ((drawn, trained),) = run.query("SELECT COUNT(*), SUM(state = 'trained') FROM groups")
    assert trained == STEPS * GROUPS <= drawn
    assert run.total("tasks/train/samples") == 2 * drawn


class Verifier(BaseHTTPRequestHandler):
    """Answers like ColossalAI's code verifier, at one path only."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = CheckRequest.model_validate_json(body)
        self.asked.append({"path": self.path, **request.model_dump()})
        passes = len(request.generation) % 2
        answer = json.dumps({"result": [1, passes], "metadata": [{"note": ""}, {"note": "no"}]})
        self.send_response(200 if self.path == "/check_correctness" else 404)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRun]:
    folder = tmp_path_factory.mktemp("verified")
    data = folder / "code.jsonl"
    cases = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    lines = [
        {"messages": [{"role": "user", "content": f"{n}+1"}], "test_cases": cases}
        for n in range(10, 20)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Verifier)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/check_correctness"
    code = f"[{{type='code', options={{servers=['{url}'], source='response', credit='share'}}}}]"
    answer = "[{type='boxed'}]"
    boxed = folder / "boxed.jsonl"
    boxed.write_text(json.dumps({"prompt": "10+1", "gt_answer": "11"}) + "\n")
    yield train(
        folder,
        "verified",
        f"tasks.train.data={data}",
        f"tasks.train.rewards={code}",
        f"eval.tasks.code={{data='{data}', rewards={code}}}",
        f"eval.tasks.boxed={{data='{boxed}', rewards={answer}}}",
        "eval.at_start=false",
        "eval.max_problems=2",
        "sampling.num_generations=4",
        "train.steps=2",
        "sampling.max_tokens=12",
    )
    server.shutdown()
    server.server_close()


def test_a_verifier_is_given_by_its_url(verified: CommandRun) -> None:
    assert verified.code == 0, verified.told
    assert {one["path"] for one in Verifier.asked} == {"/check_correctness"}
    rewards = {value for (value,) in verified.query("SELECT DISTINCT reward FROM rollouts")}
    assert rewards >= {0.5}


def test_evaluation_lines_have_test_results_and_the_parsed_answer(verified: CommandRun) -> None:
    folder = verified.folder.evaluations
    lines = [json.loads(text) for text in (folder / "code-step-2.jsonl").read_text().splitlines()]
    judged = [line for line in lines if line["finish_reason"] == "stop"]
    for line in judged:
        assert line["parsed"] == line["prediction"]
        assert line["test_results"] in ([1, 0], [1, 1])
    (line,) = [
        json.loads(text) for text in (folder / "boxed-step-2.jsonl").read_text().splitlines()
    ]
    assert line["parsed"] is None
    assert line["note"]
    assert line["test_results"] is None


def test_parsed_is_the_answer_that_was_found() -> None:
    """A policy of this size boxes nothing: the reward is asked directly."""
    import asyncio

    from penstock.config import RewardConfig
    from penstock.reward import build_reward
    from stages.reward_samples import prompt, rollout

    async def score() -> Any:
        reward = build_reward(
            [RewardConfig(type="boxed"), RewardConfig(type=ODD_REWARD)], max_tokens=9
        )
        try:
            return await reward.score(rollout(r"so \boxed{ 12 }"), prompt("12"))
        finally:
            await reward.close()

    assert asyncio.run(score()).parsed.strip() == "12"


def test_the_server_takes_what_other_clients_send() -> None:
    sent = {"in_outs": {}, "generation": "", "timeout": 6, "debug": False, "eval_mode": True}
    assert CheckRequest.model_validate(sent).eval_mode


LOOP = '''
from penstock.rollout import AgentLoop
from penstock.rollout.agent.single_turn import SingleTurn


class Twice(AgentLoop):
    """Counts what it was asked, and lets the plain loop answer."""

    def __init__(self, **parts):
        self._plain = SingleTurn(**parts)

    async def generate(self, rollout, *, enable_partial_rollout=False):
        rollout = await self._plain.generate(rollout)
        rollout.extra["mine"] = True
        return rollout
'''


def test_an_agent_loop_for_one_sample_trains_a_run(tmp_path: Path) -> None:
    own = tmp_path / "own_loop.py"
    own.write_text(LOOP)
    run = train(tmp_path, "loop", f"tasks.train.agent={own}:Twice", "train.steps=1")
    assert run.code == 0, run.told
    with run.journal() as journal:
        assert all(rollout.extra["mine"] for rollout in journal.batch(1).rollouts)


def test_actors_of_an_agent_need_ray_and_the_class_of_a_loop(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("async def play(task, model): ...\n")
    told = train(tmp_path, "local", "tasks.train.agent_actors=1", "launch.kind=local")
    assert told.code == 2
    assert "tasks.train.agent_actors: got 1 with launch.kind = 'local', allowed: 0, or" in told.told
    told = train(tmp_path, "play", "tasks.train.agent_actors=1", f"tasks.train.agent={own}:play")
    assert told.code == 2
    assert "an agent that is the class of an agent loop" in " ".join(told.told.split())
