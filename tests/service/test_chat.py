"""A frozen model that judges: the chats of a service as the judge reward and its clients' libraries read them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from penstock.config import ModelConfig
from penstock.reward.judge import Judge, JudgeOptions
from penstock.rollout.agent.dialects import DIALECTS
from penstock.service.chat import Chats
from penstock.serving import AppServer, listen, make_app
from penstock.types import Rollout, Score
from stages.chat_policy import ScriptedEngine, save_chat_policy
from stages.rollouts import make_prompt

PROMPT = make_prompt()


def say(prompt: str) -> str:
    """Prefer responses with an even number of characters."""
    word = re.findall(r"VERDICT-[0-9a-f]{12}:", prompt)[-1]
    (response,) = re.findall(r'"response": "(\w*)"', prompt)
    return f"I counted.\n{word} {(len(response) + 1) % 2}"


def test_a_judge_reads_the_verdict_of_a_served_model(tmp_path: Path) -> None:
    engine, used = ScriptedEngine(say), list[str]()

    def check_base(name: str, key: str) -> None:
        used.append(name)

    core: Any = SimpleNamespace(
        config=SimpleNamespace(model=ModelConfig(path=str(save_chat_policy(tmp_path)))),
        models=SimpleNamespace(longest=4096),
        samplers=engine,
        base_names=["frozen"],
        check_base=check_base,
    )

    async def main() -> list[Score]:
        routes = [Route(path, Chats(core).answer, methods=["POST"]) for path in DIALECTS]
        server = AppServer(make_app(routes), connections=9, connections_per_client=9, silent_s=9)
        listening = listen("chats", "127.0.0.1", 0)
        await server.start(listening)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        options = JudgeOptions(url=url, model="frozen", rubric="Even is good.", max_tokens=77)
        judge = Judge(options, max_tokens=9)
        rollouts = [
            Rollout(rollout_id=f"t:0.{i}", prompt_ids=PROMPT.token_ids, seed=i, text="x" * i)
            for i in range(3)
        ]
        try:
            return await judge.score_group(rollouts, [PROMPT] * 3)
        finally:
            await judge.close()
            await server.close()

    scores = asyncio.run(main())
    assert [score.value for score in scores] == [1.0, 0.0, 1.0]
    assert all(score.note.startswith("I counted.") for score in scores)
    assert used == ["frozen"] * 3
    for request in engine.requests:
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 77)
