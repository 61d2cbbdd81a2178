"""What one model call of an agent costs the driver, without the model: matching, bridge, parsing, journal, HTTP.

    python benchmarks/agents.py --sessions 1000 --turns 8
    python benchmarks/agents.py --turns 8 --observation-tokens 512 --sessions 64
    python benchmarks/agents.py --turns 8 --observation-tokens 512 --sessions 64 --device cuda --shape qwen0.5b

All sessions run at once, on the bridged path: each answer is a tool call, each next request brings its
result. The engine answers at once. Over HTTP the agents are a process of their own. Processor time of the
driver, not wall time, so that other work on the machine changes little. The memory is that of the driver
after so many sessions, and after as many again.
With --observation-tokens, what the turns cost a real engine: each turn brings so many new tokens, and the
engine should compute these alone. Sampled tokens are not counted as new. --forget keeps nothing between turns.
--vllm PYTHON runs the same sessions on vLLM with its prefix cache, in an environment that has it
(scripts/test_vllm.sh builds one).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import make_model

from penstock.data.chat import ChatTemplate, load_tokenizer
from penstock.engine.protocol import (
    Generation,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from penstock.engine.transformers.engine import TransformersEngine
from penstock.engine.transformers.options import Load, TransformersOptions
from penstock.rollout.agent.bridge import Bridge
from penstock.rollout.agent.endpoint import Endpoint
from penstock.rollout.agent.session import Limits, Session
from penstock.store.journal import Journal
from penstock.types import Prompt, Rollout, VersionSegment

POLICY = Path(__file__).parents[1] / "examples" / "calculator" / "policy"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
Say = Callable[[list[Any]], Awaitable[Any]]


class Instant:
    """An engine that answers every request at once."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._ids = np.array([*chat.encode_text(CALL), chat.eos_ids[0]], dtype=np.int32)

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


async def talk(say: Say, turns: int) -> None:
    """Make the calls of one agent; `say` returns the answer to a conversation."""
    messages: list[Any] = [{"role": "user", "content": "12+34"}]
    for _ in range(turns):
        answer = await say(messages)
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "46"}
        messages += [answer, result]


async def talk_http(url: str, key: str, turns: int) -> None:
    """Make the calls of one agent on one connection."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def say(messages: list[Any]) -> Any:
        body = json.dumps({"messages": messages, "tools": TOOLS}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(answer.partition("content-length: ")[2].split("\r\n")[0])
        return json.loads(await reader.readexactly(size))["choices"][0]["message"]

    await talk(say, turns)
    writer.close()


async def talk_inline(session: Session, turns: int) -> None:
    """Make the same calls in process."""

    async def say(messages: list[Any]) -> Any:
        return (await session.call(messages, TOOLS)).answer

    await talk(say, turns)


async def agents(url: str, turns: int) -> None:
    """Be the agents: one per key on standard input."""
    await asyncio.gather(*(talk_http(url, key, turns) for key in sys.stdin.read().split()))


async def start_agents(url: str, keys: list[str], turns: int) -> None:
    """Run the agents in a process of their own, to their end."""
    words = (sys.executable, __file__, "--turns", str(turns), "--agents", url)
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE)
    await process.communicate("\n".join(keys).encode())
    assert process.returncode == 0


async def measure(sessions: int, turns: int, over_http: bool) -> tuple[float, float]:
    """Return (milliseconds of processor time, of wall time) per call; a lost session is an error."""
    chat = ChatTemplate(load_tokenizer(POLICY))
    prompt = Prompt("p", (), chat.encode([{"role": "user", "content": "12+34"}]))
    bridge, engine = Bridge(chat), Instant(chat)
    assert not any(bridge.proof.values()), "the bridge is not proved"
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
            await start_agents(endpoint.base_url, keys, turns)
        else:
            await asyncio.gather(*(talk_inline(session, turns) for session in made))
        used, took = time.process_time() - used, time.perf_counter() - started
        assert all(len(session.tree.calls) == turns for session in made), "a session lost calls"
        assert all(len(session.tree.leaves()) == 1 for session in made), "it was rendered whole"
        await endpoint.close()
        journal.close()
    calls = sessions * turns
    return used / calls * 1e3, took / calls * 1e3


SAMPLED = 16  # tokens of an answer
FIELDS = {"max_position_embeddings": 1 << 16, "eos_token_id": None}


async def converse(engine: InferenceEngine, number: int, turns: int, observed: int) -> None:
    """Run one session on a real engine, on token ids."""
    draw = np.random.default_rng(number)
    context = np.zeros(0, np.int32)
    for turn in range(turns):
        context = np.concatenate([context, draw.integers(2, 60, observed, dtype=np.int32)])
        request = GenerationRequest(
            request_id=f"{number}.{turn}",
            prompt_ids=context,
            sampling=SamplingParams(max_tokens=SAMPLED, min_tokens=SAMPLED),
            seed=number,
            session=str(number),
        )
        made = await engine.generate(request)
        assert len(made.token_ids) == SAMPLED, made.error
        context = np.concatenate([context, made.token_ids])


def our_engine(given: argparse.Namespace, longest: int) -> TransformersEngine:
    """Penstock's engine with random weights."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    load = Load(requests=given.sessions, longest=longest, sessions=True)
    on_gpu = {"max_slots": 0, "load": load} if given.device == "cuda" else {}
    return TransformersEngine(
        lambda: make_model(given.shape, dtype, given.device, "penstock", **FIELDS).eval(),
        fetch=lambda _: [],
        options=TransformersOptions(device=given.device, **on_gpu),
    )


def vllm_engine(given: argparse.Namespace, longest: int) -> InferenceEngine:
    """vLLM with its prefix cache, on the model in a folder."""
    from penstock.engine.vllm.engine import VllmEngine
    from penstock.engine.vllm.options import VllmOptions

    options = VllmOptions(
        path=given.folder,
        dtype="bfloat16" if given.device == "cuda" else "float32",
        max_slots=given.sessions,
        max_model_len=longest,
        gpu_memory_utilization=0.5,
        extra={"skip_tokenizer_init": True, "enable_prefix_caching": True},
    )
    return VllmEngine(options, fetch=lambda _: [])


async def measure_engine(given: argparse.Namespace) -> str:
    """Run all sessions at once; return what they cost."""
    sessions, turns, observed = given.sessions, given.turns, given.observation_tokens
    engine = (vllm_engine if given.folder else our_engine)(given, turns * (observed + SAMPLED) + 64)
    await engine.start()
    if given.forget:
        engine._live_runner._tree._most_tokens = 0  # type: ignore[attr-defined]
    await converse(engine, sessions, 2, observed)  # compiles kernels
    before = (await engine.stats()).tokens_prefilled
    used, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(converse(engine, number, turns, observed) for number in range(sessions)))
    used, took = time.process_time() - used, time.perf_counter() - started
    prefilled = (await engine.stats()).tokens_prefilled - before
    new = sessions * turns * observed
    await engine.close()
    if given.folder:  # vLLM computes in processes of its own, and counts elsewhere
        return f"vLLM: {sessions / took:.2f} sessions per second by the clock"
    return (
        f"{prefilled:,} tokens prefilled / {new:,} new = {prefilled / new:.3f}; "
        f"{sessions / used:.2f} sessions per CPU second, {sessions / took:.2f} by the clock"
    )


def measure_vllm(given: argparse.Namespace) -> None:
    """Run the same sessions with the same model in vLLM's environment."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(given.shape, torch.bfloat16, given.device, **FIELDS).save_pretrained(folder)
        words = [word for word in sys.argv[1:] if word not in ("--vllm", given.vllm)]
        settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        subprocess.run(
            [given.vllm, __file__, *words, "--folder", folder],
            env={**settings, "VLLM_CPU_KVCACHE_SPACE": "4", **os.environ},
            check=True,
        )


def resident_mib() -> float:
    """The memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--observation-tokens", type=int, default=0, help="of each turn; real engine"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", default="demo", help="of the real engine's model, see shapes.py")
    parser.add_argument("--forget", action="store_true", help="real engine: keep nothing")
    parser.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--agents", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(least, 4 * given.sessions)), most))
    if given.agents:
        asyncio.run(agents(given.agents, given.turns))
        return
    if given.observation_tokens:
        print(asyncio.run(measure_engine(given)), flush=True)
        if given.vllm:
            measure_vllm(given)
        return
    for name, over_http in (("in process", False), ("over HTTP", True)):
        for _ in range(2):
            processor, wall = asyncio.run(measure(given.sessions, given.turns, over_http))
            print(
                f"{name}: {processor:.2f} ms of processor time per call, {wall:.2f} ms of wall time; "
                f"{given.sessions} sessions whole, {resident_mib():.0f} MiB after them"
            )


if __name__ == "__main__":
    main()
