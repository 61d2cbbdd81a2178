"""What one model call of an agent costs the driver, without the model: matching, rendering, journal, HTTP.

    python benchmarks/agents.py --sessions 1000 --turns 4

All sessions run at once against an engine that answers at once with eight tokens. Processor time, not wall
time, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.agent.bridge import Bridge
from penstock.agent.endpoint import Endpoint
from penstock.agent.session import Limits, Session
from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.engine.protocol import Generation, GenerationRequest, SamplingParams
from penstock.journal import Journal
from penstock.types import Prompt, Rollout, VersionSegment


class Instant:
    """An engine that answers every request at once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._ids = np.array([*chat.encode_text("12+34=46"), chat.eos_ids[0]], dtype=np.int32)

    async def generate(self, request: GenerationRequest) -> Generation:
        size = len(self._ids)
        return Generation(
            request_id=request.request_id,
            token_ids=self._ids,
            logprobs=np.zeros(size, dtype=np.float32),
            segments=(VersionSegment(0, size),),
            finish_reason="stop",
        )

    async def abort(self, request_id: str) -> None: ...


async def talk_http(url: str, key: str, turns: int) -> None:
    """Make the calls of one agent on one connection."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages: list[Any] = [{"role": "user", "content": "12+34"}]
    for _ in range(turns):
        body = json.dumps({"messages": messages}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(answer.partition("content-length: ")[2].split("\r\n")[0])
        shown = json.loads(await reader.readexactly(size))
        messages += [shown["choices"][0]["message"], {"role": "user", "content": "again"}]
    writer.close()


async def talk_inline(session: Session, turns: int) -> None:
    """Make the same calls in process."""
    messages: list[Any] = [{"role": "user", "content": "12+34"}]
    for _ in range(turns):
        call = await session.call(messages)
        messages += [call.answer, {"role": "user", "content": "again"}]


async def measure(sessions: int, turns: int, over_http: bool) -> tuple[float, float]:
    """Return (milliseconds of processor time, of wall time) per call."""
    chat = ChatTemplate(load_tokenizer("demo"))
    prompt = Prompt("p", (), chat.encode([{"role": "user", "content": "12+34"}]))
    bridge, engine = Bridge(chat), Instant(chat)
    assert bridge.proof
    with tempfile.TemporaryDirectory() as folder:
        journal, endpoint = Journal.open(Path(folder) / "journal.db"), Endpoint()
        await endpoint.start()
        made = [
            Session(
                Rollout(rollout_id=f"t:{number}.0", prompt_ids=prompt.token_ids, seed=number),
                engine=engine,  # type: ignore[arg-type]
                bridge=bridge,
                sampling=SamplingParams(),
                limits=Limits(max_turns=turns),
                recorder=journal,
            )
            for number in range(sessions)
        ]
        keys = [endpoint.open(session) for session in made]
        used, started = time.process_time(), time.perf_counter()
        if over_http:
            await asyncio.gather(*(talk_http(endpoint.base_url, key, turns) for key in keys))
        else:
            await asyncio.gather(*(talk_inline(session, turns) for session in made))
        used, took = time.process_time() - used, time.perf_counter() - started
        assert all(len(session.tree.calls) == turns for session in made)
        await endpoint.close()
        journal.close()
    calls = sessions * turns
    return used / calls * 1e3, took / calls * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(least, 4 * given.sessions)), most))
    for name, over_http in (("in process", False), ("over HTTP, client included", True)):
        processor, wall = asyncio.run(measure(given.sessions, given.turns, over_http))
        print(f"{name}: {processor:.2f} ms of processor time per call, {wall:.2f} ms of wall time")


if __name__ == "__main__":
    main()
